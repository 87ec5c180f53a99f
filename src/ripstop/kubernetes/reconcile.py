"""What to do about an ElasticJob: the job and its pods as they are go in, actions and a status come out.  Pure.

`decide` remembers nothing: all that it must know later it writes into the status, so that an operator that was killed,
or lost its watches, goes on from what the cluster says.  Rules:

1.  A pod is a slot.  There is at most one of a name, and a new one is made when the old one is gone: so nothing is ever
    doubled, and a replacement has its predecessor's name and rank.
2.  Only what is gone is replaced.  A pod that runs is touched by a smaller `replicas`, by `suspend`, by the job's end,
    and by nothing else.  Smaller means: the highest slots go.
3.  How the job ended, its pods say (`RoundEndCause`): `ripstop run` leaves the job's outcome in its termination
message.  A
    pod that ended without one was lost, whatever took it, and is replaced.  A running pod that somebody deletes is lost
    when it is told to go; `status.members` remembers the pods that ran, so that one which vanished counts too.
4.  A slot whose pods die quickly waits before the next: 1 s, doubling to `LONGEST_PAUSE`.  Exit code 2 is wrong input,
    which no replacement mends: it ends the job.  A container that cannot be started may be its node's fault, so its pod
    is replaced, with the same pauses, and a condition says why.
5.  A pod on a node that does not answer is lost after `SILENCE` seconds and deleted without its consent: should it
    still train, its round is over for everybody else.
6.  What cannot be right (`spec.read`, a fixed field changed), or the cluster refuses (a quota, a template that makes no
    pod), is a condition, and changes nothing that runs: the field keeps its last valid value (`status.accepted`), and
    all other fields count as they are.
7.  How many nodes train, the job is told (`ResizeJob`): `replicas`, so that spares stay spares; without spares its
pods say
    it by being there.  A job with spares that runs and does not answer for long is a condition.
8.  A job that is over stays over.  Pods that do not end with it are deleted after `FAREWELL` seconds; the job itself
    when its time to live has passed.
"""

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from msgspec import Struct, field

from ripstop.kubernetes.manifests import JOB, UID, Owner, pod_name
from ripstop.kubernetes.spec import FIELDS, PORT, Json, Spec, SpecProblem, changed, read

YOUNG = 60.0  # seconds: a pod that lives shorter died quickly
LONGEST_PAUSE = 300.0
SILENCE = 20.0
FAREWELL = 60.0
MOST_TEXT = 1024  # characters of a message in the status
SAID = ("goodput", "lastFailure", "restarts", "round")  # fields of the status that the job has a word in
BAD_START = (
    "ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull",
    "CreateContainerConfigError", "CreateContainerError", "RunContainerError",
)  # fmt: skip
CANNOT_START = "CannotStart"  # a condition, and the reason of a loss
START_ERRORS = ("StartError", "ContainerCannotRun")  # of a container that has ended before it began
NOT_QUICK = ("Deleted", "Evicted", "Preempted", "NodeLost")  # losses that say nothing against the next pod
EVICTIONS = ("Eviction", "Deletion", "Termination")  # how the reasons of disruptions begin that are no preemptions

_IMAGE = "correct the image, in a new job, or have the node let to pull it"
REMEDIES = {  # what to do about a container that does not start
    "ErrImagePull": _IMAGE,
    "ImagePullBackOff": _IMAGE,
    "InvalidImageName": "correct the image's name, in a new job",
    "ErrImageNeverPull": "bring the image to the node, or change imagePullPolicy, in a new job",
    "CreateContainerConfigError": "create the Secret or ConfigMap that the template names, or correct it, in a new job",
    "StartError": "correct the command or the image, in a new job",
    "ContainerCannotRun": "correct the command or the image, in a new job",
}


# what is seen ---------------------------------------------------------------------------------------------------------


class Pod(Struct, frozen=True):
    """One pod of the job; times are seconds since the epoch."""

    name: str
    slot: int
    uid: str
    phase: str = "Pending"
    created: float = 0.0
    ready: bool = False
    deleting: bool = False
    exit_code: int | None = None
    finished: float | None = None
    message: str = ""  # the trainer's last word
    reason: str = ""  # why the pod failed, as the cluster says: Evicted, OOMKilled …
    waiting: str = ""  # why a container does not start
    detail: str = ""  # and more of that
    unschedulable: str = ""
    disrupted: str = ""  # why the cluster is taking it away
    silent: float | None = None  # since when its node does not answer
    accompanied: bool = False  # something runs on beside the trainer, which has ended

    @property
    def over(self) -> bool:
        return self.phase in ("Succeeded", "Failed")

    @property
    def empty(self) -> bool:
        """Nothing runs in it any more, as its kubelet says."""
        return self.over and self.exit_code is not None and not self.accompanied


