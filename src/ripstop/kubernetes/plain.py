"""A job without an operator: a headless service, and a StatefulSet or an indexed Job whose pods are its nodes.  Pure.

A pod's number is its slot, as with the operator, and the pod of number 0 is where the nodes meet.  A StatefulSet
starts its containers again whatever they ended with, so an agent whose job is over has to linger there; it is not asked
whether it lives, for then it answers no more.  A Job ends with its pods: an end of the training job, or a wrong word,
fails it, and a pod that is lost is replaced.
"""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from ripstop.kubernetes.manifests import PROBES, make_node
from ripstop.kubernetes.spec import PORT, Json, Spec

KINDS = ("statefulset", "job")
INSTANCE = "app.kubernetes.io/instance"  # not the label by which the operator knows its pods
LOSSES = 1000  # pods that a Job may lose


def objects(kind: str, metadata: Mapping[str, str], spec: Spec, token: str) -> list[dict[str, Any]]:
    """All that there is to apply.  A secret is among them unless the spec names one."""
    name = metadata["name"]
    found = [_service(metadata)]
    if not spec.secret_name:
        secret = _object("v1", "Secret", {**metadata, "name": _secret_name(name, spec)})
        found.append(secret | {"type": "Opaque", "stringData": {"token": token}})
    if kind == "job":
        found.append(_object("batch/v1", "Job", metadata) | {"spec": _indexed_job(name, spec)})
    else:
        found.append(_object("apps/v1", "StatefulSet", metadata) | {"spec": _stateful_set(name, spec)})
    return found


def _object(version: str, kind: str, metadata: Mapping[str, str]) -> dict[str, Any]:
    return {"apiVersion": version, "kind": kind, "metadata": dict(metadata)}


def _service(metadata: Mapping[str, str]) -> dict[str, Any]:
    return _object("v1", "Service", metadata) | {
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {INSTANCE: metadata["name"]},
            "ports": [{"name": "rendezvous", "port": PORT, "protocol": "TCP"}],
        }
    }


def _stateful_set(name: str, spec: Spec) -> dict[str, Any]:
    ready = {"readinessProbe": PROBES["readinessProbe"]}
    return {
        "serviceName": name,
        "replicas": spec.pods,
        "podManagementPolicy": "Parallel",
        "selector": {"matchLabels": {INSTANCE: name}},
        "template": _template(name, spec, variables={"PET_LINGER": "1"}, probes=ready),
    }


def _indexed_job(name: str, spec: Spec) -> dict[str, Any]:
    template = _template(name, spec)
    template["spec"] |= {"restartPolicy": "Never", "subdomain": name}
    over = {"containerName": template["spec"]["containers"][0]["name"], "operator": "In", "values": [1, 2]}
    return {
        "completionMode": "Indexed",
        "completions": spec.pods,
        "parallelism": spec.pods,
        "backoffLimit": LOSSES,
        "podFailurePolicy": {
            "rules": [
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                {"action": "FailJob", "onExitCodes": over, "onPodConditions": []},  # before 1.29 it has to be there
            ]
        },
        "template": template,
    }


def _template(name: str, spec: Spec, *, variables: Mapping[str, str] = {}, probes: Json = PROBES) -> dict[str, Any]:
    template: dict[str, Any] = deepcopy(dict(spec.template))
    metadata = template.pop("metadata", {})
    labels = {**(metadata.get("labels") or {}), INSTANCE: name}
    make_node(
        template["spec"],
        spec,
        secret=_secret_name(name, spec),
        run_id=name,
        host=f"{name}-0.{name}",
        variables=variables,
        probes=probes,
    )
    return {"metadata": {**metadata, "labels": labels}, **template}


def _secret_name(name: str, spec: Spec) -> str:
    return spec.secret_name or f"{name}-token"
