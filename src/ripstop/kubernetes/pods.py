"""A pod of an ElasticJob: its state, read from the cluster's object, and why it ended or does not start.  Pure.

Rules: (1) The pods of a job are those it owns by uid.  Pods that only carry its labels, or belong to an earlier job
of the same name, do not count.  (2) The trainer is the first container.  When it exits, the pod has left the job,
even if other containers still run.  (3) A node is unreachable if its kubelet does not report.  A node that reports
"not ready" is reachable.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct

from ripstop.kubernetes.manifests import SLOT, Owner
from ripstop.kubernetes.spec import Json
from ripstop.kubernetes.timestamps import timestamp_to_seconds

MAX_MESSAGE_CHARS = 1024  # of a message in the status
WAITING_ERRORS = (
    "ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull",
    "CreateContainerConfigError", "CreateContainerError", "RunContainerError",
)  # fmt: skip
START_ERRORS = ("StartError", "ContainerCannotRun")  # of a container that never ran
UNSCHEDULED = ("PodScheduled", "False")  # a condition of a pod
CANNOT_START = "CannotStart"  # a condition, and a reason for a loss
EVICTION_PREFIXES = ("Eviction", "Deletion", "Termination")  # of disruption reasons other than preemption

_IMAGE = "correct the image in a new job, or allow the node to pull it"
REMEDIES = {  # for a container that does not start
    "ErrImagePull": _IMAGE,
    "ImagePullBackOff": _IMAGE,
    "InvalidImageName": "correct the image name in a new job",
    "ErrImageNeverPull": "load the image on the node, or change imagePullPolicy in a new job",
    "CreateContainerConfigError": "create the template's Secret or ConfigMap, or correct the template in a new job",
    "StartError": "correct the command or the image in a new job",
    "ContainerCannotRun": "correct the command or the image in a new job",
}


class Pod(Struct, frozen=True):
    """A pod of the job.  Times are seconds since the epoch."""

    name: str
    slot: int
    uid: str
    phase: str = "Pending"
    created: float = 0.0
    ready: bool = False
    deleting: bool = False
    exit_code: int | None = None
    finished: float | None = None
    message: str = ""  # the trainer's termination message
    reason: str = ""  # why the pod failed: Evicted, OOMKilled …
    waiting: str = ""  # why a container does not start
    detail: str = ""  # details of `waiting` or `reason`
    unschedulable: str = ""
    disrupted: str = ""  # why the cluster evicts it
    unreachable_since: float | None = None  # its node's last contact, if the node is unreachable
    has_sidecars: bool = False  # other containers still run after the trainer exited

    @property
    def over(self) -> bool:
        return self.phase in ("Succeeded", "Failed")

    @property
    def empty(self) -> bool:
        """Whether the kubelet reports that no container runs."""
        return self.over and self.exit_code is not None and not self.has_sidecars

    @property
    def start_error(self) -> str:
        """The cluster's reason why the container does not start; empty if it starts."""
        reason, errors = (self.reason, START_ERRORS) if self.over else (self.waiting, WAITING_ERRORS)
        return reason if reason in errors else ""

    def job_end(self) -> tuple[str, str, str] | None:
        """How the job ended, if this pod reports it: phase, reason, text."""
        if not self.over:
            return None
        report = parse_object(self.message)
        if report is not None:
            match report.get("outcome"):
                case "succeeded":
                    return "Succeeded", "Succeeded", "all workers exited 0"
                case "failed":
                    return "Failed", "Failed", self._termination_text()
                case "stopped" if not self.deleting:
                    return "Failed", "Stopped", self._termination_text()
        if self.deleting:
            return None  # it was deleted: its exit says nothing about the job
        if self.exit_code == 2:
            return "Failed", "WrongInput", f"pod {self.name}: {self._termination_text()}"
        if self.exit_code == 0 and self.phase == "Succeeded" and report is None:
            return "Succeeded", "Succeeded", f"pod {self.name} exited 0"
        return None

    def final_counts(self) -> dict[str, int]:
        """Rounds and restarts in the termination message; they are newer than the last telemetry."""
        report = parse_object(self.message) or {}
        found = {"round": report.get("rounds"), "restarts": report.get("restarts")}
        return {name: value for name, value in found.items() if type(value) is int and value >= 0}

    def loss_reason(self) -> tuple[str, str]:
        """Why a pod that does not report the job's end is gone: reason, text."""
        if self.reason == "Evicted":
            return "Evicted", self.detail or "it was evicted"
        if self.disrupted:
            return pod_deletion_reason(self)
        if self.reason in START_ERRORS:
            return CANNOT_START, self.start_error_text()
        if self.reason == "OOMKilled":
            return "OOMKilled", "it reached its memory limit; raise resources.limits.memory"
        if self.exit_code is not None and self.exit_code >= 128:
            return "Killed", f"it was killed by signal {self.exit_code - 128}"
        if self.exit_code is not None:
            return "PodFailed", f"it exited with code {self.exit_code}: {self._termination_text()[-300:]}"
        return self.reason or "PodFailed", self.detail or "the cluster gives no reason"

    def start_error_text(self) -> str:
        text = (self.message.strip() if self.over else "") or self.detail or self.start_error
        return f"{text}; {REMEDIES.get(self.start_error, 'correct the template in a new job')}"

    def _termination_text(self) -> str:
        """The termination message for people: the reason and the root cause, or the end of the log."""
        report = parse_object(self.message)
        if report is None:
            return self.message.strip() or "see its log"
        why, cause = str(report.get("why") or ""), str(report.get("culprit") or "")
        rank = cause.partition(": ")[0]
        if rank and rank in why:  # name the rank once, with its details
            return why.replace(rank, cause, 1)
        return "; ".join(filter(None, (why, cause)))


