"""The CustomResourceDefinition of ElasticJob, generated from `spec.FIELDS`.  Pure.

Rules about two fields, changes or the name are CEL expressions; Kubernetes 1.25 and later check them.  The rest
works from 1.20 on.  The operator checks everything again and reports violations as a condition.  No rule makes the
template immutable, because CEL cannot access fields that the schema does not declare.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from ripstop.kubernetes.manifests import new_object
from ripstop.kubernetes.spec import FIELDS, GROUP, KIND, MAX_NAME_CHARS, PLURAL, VERSION, Field

TYPES = {int: "integer", bool: "boolean", str: "string"}
TEXT, NUMBER, TIME = {"type": "string"}, {"type": "integer"}, {"type": "string", "format": "date-time"}
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
    schema = {
        "type": "object",
        "description": "A fault-tolerant, elastic PyTorch job.",
        "required": ["spec"],
        "properties": {"spec": _crd_spec(rules), "status": _crd_status()},
        **(_crd_validations(NAME_RULES) if rules else {}),
    }
    scale = {
        "specReplicasPath": ".spec.replicas",
        "statusReplicasPath": ".status.replicas",
        "labelSelectorPath": ".status.selector",
    }
    version = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": schema},
        "subresources": {"status": {}, "scale": scale},
        "additionalPrinterColumns": [
            {"name": name, "type": kind, "jsonPath": path, "priority": priority}
            for name, kind, path, priority in COLUMNS
        ],
    }
    names = {
        "kind": KIND,
        "listKind": f"{KIND}List",
        "plural": PLURAL,
        "singular": KIND.lower(),
        "shortNames": ["ej"],
        "categories": ["all"],
    }
    spec = {"group": GROUP, "scope": "Namespaced", "names": names, "versions": [version]}
    return new_object("apiextensions.k8s.io/v1", "CustomResourceDefinition", {"name": f"{PLURAL}.{GROUP}"}, spec=spec)


def _crd_validations(rules: Iterable[tuple[str, str]]) -> dict[str, Any]:
    return {"x-kubernetes-validations": [{"rule": rule, "message": message} for rule, message in rules]}


def _crd_spec(rules: bool) -> dict[str, Any]:
    backend = {"type": "string", "enum": ["embedded", "etcd"], "default": "embedded"}
    endpoints = {"type": "array", "items": {"type": "string"}}
    rendezvous = {
        "backend": _crd_schema_with_description(
            backend, "embedded: in the pod of slot 0.  etcd: in the pod that etcd elects."
        ),
        "endpoints": _crd_schema_with_description(endpoints, "Addresses of etcd, each host:port."),
        "conf": _crd_schema_with_description(TEXT, "Additional settings of --rdzv-conf: key=value,key=value."),
    }
    anything = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    pod = {
        "type": "object",
        "required": ["containers"],
        "x-kubernetes-preserve-unknown-fields": True,
        "properties": {"containers": {"type": "array", "minItems": 1, "items": anything}},
    }
    template = {
        "type": "object",
        "description": "Template of the pods.  The first container runs `ripstop run`.",
        "required": ["spec"],
        "properties": {"metadata": dict(anything), "spec": pod},
    }
    return {
        "type": "object",
        "required": ["maxReplicas", "template"],
        "properties": {
            **{field.name: _crd_field(field) for field in FIELDS},
            "rendezvous": {"type": "object", "description": "Where the coordinator runs.", "properties": rendezvous},
            "template": template,
        },
        **(_crd_validations(SPEC_RULES) if rules else {}),
    }


def _crd_field(field: Field) -> dict[str, Any]:
    is_text_or_number = field.name in ("nprocPerNode", "standby")
    schema = {
        "type": None if is_text_or_number else TYPES[field.type],
        "description": field.text,
        "x-kubernetes-int-or-string": True if is_text_or_number else None,
        "default": field.default,
        "minimum": field.least,
        "maximum": field.most,
    }
    return {name: value for name, value in schema.items() if value is not None}


def _crd_status() -> dict[str, Any]:
    names, share = {"type": "array", "items": TEXT}, {"type": "number", "minimum": 0, "maximum": 1}
    of_condition = {"type": TEXT, "status": TEXT, "reason": TEXT, "message": TEXT, "lastTransitionTime": TIME}
    condition = {"type": "object", "required": ["type", "status"], "properties": of_condition}
    of_loss = {"slot": NUMBER, "uid": TEXT, "reason": TEXT, "times": NUMBER, "at": TEXT}
    losses = {"type": "array", "items": {"type": "object", "properties": of_loss}}
    conditions = (
        "Running, Recovering, Suspended, Succeeded, Failed; "
        "Invalid, Refused, FieldsIgnored, CannotStart, Unschedulable, CoordinatorUnreachable."
    )
    fields = (
        ("phase", TEXT, "Pending, Running, Recovering, Suspended, Succeeded, Failed or Invalid."),
        ("conditions", {"type": "array", "items": condition}, conditions),
        ("replicas", NUMBER, "Pods that exist."),
        ("readyReplicas", NUMBER, "Pods whose workers run or can start immediately."),
        ("selector", TEXT, "Label selector for autoscalers."),
        (
            "members",
            names,
            "Names of the running pods.  Pods that leave because `replicas` was reduced are not listed.",
        ),
        ("round", NUMBER, "The current round, as reported by the coordinator."),
        ("restarts", NUMBER, "Restarts since the job was started or resumed, as reported by the coordinator."),
        ("goodput", share, "Share of time spent in steps that were not repeated, as reported by the coordinator."),
        ("lastFailure", TEXT, "The reason of the latest failure."),
        ("startTime", TIME, "When the operator accepted the job."),
        ("completionTime", TIME, "When the job finished."),
        ("observedGeneration", NUMBER, "The generation of the spec that this status describes."),
        ("accepted", TEXT, "The last valid spec.  If a field of `spec` is invalid, its value in `accepted` applies."),
        ("everRan", {"type": "boolean"}, "Whether minReplicas pods were ready at least once."),
        ("replaced", NUMBER, "Number of pods that were lost and replaced."),
        ("losses", losses, "The last lost pod of each slot.  The delay of the next pod depends on this."),
    )
    return {
        "type": "object",
        "properties": {name: _crd_schema_with_description(schema, text) for name, schema, text in fields},
    }


def _crd_schema_with_description(schema: Mapping[str, Any], meaning: str) -> dict[str, Any]:
    return {**schema, "description": meaning}
