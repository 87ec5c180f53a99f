"""The Kubernetes objects of a job, and their YAML.  Pure.

With the operator: the service, secret, pods and disruption budget that an ElasticJob owns.  All names are derived from
the job's name, so creating an object twice has no effect.  A pod is a slot: a replacement has the same name, host name
and rank.

Without the operator: a headless service, and a StatefulSet or an indexed Job whose pods are the nodes.  A pod's index
is its slot, and pod 0 hosts the coordinator.  A StatefulSet restarts its containers after any exit, so an agent must
linger after the end of its job; it has no liveness probe, because a lingering agent does not respond.  A Job ends with
its pods: a failed training job or invalid input fails it, and a lost pod is replaced.
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

from msgspec import Struct

from ripstop.kubernetes.spec import GROUP, KIND, PORT, PROBE_PORT, VERSION, Json, Spec
from ripstop.model.config import DRAIN_TIMEOUT_S
from ripstop.model.errors import RipstopError

JOB, SLOT, UID = f"{GROUP}/job", f"{GROUP}/slot", f"{GROUP}/job-uid"
HOME, KEY = "ripstop-system", "ripstop-operator-key"  # the operator's namespace, and its own secret there
AGENT_EXIT_S = 15  # for the agent itself, after the commit, the workers and the saver
TERMINATION_LOG = "/dev/termination-log"
INDEX_VARIABLE = "JOB_COMPLETION_INDEX"  # as in the pods of an indexed Job
KINDS_WITHOUT_OPERATOR = ("statefulset", "job")
INSTANCE = "app.kubernetes.io/instance"  # not the label that the operator uses
MAX_LOST_PODS = 1000  # of an indexed Job


def _container_probe(path: str, **more: int) -> dict[str, Any]:
    return {"httpGet": {"path": path, "port": PROBE_PORT}, "timeoutSeconds": 5, **more}


PROBES = {  # one hour until the agent starts; then one minute until a hanging agent is killed
    "startupProbe": _container_probe("/livez", periodSeconds=1, failureThreshold=3600),
    "livenessProbe": _container_probe("/livez", periodSeconds=10, failureThreshold=6),
    "readinessProbe": _container_probe("/readyz", periodSeconds=2, failureThreshold=3),
}


class Owner(Struct, frozen=True):
    """The job that owns an object."""

    name: str
    namespace: str
    uid: str

    def labels(self) -> dict[str, str]:
        return {JOB: self.name, UID: self.uid}

    def reference(self) -> dict[str, Any]:
        return {"apiVersion": f"{GROUP}/{VERSION}", "kind": KIND, "name": self.name, "uid": self.uid}

    def owns(self, item: Json) -> bool:
        """Whether this job, by its uid, owns the object."""
        return any(reference["uid"] == self.uid for reference in item["metadata"].get("ownerReferences") or ())

    def metadata(self, name: str, **labels: str) -> dict[str, Any]:
        """The metadata of an object that is deleted with the job."""
        reference = self.reference() | {"controller": True, "blockOwnerDeletion": True}
        names = {"name": name, "namespace": self.namespace}
        return names | {"labels": self.labels() | labels, "ownerReferences": [reference]}


def manifest_pod_name(job: str, slot: int) -> str:
    return f"{job}-{slot}"


def manifest_run_id(owner: Owner) -> str:
    """The run id; it contains the uid, because an earlier job may have had the same name."""
    return f"{owner.name}-{owner.uid}"


def service_manifest(owner: Owner) -> dict[str, Any]:
    return _service_manifest(owner.metadata(owner.name), owner.labels())


def secret_name(owner: Owner, spec: Spec) -> str:
    """Contains a part of the uid, because an earlier job of the same name had another secret."""
    return spec.secret_name or f"{owner.name}-token-{owner.uid[:8]}"


def secret_manifest(owner: Owner, spec: Spec, token: str) -> dict[str, Any]:
    """The secret of a job without `secretName`."""
    return _secret_manifest(owner.metadata(secret_name(owner, spec)), token)


def disruption_budget_manifest(owner: Owner, spec: Spec, *, version: str = "policy/v1") -> dict[str, Any]:
    """Limits voluntary evictions to what the job can lose."""
    budget = {"minAvailable": spec.min_replicas, "selector": {"matchLabels": owner.labels()}}
    return new_object(version, "PodDisruptionBudget", owner.metadata(owner.name), spec=budget)


def pod_manifest(owner: Owner, spec: Spec, slot: int) -> dict[str, Any]:
    """The pod of a slot: the user's template plus the settings of a node."""
    name = manifest_pod_name(owner.name, slot)
    template = deepcopy(dict(spec.template))
    metadata = owner.metadata(name, **{SLOT: str(slot)})
    given = template.get("metadata") or {}
    metadata["labels"] = {**(given.get("labels") or {}), **metadata["labels"]}
    if annotations := given.get("annotations"):
        metadata["annotations"] = annotations
    body = template["spec"]
    body |= {"hostname": name, "subdomain": owner.name, "restartPolicy": "Never"}
    coordinator = f"{manifest_pod_name(owner.name, 0)}.{owner.name}.{owner.namespace}.svc"
    flags = _manifest_flags(spec, manifest_run_id(owner), coordinator, _manifest_rendezvous_conf(spec, slot))
    _add_node_to_manifest(body, spec, secret_name(owner, spec), flags | {INDEX_VARIABLE: str(slot)})
    return new_object("v1", "Pod", metadata, spec=body)