def pod_deletion_reason(pod: Pod | None) -> tuple[str, str]:
    """Why a pod was deleted: reason, text."""
    if pod is None or not pod.disrupted:
        return "Deleted", "it was deleted"
    return "Evicted" if pod.disrupted.startswith(EVICTION_PREFIXES) else "Preempted", pod.disrupted


# from the cluster's objects -------------------------------------------------------------------------------------------


def read_pods(items: Iterable[Json], owner: Owner, unreachable: Mapping[str, float]) -> list[Pod]:
    """The job's pods (rule 1).  `unreachable` maps nodes to the time of their last contact."""
    return [_read_pod(item, slot, unreachable) for slot, item in _pods_by_slot(items, owner)]


def coordinator_pod_addresses(items: Iterable[Json], owner: Owner, *, elected: bool) -> list[str]:
    """Possible addresses of the coordinator: the pod of slot 0, or any running pod if it is elected."""
    ours = dict(_pods_by_slot(items, owner))
    states = [ours[slot].get("status") or {} for slot in sorted(ours) if elected or slot == 0]
    return [str(state["podIP"]) for state in states if state.get("podIP") and state.get("phase") == "Running"]


def node_of_pod(item: Json) -> str:
    """The node of a pod; empty if it is not scheduled yet."""
    return str((item.get("spec") or {}).get("nodeName") or "")


def trainer_container_name(pod: Json) -> str:
    """Rule 2."""
    return str(pod["spec"]["containers"][0]["name"])


def pod_waiting_reason(pod: Json) -> str:
    """Why a pod does not run, as the cluster reports it; "" if it runs."""
    state: Json = pod.get("status") or {}
    held = [(each.get("state") or {}).get("waiting") or {} for each in state.get("containerStatuses") or ()]
    placed = [each for each in state.get("conditions") or () if (each["type"], each["status"]) == UNSCHEDULED]
    reasons = [each for each in (*held, *placed) if each.get("reason") and "deletionTimestamp" not in pod["metadata"]]
    texts = [": ".join(filter(None, (each["reason"], each.get("message")))) for each in reasons]
    return f"pod {pod['metadata']['name']}: {' '.join(texts[0].split())}" if texts else ""


def pod_node_unreachable_since(node: Json) -> float | None:
    """When an unreachable node was last in contact; None if it is reachable (rule 3)."""
    ready = _pod_or_node_condition(node, "Ready", "Unknown")
    since = ready.get("lastTransitionTime")
    return timestamp_to_seconds(since) if since else None


