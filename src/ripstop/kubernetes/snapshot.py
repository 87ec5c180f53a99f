"""Converts Kubernetes objects to the records that `reconcile` works on.  Pure.

Rules: (1) The pods of a job are those it owns by uid.  Pods that only carry its labels, or belong to an earlier job
of the same name, do not count.  (2) The trainer is the first container.  When it exits, the pod has left the job,
even if other containers still run.  (3) A node is unreachable if its kubelet does not report.  A node that reports
"not ready" is reachable.
"""

from collections.abc import Iterable, Mapping, Sequence

from ripstop.kubernetes.manifests import SLOT, Owner
from ripstop.kubernetes.reconcile import MAX_MESSAGE_CHARS, seconds
from ripstop.kubernetes.records import ElasticJob, Pod
from ripstop.kubernetes.spec import Json

EMPTY: Json = {}


def job_record(
    item: Json, *, telemetry: Json = EMPTY, refused: str = "", ignored: str = "", unreachable: str = ""
) -> ElasticJob:
    """The record of an ElasticJob.  The other arguments are the operator's own state."""
    metadata = item["metadata"]
    return ElasticJob(
        owner=Owner(metadata["name"], metadata["namespace"], metadata["uid"]),
        spec=item.get("spec") or {},
        status=item.get("status") or {},
        created=seconds(metadata["creationTimestamp"]),
        generation=metadata.get("generation", 1),
        deleting="deletionTimestamp" in metadata,
        telemetry=telemetry,
        refused=refused,
        ignored=ignored,
        unreachable=unreachable,
    )


def pod_records(items: Iterable[Json], owner: Owner, unreachable: Mapping[str, float]) -> list[Pod]:
    """The records of the job's pods (rule 1).  `unreachable` maps nodes to the time of their last contact."""
    return [_pod(item, unreachable) for item in items if owned(item, owner.uid) and _slot(item) is not None]


def owned(item: Json, uid: str) -> bool:
    """Whether the job with this uid owns the object."""
    references = item["metadata"].get("ownerReferences") or ()
    return any(reference["uid"] == uid for reference in references)


def coordinator_pod_addresses(items: Iterable[Json], owner: Owner, *, elected: bool) -> list[str]:
    """Possible addresses of the coordinator: the pod of slot 0, or any running pod if it is elected."""
    ours = {slot: item for item in items if owned(item, owner.uid) and (slot := _slot(item)) is not None}
    states = [ours[slot].get("status") or {} for slot in sorted(ours) if elected or slot == 0]
    return [str(state["podIP"]) for state in states if state.get("podIP") and state.get("phase") == "Running"]


def node_of(item: Json) -> str:
    """The node of a pod; empty if it is not scheduled yet."""
    return str((item.get("spec") or {}).get("nodeName") or "")


def unreachable_since(item: Json) -> float | None:
    """When an unreachable node was last in contact; None if it is reachable (rule 3)."""
    ready = _condition(item, "Ready")
    if ready is None or ready.get("status") != "Unknown":
        return None
    since = ready.get("lastTransitionTime")
    return seconds(since) if since else None


def _pod(item: Json, unreachable: Mapping[str, float]) -> Pod:
    metadata, status = item["metadata"], item.get("status") or {}
    slot = _slot(item)
    assert slot is not None, "checked by pod_records"
    trainer = _trainer(item)
    end: Json = trainer.get("terminated") or {}
    waiting = _waiting(status)
    phase = _phase(status.get("phase") or "Pending", end)
    before: Json = _failed_init(status) if phase == "Failed" and not end else {}
    over = phase in ("Succeeded", "Failed")
    return Pod(
        name=metadata["name"],
        slot=slot,
        uid=metadata["uid"],
        phase=phase,
        created=seconds(metadata["creationTimestamp"]),
        ready=not over and _is_true(item, "Ready"),
        deleting="deletionTimestamp" in metadata,
        exit_code=end.get("exitCode"),
        finished=seconds(end["finishedAt"]) if end.get("finishedAt") else None,
        message=end.get("message") or "",
        reason=status.get("reason") or _specific_reason(end.get("reason") or before.get("reason") or ""),
        waiting=waiting.get("reason") or "",
        detail=(status.get("message") or waiting.get("message") or before.get("message") or "")[:MAX_MESSAGE_CHARS],
        unschedulable=_false_text(item, "PodScheduled", "Unschedulable"),
        disrupted=_true_text(item, "DisruptionTarget"),
        unreachable_since=None if over else unreachable.get(node_of(item)),
        has_sidecars=over and status.get("phase") not in ("Succeeded", "Failed"),
    )


def _slot(item: Json) -> int | None:
    text = str((item["metadata"].get("labels") or {}).get(SLOT, ""))
    return int(text) if text.isascii() and text.isdigit() else None


def _trainer(item: Json) -> Json:
    """The state of the first container."""
    containers: Sequence[Json] = (item.get("spec") or {}).get("containers") or ()
    statuses: Sequence[Json] = (item.get("status") or {}).get("containerStatuses") or ()
    name = containers[0]["name"] if containers else ""
    return next((status.get("state") or {} for status in statuses if status["name"] == name), {})


def _phase(phase: str, end: Json) -> str:
    if end and phase in ("Pending", "Running"):  # rule 2
        return "Succeeded" if end.get("exitCode") == 0 else "Failed"
    return phase


def _waiting(status: Json) -> Json:
    """Why a container does not start; init containers first."""
    for kind in ("initContainerStatuses", "containerStatuses"):
        for container in status.get(kind) or ():
            waiting: Json = (container.get("state") or {}).get("waiting") or {}
            if waiting.get("reason") not in (None, "", "ContainerCreating", "PodInitializing"):
                return waiting
    return {}


def _failed_init(status: Json) -> Json:
    """The state of a failed init container; the trainer was not started."""
    for container in status.get("initContainerStatuses") or ():
        end: Json = (container.get("state") or {}).get("terminated") or {}
        if end.get("exitCode"):
            detail = f": {end['message']}" if end.get("message") else ""
            return {**end, "message": f"init container {container['name']} exited with code {end['exitCode']}{detail}"}
    return {}


def _specific_reason(reason: str) -> str:
    """A container's reason if it adds to the exit code."""
    return "" if reason in ("Error", "Completed") else reason


def _condition(item: Json, kind: str) -> Json | None:
    conditions: Sequence[Json] = (item.get("status") or {}).get("conditions") or ()
    return next((condition for condition in conditions if condition["type"] == kind), None)


def _is_true(item: Json, kind: str) -> bool:
    condition = _condition(item, kind)
    return condition is not None and condition["status"] == "True"


def _true_text(item: Json, kind: str) -> str:
    """The text of a condition that is true."""
    condition = _condition(item, kind)
    if condition is None or condition["status"] != "True":
        return ""
    return ": ".join(filter(None, (condition.get("reason"), condition.get("message"))))


def _false_text(item: Json, kind: str, reason: str) -> str:
    """The text of a condition that is false for this reason."""
    condition = _condition(item, kind)
    if condition is None or condition["status"] != "False" or condition.get("reason") != reason:
        return ""
    return str(condition.get("message") or reason)
