"""From an ElasticJob to the objects it owns: service, secret, pods, disruption budget.  Pure.

Everything has a name that follows from the job's, so that making it twice makes it once.  A pod is a slot: its name,
host name and rank stay when the pod is replaced.
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

from ripstop.kubernetes.spec import GROUP, KIND, PORT, PROBE_PORT, VERSION, Json, Spec

JOB, SLOT, UID = f"{GROUP}/job", f"{GROUP}/slot", f"{GROUP}/job-uid"
HOME, KEY = "ripstop-system", "ripstop-operator-key"  # the operator's namespace, and its own secret there
MARGIN = 15  # seconds beyond the workers' own time, for an agent to say good-bye
TERMINATION_LOG = "/dev/termination-log"
NUMBER = "JOB_COMPLETION_INDEX"  # as the pods of an indexed Job know their number


def _probe(path: str, **more: int) -> dict[str, Any]:
    return {"httpGet": {"path": path, "port": PROBE_PORT}, "timeoutSeconds": 5, **more}


PROBES = {  # an hour for what a container does before it starts its agent; then a minute for an agent that hangs
    "startupProbe": _probe("/livez", periodSeconds=1, failureThreshold=3600),
    "livenessProbe": _probe("/livez", periodSeconds=10, failureThreshold=6),
    "readinessProbe": _probe("/readyz", periodSeconds=2, failureThreshold=3),
}


class Owner:
    """The job that owns an object."""

    __slots__ = ("name", "namespace", "uid")

    def __init__(self, name: str, namespace: str, uid: str) -> None:
        self.name = name
        self.namespace = namespace
        self.uid = uid

    def labels(self) -> dict[str, str]:
        return {JOB: self.name, UID: self.uid}

    def metadata(self, name: str, **labels: str) -> dict[str, Any]:
        """Of an object that goes when the job goes."""
        reference = {
            "apiVersion": f"{GROUP}/{VERSION}",
            "kind": KIND,
            "name": self.name,
            "uid": self.uid,
            "controller": True,
            "blockOwnerDeletion": True,
        }
        return {
            "name": name,
            "namespace": self.namespace,
            "labels": self.labels() | labels,
            "ownerReferences": [reference],
        }


def pod_name(job: str, slot: int) -> str:
    return f"{job}-{slot}"


def run_id(owner: Owner) -> str:
    """What the job's nodes call it: a job of the same name before it was another."""
    return f"{owner.name}-{owner.uid}"


def service(owner: Owner) -> dict[str, Any]:
    """Gives every slot a host name, also before it is ready: nodes meet in order to become ready."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": owner.metadata(owner.name),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": owner.labels(),
            "ports": [{"name": "rendezvous", "port": PORT, "protocol": "TCP"}],
        },
    }


def secret_name(owner: Owner, spec: Spec) -> str:
    """With a part of the uid: a job of the same name before it had another secret."""
    return spec.secret_name or f"{owner.name}-token-{owner.uid[:8]}"


def secret(owner: Owner, spec: Spec, token: str) -> dict[str, Any]:
    """The job's secret, for a job that names none."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": owner.metadata(secret_name(owner, spec)),
        "type": "Opaque",
        "stringData": {"token": token},
    }


def disruption_budget(owner: Owner, spec: Spec, *, version: str = "policy/v1") -> dict[str, Any]:
    """Keeps voluntary evictions from taking more than the job can spare."""
    return {
        "apiVersion": version,
        "kind": "PodDisruptionBudget",
        "metadata": owner.metadata(owner.name),
        "spec": {"minAvailable": spec.min_replicas, "selector": {"matchLabels": owner.labels()}},
    }