class ElasticJob(Struct, frozen=True):
    """The ElasticJob as it was read; `telemetry` is what its coordinator said last, if it did."""

    owner: Owner
    spec: Json
    status: Json
    created: float
    generation: int = 1
    deleting: bool = False
    telemetry: Json = field(default_factory=dict)
    refused: str = ""  # what the cluster did not let us make, and why
    ignored: str = ""  # fields of the template that the cluster dropped
    unreachable: str = ""  # why it has not answered for long


# what to do -----------------------------------------------------------------------------------------------------------


class CreatePod(Struct, frozen=True):
    slot: int


class DeletePod(Struct, frozen=True):
    """`force`: without waiting for its node."""

    name: str
    uid: str
    force: bool = False


class Ensure(Struct, frozen=True):
    """Make sure that these are there: service, secret, disruption-budget."""

    what: str


class SetReplicas(Struct, frozen=True):
    """Write the default into the spec, for `kubectl scale` and autoscalers to find."""

    replicas: int


class ResizeJob(Struct, frozen=True):
    """Have the job itself run on so many nodes."""

    nodes: int


class DeleteJob(Struct, frozen=True):
    pass


class Emit(Struct, frozen=True):
    """An event that `kubectl describe` shows."""

    reason: str
    text: str
    warning: bool = False


Action = CreatePod | DeletePod | Ensure | SetReplicas | ResizeJob | DeleteJob | Emit


class Decision(Struct, frozen=True):
    """Actions in their order, the new status, the spec to make pods of, and when to look again without a change."""

    actions: tuple[Action, ...]
    status: dict[str, Any]
    spec: Spec | None = None
    again: float | None = None  # seconds from now


def decide(job: ElasticJob, pods: Sequence[Pod], now: float) -> Decision:
    """See the rules above."""
    if job.deleting:
        return Decision((), dict(job.status))
    return _Deciding(job, pods, now).result()


