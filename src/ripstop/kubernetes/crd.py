"""The CustomResourceDefinition of ElasticJob, generated from `spec.FIELDS`.  Pure.

Rules about two fields, changes or the name are CEL expressions; Kubernetes 1.25 and later check them.  The rest
works from 1.20 on.  The operator checks everything again and reports violations as a condition.  No rule makes the
template immutable, because CEL cannot access fields that the schema does not declare.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from ripstop.kubernetes.spec import FIELDS, GROUP, KIND, MAX_NAME_CHARS, PLURAL, VERSION, Field

TYPES = {int: "integer", bool: "boolean", str: "string"}
COLUMNS = (
    ("Phase", "string", ".status.phase", 0),
    ("Nodes", "integer", ".status.readyReplicas", 0),
    ("Wanted", "integer", ".spec.replicas", 0),
    ("Round", "integer", ".status.round", 0),
    ("Restarts", "integer", ".status.restarts", 0),
    ("Goodput", "number", ".status.goodput", 1),
    ("Age", "date", ".metadata.creationTimestamp", 0),
)
RULES_SINCE = (1, 25)  # Kubernetes version
NAME_RULES = (
    (f"size(self.metadata.name) <= {MAX_NAME_CHARS}", f"metadata.name has at most {MAX_NAME_CHARS} characters"),
    (
        "self.metadata.name.matches('^[a-z][-a-z0-9]*$')",
        "metadata.name must be a service name: a-z first, then a-z, 0-9 and dashes",
    ),
)
SPEC_RULES = (
    ("self.minReplicas <= self.maxReplicas", "minReplicas must not be above maxReplicas"),
    (
        "!has(self.replicas) || (self.replicas >= self.minReplicas && self.replicas <= self.maxReplicas)",
        "replicas must be from minReplicas to maxReplicas",
    ),
    (
        "(has(self.rendezvous) && self.rendezvous.backend == 'etcd') == "
        "(has(self.rendezvous) && has(self.rendezvous.endpoints) && size(self.rendezvous.endpoints) > 0)",
        "rendezvous.endpoints are required with etcd, and only with etcd",
    ),
    *(
        (
            f"has(self.{name}) == has(oldSelf.{name}) && (!has(self.{name}) || self.{name} == oldSelf.{name})",
            f"{name} cannot be changed while the job exists; delete the job and create a new one",
        )
        for name in (*(field.name for field in FIELDS if field.fixed), "rendezvous")
    ),
)


def supports_rules(version: Mapping[str, str]) -> bool:
    """Whether a cluster with this `/version` checks CEL rules."""
    digits = (re.match("[0-9]*", version.get(part, "")) for part in ("major", "minor"))
    return tuple(int(found[0]) if found and found[0] else 0 for found in digits) >= RULES_SINCE


def definition(*, rules: bool = True) -> dict[str, Any]:
    """The definition; without `rules` for clusters older than 1.25."""
    version = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": _root(rules)},
        "subresources": {
            "status": {},
            "scale": {
                "specReplicasPath": ".spec.replicas",
                "statusReplicasPath": ".status.replicas",
                "labelSelectorPath": ".status.selector",
            },
        },
        "additionalPrinterColumns": [
            {"name": name, "type": kind, "jsonPath": path, "priority": priority}
            for name, kind, path, priority in COLUMNS
        ],
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PLURAL}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": PLURAL,
                "singular": KIND.lower(),
                "shortNames": ["ej"],
                "categories": ["all"],
            },
            "versions": [version],
        },
    }


def _root(rules: bool) -> dict[str, Any]:
    return {
        "type": "object",
        "description": "A fault-tolerant, elastic PyTorch job.",
        "required": ["spec"],
        "properties": {"spec": _spec(rules), "status": _status()},
        **(_validations(NAME_RULES) if rules else {}),
    }


def _validations(rules: Iterable[tuple[str, str]]) -> dict[str, Any]:
    return {"x-kubernetes-validations": [{"rule": rule, "message": message} for rule, message in rules]}


def _spec(rules: bool) -> dict[str, Any]:
    return {
        "type": "object",
        "required": ["maxReplicas", "template"],
        "properties": {
            **{field.name: _field(field) for field in FIELDS},
            "rendezvous": {
                "type": "object",
                "description": "Where the coordinator runs.",
                "properties": {
                    "backend": {
                        "type": "string",
                        "enum": ["embedded", "etcd"],
                        "default": "embedded",
                        "description": "embedded: in the pod of slot 0.  etcd: on the node that etcd elects.",
                    },
                    "endpoints": {
                        "type": "array",
                        "items": {"type": "string"},
                        "description": "Addresses of etcd: host:port.",
                    },
                    "conf": {"type": "string", "description": "Additional --rdzv-conf: key=value,key=value."},
                },
            },
            "template": {
                "type": "object",
                "description": "The pod of every node.  Its first container runs `ripstop run`.",
                "required": ["spec"],
                "properties": {
                    "metadata": {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
                    "spec": {
                        "type": "object",
                        "required": ["containers"],
                        "x-kubernetes-preserve-unknown-fields": True,
                        "properties": {
                            "containers": {
                                "type": "array",
                                "minItems": 1,
                                "items": {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
                            }
                        },
                    },
                },
            },
        },
        **(_validations(SPEC_RULES) if rules else {}),
    }


def _field(field: Field) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": TYPES[field.type], "description": field.text}
    if field.name == "nprocPerNode":
        del schema["type"]
        schema["x-kubernetes-int-or-string"] = True
    if field.default is not None:
        schema["default"] = field.default
    if field.least is not None:
        schema["minimum"] = field.least
    if field.most is not None:
        schema["maximum"] = field.most
    return schema


def _status() -> dict[str, Any]:
    text, number, time = {"type": "string"}, {"type": "integer"}, {"type": "string", "format": "date-time"}
    share = {"type": "number", "minimum": 0, "maximum": 1}

    def described(schema: dict[str, Any], meaning: str) -> dict[str, Any]:
        return {**schema, "description": meaning}

    condition = {
        "type": "object",
        "required": ["type", "status"],
        "properties": {
            "type": text,
            "status": text,
            "reason": text,
            "message": text,
            "lastTransitionTime": time,
        },
    }
    loss = {
        "type": "object",
        "properties": {"slot": number, "uid": text, "reason": text, "times": number, "at": text},
    }
    return {
        "type": "object",
        "properties": {
            "phase": described(text, "Pending, Running, Recovering, Suspended, Succeeded, Failed or Invalid."),
            "conditions": described(
                {"type": "array", "items": condition},
                "Running, Recovering, Suspended, Succeeded, Failed; "
                "Invalid, Refused, FieldsIgnored, CannotStart, Unschedulable, CoordinatorUnreachable.",
            ),
            "replicas": described(number, "Pods that exist."),
            "readyReplicas": described(number, "Pods that train or are ready to."),
            "selector": described(text, "Label selector for autoscalers."),
            "members": described({"type": "array", "items": text}, "Pods that run and are not surplus."),
            "round": described(number, "The current round, as reported by the coordinator."),
            "restarts": described(
                number, "Restarts since the job was started or resumed, as reported by the coordinator."
            ),
            "goodput": described(share, "Share of time spent in kept training steps, as reported by the coordinator."),
            "lastFailure": described(text, "The reason of the latest failure."),
            "startTime": described(time, "When the job was accepted."),
            "completionTime": described(time, "When the job finished."),
            "observedGeneration": described(number, "The generation of the spec that this status describes."),
            "accepted": described(text, "The last valid spec; invalid fields keep their values from here."),
            "everRan": described({"type": "boolean"}, "Whether enough pods were ready at least once."),
            "replaced": described(number, "Number of lost and replaced pods."),
            "losses": described(
                {"type": "array", "items": loss}, "The last lost pod of each slot, for the delay of the next one."
            ),
        },
    }
