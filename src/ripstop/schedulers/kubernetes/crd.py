"""The CustomResourceDefinition of ElasticJob, made from `spec.FIELDS`.  Pure.

It keeps to what Kubernetes 1.20 understands.  Rules that concern two fields are added for clusters that can check them
(1.25 and later); on older ones the operator shows them as a condition.
"""

from typing import Any

from ripstop.schedulers.kubernetes.spec import FIELDS, GROUP, KIND, PLURAL, VERSION, Field

TYPES = {int: "integer", bool: "boolean", str: "string"}
COLUMNS = (
    ("Phase", "string", ".status.phase", 0),
    ("Nodes", "integer", ".status.readyReplicas", 0),
    ("Wanted", "integer", ".spec.replicas", 0),
    ("Round", "integer", ".status.round", 0),
    ("Restarts", "integer", ".status.restarts", 0),
    ("Goodput", "string", ".status.goodput", 1),
    ("Age", "date", ".metadata.creationTimestamp", 0),
)
RULES = (
    ("self.minReplicas <= self.maxReplicas", "minReplicas must not be above maxReplicas"),
    (
        "!has(self.replicas) || (self.replicas >= self.minReplicas && self.replicas <= self.maxReplicas)",
        "replicas must be from minReplicas to maxReplicas",
    ),
)


def definition(*, rules: bool = False) -> dict[str, Any]:
    """The object to apply; `rules` adds what older clusters do not know."""
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
    }


def _spec(rules: bool) -> dict[str, Any]:
    schema: dict[str, Any] = {
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
    }
    if rules:
        schema["x-kubernetes-validations"] = [
            *({"rule": rule, "message": message} for rule, message in RULES),
            *(
                {
                    "rule": f"has(self.{field.name}) == has(oldSelf.{field.name}) && "
                    f"(!has(self.{field.name}) || self.{field.name} == oldSelf.{field.name})",
                    "message": f"{field.name} cannot be changed while the job exists; delete it and create it anew",
                }
                for field in FIELDS
                if field.fixed
            ),
        ]
    return schema


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
    text, number = {"type": "string"}, {"type": "integer"}
    condition = {
        "type": "object",
        "required": ["type", "status"],
        "properties": {
            "type": text,
            "status": text,
            "reason": text,
            "message": text,
            "lastTransitionTime": {"type": "string", "format": "date-time"},
        },
    }
    loss = {
        "type": "object",
        "properties": {"slot": number, "uid": text, "reason": text, "times": number, "at": text},
    }
    return {
        "type": "object",
        "properties": {
            "phase": text,
            "conditions": {"type": "array", "items": condition},
            "replicas": number,
            "readyReplicas": number,
            "selector": text,
            "members": {"type": "array", "items": text},
            "round": number,
            "restarts": number,
            "goodput": text,
            "lastFailure": text,
            "startTime": {"type": "string", "format": "date-time"},
            "completionTime": {"type": "string", "format": "date-time"},
            "observedGeneration": number,
            "accepted": {"type": "string", "description": "The spec that the job was accepted with."},
            "everRan": {"type": "boolean"},
            "replaced": {"type": "integer", "description": "Pods that were replaced."},
            "losses": {"type": "array", "items": loss},
        },
    }