class _Deciding:
    """One decision in the making."""

    def __init__(self, job: ElasticJob, pods: Sequence[Pod], now: float) -> None:
        self.job = job
        self.pods = {pod.slot: pod for pod in pods}
        self.now = now
        self.status: dict[str, Any] = dict(job.status)
        self.members = frozenset(self.status.get("members", ()))  # the pods that ran when we looked last
        self.actions: list[Action] = []
        self.again: list[float] = []

    def result(self) -> Decision:
        spec, problems = self._accepted()
        self._trouble("Invalid", "Valid", "; ".join(f"{p.where} {p.text}" for p in problems))
        if spec is None:
            self.status["phase"] = "Invalid"
            return self._done(None)
        self._count(spec)
        if self.status.get("completionTime"):
            self._after_the_end(spec)
        else:
            self._live(spec)
        return self._done(spec)

    def _done(self, spec: Spec | None) -> Decision:
        self.status["observedGeneration"] = self.job.generation
        again = min((seconds for seconds in self.again if seconds > 0), default=None)
        return Decision(tuple(self.actions), self.status, spec, again)

    # the spec ---------------------------------------------------------------------------------------------------------

    def _accepted(self) -> tuple[Spec | None, list[SpecProblem]]:
        """The spec to go by: once a job was accepted, its fixed fields stay, whatever is written over them (rule 6)."""
        name, given = self.job.owner.name, self.job.spec
        before = _parsed(self.status.get("accepted", ""))
        if before is None:
            return self._accept(given), _problems(read(name, given))
        problems = changed(before, given)
        latest = {k: v for k, v in before.items() if k not in _FREE} | {k: given[k] for k in _FREE & given.keys()}
        wrong = _problems(read(name, latest))
        kept = _FREE & {problem.where.removeprefix("spec.") for problem in wrong}
        latest = {k: v for k, v in latest.items() if k not in kept} | {k: before[k] for k in kept & before.keys()}
        spec = self._accept(latest)
        if spec is None:  # another version of us accepted it
            return None, _problems(read(name, latest))
        return spec, [*problems, *wrong]

    def _accept(self, fields: Json) -> Spec | None:
        """The spec of these fields, if they are valid: they are remembered then."""
        spec = read(self.job.owner.name, fields)
        if not isinstance(spec, Spec):
            return None
        self.status["accepted"] = json.dumps(dict(fields), sort_keys=True)
        return spec

    # a job that is not over -------------------------------------------------------------------------------------------

    def _live(self, spec: Spec) -> None:
        if spec.suspend:
            self.status.pop("startTime", None)  # the deadline is about time in which it runs
        else:
            self.status.setdefault("startTime", _iso(self.now))
        if self._ended(spec):
            return
        if self.job.spec.get("replicas") is None:
            self.actions.append(SetReplicas(spec.replicas))
        self.actions += [Ensure("service")]
        if not spec.secret_name:
            self.actions.append(Ensure("secret"))
        if spec.disruption_budget:
            self.actions.append(Ensure("disruption-budget"))
        for slot in sorted(self.pods, reverse=True):
            if slot >= spec.pods:
                self._remove(self.pods[slot], "Suspended" if spec.suspend else "ScaledDown")
        for slot in range(spec.pods):
            self._note_departure(slot)
            self._keep(slot)
        self._phase(spec)
        self._size(spec)

    def _ended(self, spec: Spec) -> bool:
        start = self.status.get("startTime")
        if spec.active_deadline is not None and start is not None:
            left = seconds(start) + spec.active_deadline - self.now
            if left <= 0:
                self._end("Failed", "DeadlineExceeded", f"the job ran for {spec.active_deadline} s, as it may")
                for pod in self.pods.values():
                    self._remove(pod, "DeadlineExceeded")
                return True
            self.again.append(left)
        endings = [(ending, pod) for pod in self.pods.values() if (ending := _ending(pod)) is not None]
        if endings:  # a latecomer is turned away, as if by mistake: what the job itself said counts more
            ending, pod = min(endings, key=lambda each: each[0][1] == "WrongInput")
            self.status |= _counts(pod)
            self._end(*ending)
        return bool(endings)

    def _end(self, phase: str, reason: str, text: str) -> None:
        self.status |= {"phase": phase, "completionTime": _iso(self.now)}
        if phase == "Failed":
            self.status["lastFailure"] = text[:MOST_TEXT]
        self._condition("Running", False, reason, text)
        self._condition("Recovering", False, reason, text)
        self._condition("CoordinatorUnreachable", False, reason, "")
        self._condition(phase, True, reason, text)
        self.actions.append(Emit(reason, text, warning=phase == "Failed"))
        self.again.append(FAREWELL)

    def _size(self, spec: Spec) -> None:
        """See to it that the job knows how many are to train (rule 7)."""
        if spec.target is not None and self.job.telemetry.get("target", spec.target) != spec.target:
            self.actions.append(ResizeJob(spec.target))
        text = f"the operator cannot tell the job how many nodes are to train: {self.job.unreachable}; {_OPEN}"
        waited_for = self.status["phase"] == "Running" and spec.spares and spec.target is not None
        unreachable = bool(self.job.unreachable and waited_for)
        reason = "CoordinatorUnreachable" if unreachable else "CoordinatorReachable"
        self._condition("CoordinatorUnreachable", unreachable, reason, text if unreachable else "")

    def _keep(self, slot: int) -> None:
        """See to it that the slot has a pod."""
        pod = self.pods.get(slot)
        if pod is None:
            wait = self._pause(slot)
            if wait > 0:
                self.again.append(wait)
            else:
                self.actions.append(CreatePod(slot))
            return
        if pod.silent is not None and (pod.deleting or self.now - pod.silent >= SILENCE):
            self._lose(pod, "NodeLost", f"its node has not answered for {self.now - pod.silent:.0f} s", force=True)
        elif pod.over and pod.deleting:
            if pod.empty:  # its kubelet takes seconds to clear it away
                self.actions.append(DeletePod(pod.name, pod.uid, force=True))
        elif pod.over:
            self._lose(pod, *_loss(pod))
        elif pod.silent is not None:
            self.again.append(pod.silent + SILENCE - self.now)

    def _note_departure(self, slot: int) -> None:
        """Note the loss of a pod that ran, and was deleted by somebody else (rule 3)."""
        name = pod_name(self.job.owner.name, slot)
        pod = self.pods.get(slot)
        if name not in self.members or (pod is not None and (not pod.deleting or pod.silent is not None)):
            return
        reason, text = _departure(pod)
        if self._note_loss(pod or Pod(name, slot, uid=""), reason):
            self._emit_loss(name, reason, text)

    def _lose(self, pod: Pod, reason: str, text: str, *, force: bool = False) -> None:
        self.actions.append(DeletePod(pod.name, pod.uid, force))
        self.status["members"] = [name for name in self.status["members"] if name != pod.name]
        if self._note_loss(pod, reason):
            self._emit_loss(pod.name, reason, text)

    def _emit_loss(self, pod: str, reason: str, text: str) -> None:
        self.actions.append(Emit(reason, f"pod {pod}: {text}; it is replaced", warning=True))

    def _remove(self, pod: Pod, reason: str) -> None:
        if not pod.deleting or pod.silent is not None:
            self.actions.append(DeletePod(pod.name, pod.uid, force=pod.silent is not None))
        if not pod.deleting and not pod.over:
            self.actions.append(Emit(reason, f"pod {pod.name} is told to leave"))

    def _note_loss(self, pod: Pod, reason: str) -> bool:
        """Remember the loss for rule 4; false when it was known."""
        losses = {loss["slot"]: loss for loss in self.status.get("losses", ())}
        before = losses.get(pod.slot)
        if before is not None and before["uid"] == pod.uid != "":
            return False
        ended = pod.finished if pod.finished is not None else self.now
        quick = ended - pod.created < YOUNG and reason not in NOT_QUICK
        times = (before["times"] + 1 if before else 1) if quick else 0
        losses[pod.slot] = {"slot": pod.slot, "uid": pod.uid, "reason": reason, "times": times, "at": _iso(self.now)}
        self.status["losses"] = sorted(losses.values(), key=lambda loss: loss["slot"])
        self.status["replaced"] = self.status.get("replaced", 0) + 1
        return True

    def _pause(self, slot: int) -> float:
        for loss in self.status.get("losses", ()):
            if loss["slot"] == slot and loss["times"] > 1:
                pause: float = min(2.0 ** (loss["times"] - 2), LONGEST_PAUSE)
                return seconds(loss["at"]) + pause - self.now
        return 0.0

    # the status -------------------------------------------------------------------------------------------------------

    def _count(self, spec: Spec) -> None:
        live = [pod for pod in self.pods.values() if not pod.over and not pod.deleting]
        self.status |= {
            "replicas": len(live),
            "readyReplicas": sum(pod.ready for pod in live),
            "selector": f"{JOB}={self.job.owner.name},{UID}={self.job.owner.uid}",
            "members": [pod.name for pod in sorted(live, key=lambda pod: pod.slot) if _is_member(pod, spec)],
        }
        if not self.status.get("completionTime"):  # what was said last of a job that is over is older than its end
            self.status |= {name: self.job.telemetry[name] for name in SAID if name in self.job.telemetry}
        self._cannot_start()
        self._trouble("Refused", "Made", self.job.refused)
        if self.job.ignored:  # the template is the same as long as the job lives, and so is this
            self._trouble("FieldsIgnored", "", self.job.ignored)
        stuck = next((pod for pod in live if pod.unschedulable), None)
        text = f"pod {stuck.name}: {stuck.unschedulable}" if stuck else ""
        self._condition("Unschedulable", stuck is not None, "Unschedulable" if stuck else "Scheduled", text)

    def _cannot_start(self) -> None:
        """A container does not start; or the last one of a slot did not, and the next is not there yet."""
        pods = sorted(self.pods.values(), key=lambda pod: pod.slot)
        bad = next((pod for pod in pods if not pod.deleting and _start_error(pod)), None)
        failed = {loss["slot"] for loss in self.status.get("losses", ()) if loss["reason"] == CANNOT_START}
        begun = {pod.slot for pod in pods if pod.phase == "Running"}
        before = self._current(CANNOT_START)
        if bad is not None:
            self._condition(CANNOT_START, True, _start_error(bad), f"pod {bad.name}: {_why_not_started(bad)}")
        elif before is None or before["status"] != "True" or not failed - begun:
            self._condition(CANNOT_START, False, "Started", "")

    def _trouble(self, kind: str, otherwise: str, text: str) -> None:
        """A condition that is true while there is a text, and an event for each new one."""
        text = text[:MOST_TEXT]
        before = self._current(kind)
        if text and (before is None or before["message"] != text):
            self.actions.append(Emit(kind, text, warning=True))
        self._condition(kind, bool(text), kind if text else otherwise, text)

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
        """Set a condition; the time is that of its last change of truth."""
        value = "True" if truth else "False"
        conditions = {condition["type"]: condition for condition in self.status.get("conditions", ())}
        before = conditions.get(kind)
        if before is None and not truth and kind not in ("Running",):
            return  # what never was true is not worth a line
        since = before["lastTransitionTime"] if before and before["status"] == value else _iso(self.now)
        conditions[kind] = {
            "type": kind, "status": value, "reason": reason, "message": text[:MOST_TEXT], "lastTransitionTime": since,
        }  # fmt: skip
        self.status["conditions"] = list(conditions.values())

    # a job that is over -----------------------------------------------------------------------------------------------

    def _after_the_end(self, spec: Spec) -> None:
        ended = seconds(self.status["completionTime"])
        for pod in self.pods.values():
            if not pod.over and not pod.deleting and self.now >= ended + FAREWELL:
                self.actions.append(DeletePod(pod.name, pod.uid, force=pod.silent is not None))
        self.again.append(ended + FAREWELL - self.now)
        if spec.ttl is not None:
            if self.now >= ended + spec.ttl:
                self.actions.append(DeleteJob())
            else:
                self.again.append(ended + spec.ttl - self.now)