def _pods_by_slot(items: Iterable[Json], owner: Owner) -> Iterator[tuple[int, Json]]:
    for item in items:
        slot = str((item["metadata"].get("labels") or {}).get(SLOT, ""))
        if owner.owns(item) and slot.isascii() and slot.isdigit():
            yield int(slot), item


def _read_pod(item: Json, slot: int, unreachable: Mapping[str, float]) -> Pod:
    metadata, status = item["metadata"], item.get("status") or {}
    end = _trainer_end_in_pod(item)
    waiting = _waiting_container(item)
    phase = status.get("phase") or "Pending"
    if end and phase in ("Pending", "Running"):  # rule 2
        phase = "Succeeded" if end.get("exitCode") == 0 else "Failed"
    over = phase in ("Succeeded", "Failed")
    failed_init: Json = _failed_init_container_of_pod(item) if phase == "Failed" and not end else {}
    reason = end.get("reason") or failed_init.get("reason") or ""
    detail = status.get("message") or waiting.get("message") or failed_init.get("message") or ""
    unplaced = _pod_or_node_condition(item, "PodScheduled", "False")
    is_unschedulable = unplaced.get("reason") == "Unschedulable"
    disrupted = _pod_or_node_condition(item, "DisruptionTarget", "True")
    return Pod(
        name=metadata["name"],
        slot=slot,
        uid=metadata["uid"],
        phase=phase,
        created=timestamp_to_seconds(metadata["creationTimestamp"]),
        ready=not over and bool(_pod_or_node_condition(item, "Ready", "True")),
        deleting="deletionTimestamp" in metadata,
        exit_code=end.get("exitCode"),
        finished=timestamp_to_seconds(end["finishedAt"]) if end.get("finishedAt") else None,
        message=end.get("message") or "",
        reason=status.get("reason") or (reason if reason not in ("Error", "Completed") else ""),
        waiting=waiting.get("reason") or "",
        detail=detail[:MAX_MESSAGE_CHARS],
        unschedulable=(unplaced.get("message") or "Unschedulable") if is_unschedulable else "",
        disrupted=": ".join(filter(None, (disrupted.get("reason"), disrupted.get("message")))),
        unreachable_since=None if over else unreachable.get(node_of_pod(item)),
        has_sidecars=over and status.get("phase") not in ("Succeeded", "Failed"),
    )


def _trainer_end_in_pod(item: Json) -> Json:
    """How the first container ended; empty if it has not."""
    trainer = next((container["name"] for container in (item.get("spec") or {}).get("containers") or ()), "")
    ends = (
        state.get("terminated") for name, state in _pod_container_states(item, "containerStatuses") if name == trainer
    )
    return next(ends, None) or {}


def _waiting_container(item: Json) -> Json:
    """Why a container does not start; init containers first."""
    for _, state in _pod_container_states(item, "initContainerStatuses", "containerStatuses"):
        waiting: Json = state.get("waiting") or {}
        if waiting.get("reason") not in (None, "", "ContainerCreating", "PodInitializing"):
            return waiting
    return {}


def _failed_init_container_of_pod(item: Json) -> Json:
    """The state of a failed init container; the trainer was not started."""
    for name, state in _pod_container_states(item, "initContainerStatuses"):
        end: Json = state.get("terminated") or {}
        if end.get("exitCode"):
            detail = f": {end['message']}" if end.get("message") else ""
            return {**end, "message": f"init container {name} exited with code {end['exitCode']}{detail}"}
    return {}


def _pod_container_states(item: Json, *kinds: str) -> Iterator[tuple[str, Json]]:
    """The names and states of containers."""
    for kind in kinds:
        for container in (item.get("status") or {}).get(kind) or ():
            yield container["name"], container.get("state") or {}


def _pod_or_node_condition(item: Json, kind: str, status: str) -> Json:
    """The condition, if it has this status; else empty."""
    conditions: Sequence[Json] = (item.get("status") or {}).get("conditions") or ()
    return next((each for each in conditions if (each["type"], each.get("status")) == (kind, status)), {})


def parse_object(text: str) -> dict[str, Any] | None:
    """The JSON object in the text, or None."""
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None
