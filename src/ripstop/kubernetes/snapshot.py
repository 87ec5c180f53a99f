"""From the cluster's objects to what `reconcile` decides about.  Pure.

Rules: (1) the job's pods are those it owns, by uid: one that only bears its labels, or is left of an earlier job of its
name, is not.  (2) The trainer is the first container; when it has ended, the pod's part in the job is over,
whatever runs beside it.  (3) Silent is a node whose kubelet is not heard from; one that says that it is not ready does
answer.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ripstop.kubernetes.manifests import SLOT, Owner
from ripstop.kubernetes.reconcile import MOST_TEXT, ElasticJob, Pod, seconds
from ripstop.kubernetes.spec import Json

NOTHING: Json = {}


def seen_job(
    item: Json, *, telemetry: Json = NOTHING, refused: str = "", ignored: str = "", unreachable: str = ""
) -> ElasticJob:
    """The job of an ElasticJob; all but `item` is the operator's own knowledge."""
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


def seen_pods(items: Iterable[Json], owner: Owner, silent: Mapping[str, float]) -> list[Pod]:
    """The pods among `items` that are the job's (rule 1); `silent` says since when a node does not answer."""
    return [_pod(item, silent) for item in items if owned(item, owner.uid) and _slot(item) is not None]


def owned(item: Json, uid: str) -> bool:
    """Does it belong to the job of this uid?"""
    references = item["metadata"].get("ownerReferences") or ()
    return any(reference["uid"] == uid for reference in references)


def coordinator_addresses(items: Iterable[Json], owner: Owner, *, elected: bool) -> list[str]:
    """Where the coordinator may be: in the pod of slot 0, or, when it is elected, in any pod that runs."""
    ours = {slot: item for item in items if owned(item, owner.uid) and (slot := _slot(item)) is not None}
    states = [ours[slot].get("status") or {} for slot in sorted(ours) if elected or slot == 0]
    return [str(state["podIP"]) for state in states if state.get("podIP") and state.get("phase") == "Running"]


def node_of(item: Json) -> str:
    """Where a pod runs; empty when it has no place yet."""
    return str((item.get("spec") or {}).get("nodeName") or "")


def silent_since(item: Json) -> float | None:
    """Since when a node does not answer (rule 3)."""
    ready = _condition(item, "Ready")
    if ready is None or ready.get("status") != "Unknown":
        return None
    since = ready.get("lastTransitionTime")
    return seconds(since) if since else None


def _pod(item: Json, silent: Mapping[str, float]) -> Pod:
    metadata, status = item["metadata"], item.get("status") or {}
    slot = _slot(item)
    assert slot is not None, "a pod without a slot is none of ours"
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
        ready=not over and _truth(item, "Ready"),
        deleting="deletionTimestamp" in metadata,
        exit_code=end.get("exitCode"),
        finished=seconds(end["finishedAt"]) if end.get("finishedAt") else None,
        message=end.get("message") or "",
        reason=status.get("reason") or _telling(end.get("reason") or before.get("reason") or ""),
        waiting=waiting.get("reason") or "",
        detail=(status.get("message") or waiting.get("message") or before.get("message") or "")[:MOST_TEXT],
        unschedulable=_why_not(item, "PodScheduled", "Unschedulable"),
        disrupted=_why(item, "DisruptionTarget"),
        silent=None if over else silent.get(node_of(item)),
        accompanied=over and status.get("phase") not in ("Succeeded", "Failed"),
    )


def _slot(item: Json) -> int | None:
    text = str((item["metadata"].get("labels") or {}).get(SLOT, ""))
    return int(text) if text.isascii() and text.isdigit() else None


def _trainer(item: Json) -> Json:
    """The state of the first container of the template."""
    containers: Sequence[Json] = (item.get("spec") or {}).get("containers") or ()
    statuses: Sequence[Json] = (item.get("status") or {}).get("containerStatuses") or ()
    name = containers[0]["name"] if containers else ""
    return next((status.get("state") or {} for status in statuses if status["name"] == name), {})


def _phase(phase: str, end: Json) -> str:
    if end and phase in ("Pending", "Running"):  # something runs on beside the trainer (rule 2)
        return "Succeeded" if end.get("exitCode") == 0 else "Failed"
    return phase


def _waiting(status: Json) -> Json:
    """Why a container does not start; those that come first, first."""
    for kind in ("initContainerStatuses", "containerStatuses"):
        for container in status.get(kind) or ():
            waiting: Json = (container.get("state") or {}).get("waiting") or {}
            if waiting.get("reason") not in (None, "", "ContainerCreating", "PodInitializing"):
                return waiting
    return {}


def _failed_init(status: Json) -> Json:
    """The end of an init container that failed, so that the trainer was never started."""
    for container in status.get("initContainerStatuses") or ():
        end: Json = (container.get("state") or {}).get("terminated") or {}
        if end.get("exitCode"):
            said = f": {end['message']}" if end.get("message") else ""
            return {**end, "message": f"init container {container['name']} exited with code {end['exitCode']}{said}"}
    return {}


def _telling(reason: str) -> str:
    """A container's own reason, when it says more than its exit code."""
    return "" if reason in ("Error", "Completed") else reason


def _condition(item: Json, kind: str) -> Json | None:
    conditions: Sequence[Json] = (item.get("status") or {}).get("conditions") or ()
    return next((condition for condition in conditions if condition["type"] == kind), None)


def _truth(item: Json, kind: str) -> bool:
    condition = _condition(item, kind)
    return condition is not None and condition["status"] == "True"


def _why(item: Json, kind: str) -> str:
    """The words of a condition that is true."""
    condition = _condition(item, kind)
    if condition is None or condition["status"] != "True":
        return ""
    return _words(condition)


def _why_not(item: Json, kind: str, reason: str) -> str:
    """The words of a condition that is false for this reason."""
    condition = _condition(item, kind)
    if condition is None or condition["status"] != "False" or condition.get("reason") != reason:
        return ""
    return str(condition.get("message") or reason)


def _words(condition: Mapping[str, Any]) -> str:
    return ": ".join(filter(None, (condition.get("reason"), condition.get("message"))))