_OPEN = f"let the operator's pod reach port {PORT} of the job's pods"
_FREE = frozenset(field.name for field in FIELDS if not field.fixed)


def _ending(pod: Pod) -> tuple[str, str, str] | None:
    """How the job ended, if this pod knows: phase, reason, text."""
    if not pod.over:
        return None
    said = _parsed(pod.message)
    if said is not None:
        match said.get("outcome"):
            case "succeeded":
                return "Succeeded", "Succeeded", "all workers exited 0"
            case "failed":
                return "Failed", "Failed", _word(pod)
            case "stopped" if not pod.deleting:
                return "Failed", "Stopped", _word(pod)
    if pod.deleting:
        return None  # it was told to go: what it says of its own end is not about the job's
    if pod.exit_code == 2:
        return "Failed", "WrongInput", f"pod {pod.name}: {_word(pod)}"
    if pod.exit_code == 0 and pod.phase == "Succeeded" and said is None:
        return "Succeeded", "Succeeded", f"pod {pod.name} exited 0"
    return None


def _loss(pod: Pod) -> tuple[str, str]:
    """Why a pod that knows nothing of the job's end is gone: reason, text."""
    if pod.reason == "Evicted":
        return "Evicted", pod.detail or "it was evicted"
    if pod.disrupted:
        return _departure(pod)
    if pod.reason in START_ERRORS:
        return CANNOT_START, _why_not_started(pod)
    if pod.reason == "OOMKilled":
        return "OOMKilled", "its memory limit was reached; raise resources.limits.memory"
    if pod.exit_code is not None and pod.exit_code >= 128:
        return "Killed", f"signal {pod.exit_code - 128} ended it"
    if pod.exit_code is not None:
        return "PodFailed", f"it exited with code {pod.exit_code}: {_word(pod)[-300:]}"
    return pod.reason or "PodFailed", pod.detail or "the cluster says no more"