def pod(owner: Owner, spec: Spec, slot: int) -> dict[str, Any]:
    """The pod of a slot: the user's template, and what makes it a node of the job."""
    name = pod_name(owner.name, slot)
    template = deepcopy(dict(spec.template))
    metadata = owner.metadata(name, **{SLOT: str(slot)})
    given = template.get("metadata") or {}
    metadata["labels"] = {**(given.get("labels") or {}), **metadata["labels"]}
    if annotations := given.get("annotations"):
        metadata["annotations"] = annotations
    body = template["spec"]
    body |= {"hostname": name, "subdomain": owner.name, "restartPolicy": "Never"}
    make_node(
        body,
        spec,
        secret=secret_name(owner, spec),
        run_id=run_id(owner),
        host=f"{pod_name(owner.name, 0)}.{owner.name}.{owner.namespace}.svc",
        conf=_conf(spec, slot),
        variables={NUMBER: str(slot)},
    )
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": body}


def _conf(spec: Spec, slot: int) -> str:
    """Of `--rdzv-conf`, what a pod is told.  A coordinator begins with the size of today, and is told of others."""
    embedded = spec.rendezvous.backend == "embedded"
    meeting = f"is_host={int(slot == 0)}" if embedded else f"coordinator_port={PORT}"
    return meeting + (f",target={spec.target}" if spec.target not in (None, spec.max_replicas) else "")


def make_node(
    body: dict[str, Any],
    spec: Spec,
    *,
    secret: str,
    run_id: str,
    host: str,
    conf: str = "",
    variables: Mapping[str, str] = {},
    probes: Json = PROBES,
) -> None:
    """Make a pod's body that of a node: its first container knows all that `ripstop run` is to know.

    `host` is where nodes meet if not at etcd's, `conf` what `--rdzv-conf` says besides, and `variables` what else is in
    its environment.  What the user's template sets itself stays as it is.
    """
    body.setdefault("terminationGracePeriodSeconds", spec.shutdown_timeout + MARGIN)
    trainer = body["containers"][0]
    told = {**_flags(spec, run_id, host, conf), **variables}
    trainer["env"] = _environment(secret, told, trainer.get("env") or ())
    if not any(probe in trainer for probe in PROBES):
        trainer |= probes
    trainer.setdefault("terminationMessagePath", TERMINATION_LOG)
    trainer.setdefault("terminationMessagePolicy", "FallbackToLogsOnError")  # for a wrong word, which ends it early


def _environment(secret: str, variables: Mapping[str, str], given: Sequence[Json]) -> list[Json]:
    ours: list[Json] = [
        {"name": "RIPSTOP_TOKEN", "valueFrom": {"secretKeyRef": {"name": secret, "key": "token"}}},
        {"name": "RIPSTOP_TERMINATION_LOG", "value": TERMINATION_LOG},
        {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        *({"name": name, "value": value} for name, value in variables.items()),
    ]
    mine = {variable["name"] for variable in given}
    return [*(variable for variable in ours if variable["name"] not in mine), *given]


def _flags(spec: Spec, run_id: str, host: str, conf: str) -> dict[str, str]:
    embedded = spec.rendezvous.backend == "embedded"
    settings = ["rank_by=slot", conf, spec.rendezvous.conf]
    flags = {
        "PET_NNODES": f"{spec.min_replicas}:{spec.max_replicas}",
        "PET_NPROC_PER_NODE": spec.nproc_per_node,
        "PET_MAX_RESTARTS": str(spec.max_restarts),
        "PET_SHUTDOWN_TIMEOUT": str(spec.shutdown_timeout),
        "PET_RDZV_BACKEND": "c10d" if embedded else "etcd",
        "PET_RDZV_ENDPOINT": f"{host}:{PORT}" if embedded else ",".join(spec.rendezvous.endpoints),
        "PET_RDZV_ID": run_id,
        "PET_RDZV_CONF": ",".join(filter(None, settings)),
        "PET_LOCAL_ADDR": "$(POD_IP)",
        "PET_PROBE_PORT": str(PROBE_PORT),
    }
    if spec.restart_window:
        flags["PET_RESTART_WINDOW"] = spec.restart_window
    return flags
