"""The CustomResourceDefinition of ElasticJob, made from `spec.FIELDS`.  Pure.

Rules that concern two fields, a change or the name are CEL expressions, which Kubernetes 1.25 and later check; the rest
is understood by 1.20.  The operator checks everything again: what an older cluster lets through is a condition.
No rule keeps the template as it was: CEL does not see fields that the schema does not name, and a pod's are not named.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from ripstop.kubernetes.spec import FIELDS, GROUP, KIND, LONGEST_NAME, PLURAL, VERSION, Field

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
RULES_SINCE = (1, 25)  # the version of Kubernetes
NAME_RULES = (
    (f"size(self.metadata.name) <= {LONGEST_NAME}", f"metadata.name has at most {LONGEST_NAME} characters"),
    (
        "self.metadata.name.matches('^[a-z][-a-z0-9]*$')",
        "metadata.name names a service: a-z first, then a-z, 0-9 and dashes",
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
        "rendezvous.endpoints are etcd's, and needed with it: give them, or choose embedded",
    ),
    *(
        (
            f"has(self.{name}) == has(oldSelf.{name}) && (!has(self.{name}) || self.{name} == oldSelf.{name})",
            f"{name} cannot be changed while the job exists; delete the job and create it anew",
        )
        for name in (*(field.name for field in FIELDS if field.fixed), "rendezvous")
    ),
)


def knows_rules(version: Mapping[str, str]) -> bool:
    """Whether a cluster of this `/version` checks rules."""
    digits = (re.match("[0-9]*", version.get(part, "")) for part in ("major", "minor"))
    return tuple(int(found[0]) if found and found[0] else 0 for found in digits) >= RULES_SINCE


def definition(*, rules: bool = True) -> dict[str, Any]:
    """The object to apply; without `rules`, for a cluster older than 1.25."""
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
        "description": "A distributed PyTorch job that ripstop keeps alive on a changing number of pods.",
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
                "description": "Where the nodes meet.",
                "properties": {
                    "backend": {
                        "type": "string",
                        "enum": ["embedded", "etcd"],
                        "default": "embedded",
                        "description": "embedded: at the pod of slot 0.  etcd: at whichever node etcd elects.",
                    },
                    "endpoints": {
                        "type": "array",
                        "items": {"type": "string"},
                        "description": "Of etcd: host:port.",
                    },
                    "conf": {"type": "string", "description": "More of --rdzv-conf: key=value,key=value."},
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

    def said(schema: dict[str, Any], meaning: str) -> dict[str, Any]:
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
            "phase": said(text, "Pending, Running, Recovering, Suspended, Succeeded, Failed or Invalid."),
            "conditions": said(
                {"type": "array", "items": condition},
                "Running, Recovering, Suspended, Succeeded, Failed; "
                "Invalid, Refused, FieldsIgnored, CannotStart, Unschedulable, CoordinatorUnreachable.",
            ),
            "replicas": said(number, "Pods that are there."),
            "readyReplicas": said(number, "Pods that train, or could at once."),
            "selector": said(text, "By which autoscalers find the pods."),
            "members": said({"type": "array", "items": text}, "Pods that run, and are to stay."),
            "round": said(number, "The round that trains, as the job's coordinator says."),
            "restarts": said(
                number, "Failures of workers that were healed since the job started or was resumed, as it says."
            ),
            "goodput": said(share, "The share of its time that went into steps that were kept, as it says."),
            "lastFailure": said(text, "Why workers, or the job, failed last."),
            "startTime": said(time, "When the job was accepted."),
            "completionTime": said(time, "When it was over."),
            "observedGeneration": said(number, "The version of the spec that this is about."),
            "accepted": said(text, "The last valid spec: an invalid field keeps its value here."),
            "everRan": said({"type": "boolean"}, "Enough pods were ready once."),
            "replaced": said(number, "Pods that were lost, and replaced."),
            "losses": said(
                {"type": "array", "items": loss}, "The last pod that each slot lost, for the next one's pause."
            ),
        },
    }