def _manifest_rendezvous_conf(spec: Spec, slot: int) -> str:
    """A pod's `--rdzv-conf`.  A coordinator starts with the current size; the operator sends later changes."""
    embedded = spec.rendezvous.backend == "embedded"
    location = f"is_host={int(slot == 0)}" if embedded else f"coordinator_port={PORT}"
    return location + (f",target={spec.target}" if spec.target not in (None, spec.max_replicas) else "")


# without the operator -------------------------------------------------------------------------------------------------


def manifests_without_operator(kind: str, metadata: Mapping[str, str], spec: Spec, token: str) -> list[dict[str, Any]]:
    """All objects to apply; with a secret unless the spec names one."""
    name = metadata["name"]
    found = [_service_manifest(metadata, {INSTANCE: name})]
    if not spec.secret_name:
        found.append(_secret_manifest({**metadata, "name": f"{name}-token"}, token))
    if kind == "job":
        found.append(new_object("batch/v1", "Job", metadata, spec=_indexed_job(name, spec)))
    else:
        found.append(new_object("apps/v1", "StatefulSet", metadata, spec=_stateful_set(name, spec)))
    return found


def _stateful_set(name: str, spec: Spec) -> dict[str, Any]:
    return {
        "serviceName": name,
        "replicas": spec.pods,
        "podManagementPolicy": "Parallel",
        "selector": {"matchLabels": {INSTANCE: name}},
        "template": _template(name, spec, linger=True),
    }


def _indexed_job(name: str, spec: Spec) -> dict[str, Any]:
    template = _template(name, spec, linger=False)
    template["spec"] |= {"restartPolicy": "Never", "subdomain": name}
    final = {"containerName": template["spec"]["containers"][0]["name"], "operator": "In", "values": [1, 2]}
    rules = [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "FailJob", "onExitCodes": final, "onPodConditions": []},  # required before 1.29
    ]
    return {
        "completionMode": "Indexed",
        "completions": spec.pods,
        "parallelism": spec.pods,
        "backoffLimit": MAX_LOST_PODS,
        "podFailurePolicy": {"rules": rules},
        "template": template,
    }


def _template(name: str, spec: Spec, *, linger: bool) -> dict[str, Any]:
    template: dict[str, Any] = deepcopy(dict(spec.template))
    metadata = template.pop("metadata", {})
    labels = {**(metadata.get("labels") or {}), INSTANCE: name}
    flags = _manifest_flags(spec, run_id=name, host=f"{name}-0.{name}") | ({"PET_LINGER": "1"} if linger else {})
    probes = {"readinessProbe": PROBES["readinessProbe"]} if linger else PROBES
    _add_node_to_manifest(template["spec"], spec, spec.secret_name or f"{name}-token", flags, probes)
    return {"metadata": {**metadata, "labels": labels}, **template}


# for both -------------------------------------------------------------------------------------------------------------


def to_yaml(objects: Sequence[Json]) -> str:
    """One document per object, with the fields in their given order."""
    try:
        import yaml
    except ImportError as error:
        raise RipstopError("YAML output needs PyYAML; run `pip install ripstop[kubernetes]`") from error
    text: str = yaml.safe_dump_all(objects, sort_keys=False, width=120)
    return text


def new_object(version: str, kind: str, metadata: Json, **fields: Any) -> dict[str, Any]:
    return {"apiVersion": version, "kind": kind, "metadata": dict(metadata), **fields}


def _service_manifest(metadata: Json, selector: Mapping[str, str]) -> dict[str, Any]:
    """Gives every slot a host name, also before it is ready, because nodes connect before they are ready."""
    ports = [{"name": "rendezvous", "port": PORT, "protocol": "TCP"}]
    spec = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": dict(selector), "ports": ports}
    return new_object("v1", "Service", metadata, spec=spec)


def _secret_manifest(metadata: Json, token: str) -> dict[str, Any]:
    return new_object("v1", "Secret", metadata, type="Opaque", stringData={"token": token})


def _add_node_to_manifest(
    body: dict[str, Any], spec: Spec, secret: str, variables: Mapping[str, str], probes: Json = PROBES
) -> None:
    """Add the settings of a node to a pod's spec: variables, probes and termination message of the first container.

    Settings of the user's template take precedence.
    """
    # a node that leaves waits for a final commit, then for its workers, and then for the saver of that commit
    grace = round(DRAIN_TIMEOUT_S) + 2 * spec.shutdown_timeout + AGENT_EXIT_S
    body.setdefault("terminationGracePeriodSeconds", grace)
    trainer = body["containers"][0]
    ours: list[Json] = [
        {"name": "RIPSTOP_TOKEN", "valueFrom": {"secretKeyRef": {"name": secret, "key": "token"}}},
        {"name": "RIPSTOP_TERMINATION_LOG", "value": TERMINATION_LOG},
        {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        *({"name": name, "value": value} for name, value in variables.items()),
    ]
    given = trainer.get("env") or ()
    names = {variable["name"] for variable in given}
    trainer["env"] = [*(variable for variable in ours if variable["name"] not in names), *given]
    if not any(probe in trainer for probe in PROBES):
        trainer |= probes
    trainer.setdefault("terminationMessagePath", TERMINATION_LOG)
    trainer.setdefault("terminationMessagePolicy", "FallbackToLogsOnError")  # for invalid flags


def _manifest_flags(spec: Spec, run_id: str, host: str, conf: str = "") -> dict[str, str]:
    """Flags as variables.  `host` is the coordinator's host without etcd, `conf` additional `--rdzv-conf`."""
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
    if spec.standby != "off":
        flags["PET_STANDBY"] = spec.standby
    if spec.standby_until != "script":
        flags["PET_STANDBY_UNTIL"] = spec.standby_until
    return flags