def _departure(pod: Pod | None) -> tuple[str, str]:
    """Why a pod that somebody took away is gone: reason, text."""
    if pod is None or not pod.disrupted:
        return "Deleted", "it was deleted"
    return "Evicted" if pod.disrupted.startswith(EVICTIONS) else "Preempted", pod.disrupted


def _is_member(pod: Pod, spec: Spec) -> bool:
    """Whether a pod that is there runs, and is to stay."""
    return pod.phase == "Running" and pod.slot < spec.pods


def _start_error(pod: Pod) -> str:
    """Why the pod's container does not start, in a word of the cluster's; empty: it does."""
    if pod.over:
        return pod.reason if pod.reason in START_ERRORS else ""
    return pod.waiting if pod.waiting in BAD_START else ""


def _why_not_started(pod: Pod) -> str:
    error = _start_error(pod)
    text = (pod.message.strip() if pod.over else "") or pod.detail or error
    return f"{text}; {REMEDIES.get(error, 'correct the template, in a new job')}"


def _counts(pod: Pod) -> dict[str, int]:
    """What the pod's last word counts: newer than what the job said while it ran."""
    said = _parsed(pod.message) or {}
    found = {"round": said.get("rounds"), "restarts": said.get("restarts")}
    return {name: value for name, value in found.items() if type(value) is int and value >= 0}


def _word(pod: Pod) -> str:
    """What the pod said at its end, for a person: the reason and the culprit of an agent's last word, or its log's."""
    said = _parsed(pod.message)
    if said is None:
        return pod.message.strip() or "see its log"
    why, culprit = str(said.get("why") or ""), str(said.get("culprit") or "")
    who = culprit.partition(": ")[0]
    if who and who in why:  # the job ended because of the culprit: it is named once, with all that is known
        return why.replace(who, culprit, 1)
    return "; ".join(filter(None, (why, culprit)))


def _problems(found: Spec | list[SpecProblem]) -> list[SpecProblem]:
    return [] if isinstance(found, Spec) else found


def _parsed(text: str) -> dict[str, Any] | None:
    """The JSON object that it is, or nothing."""
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _iso(now: float) -> str:
    return datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def seconds(text: str) -> float:
    """Since the epoch, of a time as the cluster writes it."""
    return datetime.fromisoformat(text).timestamp()
