"""Decides what to do about an ElasticJob: its current state and pods go in, actions and a new status come out.  Pure.

`decide_reconciliation` keeps no state.  Everything it needs later is in the status, so a restarted operator continues
from what the cluster stores.  Rules:

1.  A pod is a slot.  Each slot has at most one pod, and a new one is created only after the old one is gone.  A
    replacement therefore has its predecessor's name and rank.
2.  Only pods that are gone are replaced.  A running pod is deleted only by a smaller `replicas`, by `suspend` or by
    the end of the job.  A smaller `replicas` removes the highest slots.
3.  The pods' termination messages say how the job ended (`_job_end`).  A pod without such a message was lost, and
    is replaced.  A running pod that someone deletes counts as lost at once; `status.members` lists the pods that
    ran, so that a pod that vanished counts too.
4.  If the pods of a slot fail quickly, the next one waits: 1 s, doubling up to `MAX_REPLACE_DELAY_S`.  Exit code 2
    means invalid input, which a new pod cannot fix: the job fails.  A container that cannot start may be the fault
    of its node, so its pod is replaced with the same delays, and a condition names the reason.
5.  A pod on an unreachable node is lost after `NODE_TIMEOUT_S` and is force-deleted.  If it still trains, the other
    nodes ignore its round.
6.  Invalid input (`spec.read_spec`, a changed immutable field) or a rejection by the cluster (a quota, an invalid
    template) sets a condition and changes nothing that runs.  The field keeps its last valid value
    (`status.accepted`); all other fields apply.
7.  The job receives its size (`ResizeJob`): `replicas`, so that spares stay spares.  A running job with spares that
    does not reply for a while has a condition.
8.  A finished job stays finished.  Pods that do not exit are deleted after `EXIT_TIMEOUT_S`; the job itself after
    its time to live.
"""

import json
from collections.abc import Sequence
from typing import Any

from msgspec import Struct, field

from ripstop.kubernetes.manifests import JOB, UID, Owner, manifest_pod_name
from ripstop.kubernetes.pods import CANNOT_START, MAX_MESSAGE_CHARS, Pod, parse_object, pod_deletion_reason
from ripstop.kubernetes.spec import FIELDS, PORT, Json, Spec, SpecProblem, changed_spec_fields, read_spec
from ripstop.kubernetes.timestamps import seconds_to_timestamp, timestamp_to_seconds

QUICK_FAILURE_S = 60.0  # a pod that lives shorter failed quickly
MAX_REPLACE_DELAY_S = 300.0
NODE_TIMEOUT_S = 20.0
EXIT_TIMEOUT_S = 60.0
JOB_REPORTED = ("goodput", "lastFailure", "restarts", "round")  # status fields that the job itself reports
NOT_QUICK = ("Deleted", "Evicted", "Preempted", "NodeLost")  # losses that do not delay the next pod
MUTABLE = frozenset(field.name for field in FIELDS if not field.fixed)
UNREACHABLE_REMEDY = f"let the operator's pod reach port {PORT} of the job's pods"


class ElasticJob(Struct, frozen=True):
    """An ElasticJob as read from the cluster, and what the operator knows about it."""

    owner: Owner
    spec: Json
    status: Json
    generation: int = 1
    deleting: bool = False
    telemetry: Json = field(default_factory=dict)  # the latest reply of its coordinator
    refused: str = ""  # an object that the cluster refused to create, and why
    ignored: str = ""  # template fields that the cluster dropped
    unreachable: str = ""  # why the coordinator has not replied for a while


class CreatePod(Struct, frozen=True):
    slot: int


class DeletePod(Struct, frozen=True):
    """`force`: do not wait for the kubelet."""

    name: str
    uid: str
    force: bool = False


class Ensure(Struct, frozen=True):
    """Create a service, secret or disruption-budget if it does not exist."""

    what: str


class SetReplicas(Struct, frozen=True):
    """Write the default into the spec, for `kubectl scale` and autoscalers."""

    replicas: int


class ResizeJob(Struct, frozen=True):
    """Tell the coordinator how many nodes train."""

    nodes: int


class DeleteJob(Struct, frozen=True):
    pass


class Emit(Struct, frozen=True):
    """Create a Kubernetes event."""

    reason: str
    text: str
    warning: bool = False


Action = CreatePod | DeletePod | Ensure | SetReplicas | ResizeJob | DeleteJob | Emit


class Decision(Struct, frozen=True):
    """Ordered actions, the new status, the spec for new pods, and when to reconcile again without a change."""

    actions: tuple[Action, ...]
    status: dict[str, Any]
    spec: Spec | None = None
    requeue_after: float | None = None  # seconds


