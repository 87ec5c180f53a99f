"""A job without an operator: a headless service, and a StatefulSet or an indexed Job whose pods are its nodes.  Pure.

A pod's index is its slot, and pod 0 hosts the coordinator.  A StatefulSet restarts its containers after any exit,
so an agent must linger after the end of its job; it has no liveness probe, because a lingering agent does not
respond.  A Job ends with its pods: a failed training job or invalid input fails it, and a lost pod is replaced.
"""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from ripstop.kubernetes.manifests import PROBES, make_node
from ripstop.kubernetes.spec import PORT, Json, Spec

KINDS = ("statefulset", "job")
INSTANCE = "app.kubernetes.io/instance"  # not the label that the operator uses
MAX_LOST_PODS = 1000  # of a Job


def objects(kind: str, metadata: Mapping[str, str], spec: Spec, token: str) -> list[dict[str, Any]]:
    """All objects to apply; with a secret unless the spec names one."""
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
    final = {"containerName": template["spec"]["containers"][0]["name"], "operator": "In", "values": [1, 2]}
    return {
        "completionMode": "Indexed",
        "completions": spec.pods,
        "parallelism": spec.pods,
        "backoffLimit": MAX_LOST_PODS,
        "podFailurePolicy": {
            "rules": [
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                {"action": "FailJob", "onExitCodes": final, "onPodConditions": []},  # required before 1.29
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