def job_to_reconcile(item: Json, **known: Any) -> ElasticJob:
    """The job of this object; `known` is what the operator knows about it."""
    metadata = item["metadata"]
    return ElasticJob(
        Owner(metadata["name"], metadata["namespace"], metadata["uid"]),
        item.get("spec") or {},
        item.get("status") or {},
        metadata.get("generation", 1),
        "deletionTimestamp" in metadata,
        **known,
    )


def decide_reconciliation(job: ElasticJob, pods: Sequence[Pod], now: float) -> Decision:
    if job.deleting:
        return Decision((), dict(job.status))
    return _Reconciliation(job, pods, now).result()


class _Reconciliation:
    """The state of one decision."""

    def __init__(self, job: ElasticJob, pods: Sequence[Pod], now: float) -> None:
        self.job = job
        self.pods = {pod.slot: pod for pod in sorted(pods, key=lambda pod: pod.slot)}
        self.now, self.timestamp = now, seconds_to_timestamp(now)
        self.status: dict[str, Any] = dict(job.status)
        self.members = frozenset(self.status.get("members", ()))  # pods that ran at the last reconciliation
        self.actions: list[Action] = []
        self.requeue: list[float] = []

    def result(self) -> Decision:
        spec, problems = self._effective_spec()
        self._warn("Invalid", "Valid", "; ".join(f"{p.where} {p.text}" for p in problems))
        if spec is None:
            self.status["phase"] = "Invalid"
            return self._decision(None)
        self._count(spec)
        if self.status.get("completionTime"):
            self._reconcile_finished(spec)
        else:
            self._reconcile_active(spec)
        return self._decision(spec)

    def _decision(self, spec: Spec | None) -> Decision:
        self.status["observedGeneration"] = self.job.generation
        requeue = min((delay for delay in self.requeue if delay > 0), default=None)
        return Decision(tuple(self.actions), self.status, spec, requeue)

    # the spec ---------------------------------------------------------------------------------------------------------

    def _effective_spec(self) -> tuple[Spec | None, list[SpecProblem]]:
        """The valid spec and the problems of the given one (rule 6)."""
        name, given = self.job.owner.name, self.job.spec
        before = parse_object(self.status.get("accepted", ""))
        if before is None:
            return self._accept(given)
        problems = changed_spec_fields(before, given)
        latest = {k: v for k, v in before.items() if k not in MUTABLE} | {k: given[k] for k in MUTABLE & given.keys()}
        kept: frozenset[str] = frozenset()
        while not isinstance(
            wrong := read_spec(name, latest), Spec
        ):  # sizes are checked only if types and ranges are valid
            problems += wrong
            invalid = MUTABLE & {problem.where.removeprefix("spec.") for problem in wrong}
            if invalid <= kept:
                latest = before
                break
            kept |= invalid
            latest = {k: v for k, v in latest.items() if k not in kept} | {k: before[k] for k in kept & before.keys()}
        spec, refused = self._accept(latest)
        return spec, refused or problems  # refused: another version of the operator accepted it

    def _accept(self, fields: Json) -> tuple[Spec | None, list[SpecProblem]]:
        """Parse the fields.  Store them in the status if they are valid."""
        found = read_spec(self.job.owner.name, fields)
        if not isinstance(found, Spec):
            return None, found
        self.status["accepted"] = json.dumps(dict(fields), sort_keys=True)
        return found, []

    # an active job ----------------------------------------------------------------------------------------------------

    def _reconcile_active(self, spec: Spec) -> None:
        if spec.suspend:
            self.status.pop("startTime", None)  # the deadline counts running time only
        else:
            self.status.setdefault("startTime", self.timestamp)
        if self._finish(spec):
            return
        if self.job.spec.get("replicas") is None:
            self.actions.append(SetReplicas(spec.replicas))
        needed = {"service": True, "secret": not spec.secret_name, "disruption-budget": spec.disruption_budget}
        self.actions += [Ensure(what) for what, is_needed in needed.items() if is_needed]
        for slot in reversed(self.pods):
            if slot >= spec.pods:
                self._remove(self.pods[slot], "Suspended" if spec.suspend else "ScaledDown")
        for slot in range(spec.pods):
            self._record_deletion(slot)
            self._ensure_pod(slot)
        self._phase(spec)
        self._resize(spec)

    def _finish(self, spec: Spec) -> bool:
        """Finish the job if its deadline passed or a pod reports the end."""
        start = self.status.get("startTime")
        if spec.active_deadline is not None and start is not None:
            left = timestamp_to_seconds(start) + spec.active_deadline - self.now
            if left <= 0:
                text = f"the job ran for its activeDeadlineSeconds ({spec.active_deadline} s)"
                self._end("Failed", "DeadlineExceeded", text)
                for pod in self.pods.values():
                    self._remove(pod, "DeadlineExceeded")
                return True
            self.requeue.append(left)
        ends = [(end, pod) for pod in self.pods.values() if (end := pod.job_end()) is not None]
        if ends:  # a late node is rejected with exit code 2: the job's own result takes precedence
            end, pod = min(ends, key=lambda each: each[0][1] == "WrongInput")
            self.status |= pod.final_counts()
            self._end(*end)
        return bool(ends)

    def _end(self, phase: str, reason: str, text: str) -> None:
        self.status |= {"phase": phase, "completionTime": self.timestamp}
        if phase == "Failed":
            self.status["lastFailure"] = text[:MAX_MESSAGE_CHARS]
        self._condition("Running", False, reason, text)
        self._condition("Recovering", False, reason, text)
        self._condition("CoordinatorUnreachable", False, reason, "")
        self._condition(phase, True, reason, text)
        self.actions.append(Emit(reason, text, warning=phase == "Failed"))
        self.requeue.append(EXIT_TIMEOUT_S)

    def _resize(self, spec: Spec) -> None:
        """Send the job its size if it has another one (rule 7)."""
        if spec.target is not None and self.job.telemetry.get("target", spec.target) != spec.target:
            self.actions.append(ResizeJob(spec.target))
        text = f"the operator cannot send the job its size: {self.job.unreachable}; {UNREACHABLE_REMEDY}"
        needs_size = self.status["phase"] == "Running" and spec.spares and spec.target is not None
        unreachable = bool(self.job.unreachable and needs_size)
        reason = "CoordinatorUnreachable" if unreachable else "CoordinatorReachable"
        self._condition("CoordinatorUnreachable", unreachable, reason, text if unreachable else "")

    def _ensure_pod(self, slot: int) -> None:
        """Create, keep or replace the pod of a slot."""
        pod = self.pods.get(slot)
        if pod is None:
            delay = self._replace_delay(slot)
            if delay > 0:
                self.requeue.append(delay)
            else:
                self.actions.append(CreatePod(slot))
            return
        if pod.unreachable_since is not None and (pod.deleting or self.now - pod.unreachable_since >= NODE_TIMEOUT_S):
            text = f"its node has been unreachable for {self.now - pod.unreachable_since:.0f} s"
            self._replace(pod, "NodeLost", text, force=True)
        elif pod.over and pod.deleting:
            if pod.empty:  # the kubelet takes seconds to remove it
                self.actions.append(DeletePod(pod.name, pod.uid, force=True))
        elif pod.over:
            self._replace(pod, *pod.loss_reason())
        elif pod.unreachable_since is not None:
            self.requeue.append(pod.unreachable_since + NODE_TIMEOUT_S - self.now)

    def _record_deletion(self, slot: int) -> None:
        """Record the loss of a running pod that someone else deleted (rule 3)."""
        name = manifest_pod_name(self.job.owner.name, slot)
        pod = self.pods.get(slot)
        if name not in self.members or (pod is not None and (not pod.deleting or pod.unreachable_since is not None)):
            return
        self._record_loss(pod or Pod(name, slot, uid=""), *pod_deletion_reason(pod))

    def _replace(self, pod: Pod, reason: str, text: str, *, force: bool = False) -> None:
        self.actions.append(DeletePod(pod.name, pod.uid, force))
        self.status["members"] = [name for name in self.status["members"] if name != pod.name]
        self._record_loss(pod, reason, text)

    def _remove(self, pod: Pod, reason: str) -> None:
        if not pod.deleting or pod.unreachable_since is not None:
            self.actions.append(DeletePod(pod.name, pod.uid, force=pod.unreachable_since is not None))
        if not pod.deleting and not pod.over:
            self.actions.append(Emit(reason, f"pod {pod.name} is deleted"))

    def _record_loss(self, pod: Pod, reason: str, text: str) -> None:
        """Store the loss for rule 4, and emit an event, unless it is already stored."""
        losses = {loss["slot"]: loss for loss in self.status.get("losses", ())}
        before = losses.get(pod.slot)
        if before is not None and before["uid"] == pod.uid != "":
            return
        ended = pod.finished if pod.finished is not None else self.now
        quick = ended - pod.created < QUICK_FAILURE_S and reason not in NOT_QUICK
        times = (before["times"] + 1 if before else 1) if quick else 0
        losses[pod.slot] = {"slot": pod.slot, "uid": pod.uid, "reason": reason, "times": times, "at": self.timestamp}
        self.status["losses"] = sorted(losses.values(), key=lambda loss: loss["slot"])
        self.status["replaced"] = self.status.get("replaced", 0) + 1
        self.actions.append(Emit(reason, f"pod {pod.name}: {text}; it will be replaced", warning=True))

    def _replace_delay(self, slot: int) -> float:
        for loss in self.status.get("losses", ()):
            if loss["slot"] == slot and loss["times"] > 1:
                delay: float = min(2.0 ** (loss["times"] - 2), MAX_REPLACE_DELAY_S)
                return timestamp_to_seconds(loss["at"]) + delay - self.now
        return 0.0

    # the status -------------------------------------------------------------------------------------------------------

    def _count(self, spec: Spec) -> None:
        live = [pod for pod in self.pods.values() if not pod.over and not pod.deleting]
        self.status |= {
            "replicas": len(live),
            "readyReplicas": sum(pod.ready for pod in live),
            "selector": f"{JOB}={self.job.owner.name},{UID}={self.job.owner.uid}",
            "members": [pod.name for pod in live if pod.phase == "Running" and pod.slot < spec.pods],
        }
        if not self.status.get("completionTime"):  # the final counts are newer than the last reply
            self.status |= {name: self.job.telemetry[name] for name in JOB_REPORTED if name in self.job.telemetry}
        self._check_start()
        self._warn("Refused", "Made", self.job.refused)
        if self.job.ignored:  # the template is immutable, so this stays true
            self._warn("FieldsIgnored", "", self.job.ignored)
        stuck = next((pod for pod in live if pod.unschedulable), None)
        text = f"pod {stuck.name}: {stuck.unschedulable}" if stuck else ""
        self._condition("Unschedulable", stuck is not None, "Unschedulable" if stuck else "Scheduled", text)

    def _check_start(self) -> None:
        """A container does not start, or the last one of a slot did not and its replacement does not run yet."""
        failing = next((pod for pod in self.pods.values() if not pod.deleting and pod.start_error), None)
        failed = {loss["slot"] for loss in self.status.get("losses", ()) if loss["reason"] == CANNOT_START}
        running = {slot for slot, pod in self.pods.items() if pod.phase == "Running"}
        before = self._current(CANNOT_START)
        if failing is not None:
            text = f"pod {failing.name}: {failing.start_error_text()}"
            self._condition(CANNOT_START, True, failing.start_error, text)
        elif before is None or before["status"] != "True" or not failed - running:
            self._condition(CANNOT_START, False, "Started", "")

    def _warn(self, kind: str, ok_reason: str, text: str) -> None:
        """Set a condition that is true while `text` is not empty.  Emit an event for each new text."""
        text = text[:MAX_MESSAGE_CHARS]
        before = self._current(kind)
        if text and (before is None or before["message"] != text):
            self.actions.append(Emit(kind, text, warning=True))
        self._condition(kind, bool(text), kind if text else ok_reason, text)

    def _current(self, kind: str) -> Json | None:
        return next((c for c in self.status.get("conditions", ()) if c["type"] == kind), None)

    def _phase(self, spec: Spec) -> None:
        ready = self.status["readyReplicas"]
        if spec.suspend:
            phase, text = "Suspended", "spec.suspend is true"
        elif ready >= spec.min_replicas:
            phase, text = "Running", f"{ready} node is ready" if ready == 1 else f"{ready} nodes are ready"
        else:
            phase = "Recovering" if self.status.get("everRan") else "Pending"
            text = f"nodes ready: {ready}, needed: {spec.min_replicas}"
        if phase == "Running":
            self.status["everRan"] = True
        if phase != self.status.get("phase") and phase != "Pending":
            self.actions.append(Emit(phase, text))
        self.status["phase"] = phase
        for name in ("Running", "Recovering", "Suspended"):
            self._condition(name, phase == name, phase, text)

    def _condition(self, kind: str, truth: bool, reason: str, text: str) -> None:
        """Set a condition.  Its time is the last change of its status."""
        value = "True" if truth else "False"
        conditions = {condition["type"]: condition for condition in self.status.get("conditions", ())}
        before = conditions.get(kind)
        if before is None and not truth and kind != "Running":
            return  # a condition that was never true is not listed
        since = before["lastTransitionTime"] if before and before["status"] == value else self.timestamp
        conditions[kind] = {
            "type": kind,
            "status": value,
            "reason": reason,
            "message": text[:MAX_MESSAGE_CHARS],
            "lastTransitionTime": since,
        }
        self.status["conditions"] = list(conditions.values())

    # a finished job ---------------------------------------------------------------------------------------------------

    def _reconcile_finished(self, spec: Spec) -> None:
        ended = timestamp_to_seconds(self.status["completionTime"])
        for pod in self.pods.values():
            if not pod.over and not pod.deleting and self.now >= ended + EXIT_TIMEOUT_S:
                self.actions.append(DeletePod(pod.name, pod.uid, force=pod.unreachable_since is not None))
        self.requeue.append(ended + EXIT_TIMEOUT_S - self.now)
        if spec.ttl is not None:
            if self.now >= ended + spec.ttl:
                self.actions.append(DeleteJob())
            else:
                self.requeue.append(ended + spec.ttl - self.now)
