"""Decides which events of a job are worth a message, and writes it.  Pure.

Rules: (1) messages are about the whole job, and few: its end, a hang, a straggler, a restart budget that is almost
spent; (2) a message has no secret of ours, and values that look like secrets are removed from the texts of exceptions;
(3) `text` is valid for Slack: no text of a job can mention anybody or become a link.
"""

from enum import StrEnum

from msgspec import Struct

from ripstop.diagnostics.evidence_events import evidence_from_event
from ripstop.diagnostics.failure_ranking import root_cause
from ripstop.model import events
from ripstop.model.events import EventRecord, RoundEndCause
from ripstop.model.failure import Failure, how_it_ended
from ripstop.model.redaction import without_secrets
from ripstop.model.round import Outcome
from ripstop.model.text_formatting import clean, duration, truncate

MAX_FAILURES = 64  # of a round that are kept to find the root cause
MAX_WHY = 500
LOW_BUDGET = 0.2  # share of the restarts that are left


class NotificationKind(StrEnum):
    JOB_FINISHED = "job_finished"
    JOB_FAILED = "job_failed"
    JOB_STOPPED = "job_stopped"
    JOB_INTERRUPTED = "job_interrupted"  # the node of the coordinator leaves
    RESTART_BUDGET_LOW = "restart_budget_low"
    HANG = "hang"
    STRAGGLER = "straggler"


class Notification(Struct, frozen=True):
    """One message; `text` is for people, and `why` is the same without markup."""

    text: str
    event: NotificationKind
    job: str
    why: str
    round: int
    restarts: int
    at: float


class NotificationContentWriter:
    """Takes the records of the job's journal."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._began: float | None = None
        self._round = 0
        self._restarts = 0
        self._own_node = ""
        self._failures: list[Failure] = []

    def on(self, record: EventRecord) -> Notification | None:
        match record.event:
            case events.WorkerEvidence() as evidence if len(self._failures) < MAX_FAILURES:
                self._failures.append(evidence_from_event(evidence).failure)
        return None if record.node else self._on_coordinator_event(record)

    def _on_coordinator_event(self, record: EventRecord) -> Notification | None:
        self._began = record.at if self._began is None else self._began
        match record.event:
            case events.JobStarted(coordinator_node=node, is_elected=is_elected):
                self._own_node = "" if is_elected else node
            case events.RoundFormed(round=round, restarts=restarts):
                self._round, self._restarts, self._failures = round, restarts, []
            case events.HangDiagnosed(why=why):
                return self._message(record, NotificationKind.HANG, "hangs", why)
            case events.StragglerDetected(why=why):
                return self._message(record, NotificationKind.STRAGGLER, "waits for a straggler", why)
            case events.BudgetCharged(cause=RoundEndCause.APPLICATION, used=used, limit=limit, allowed=True):
                if limit - used <= LOW_BUDGET * limit:
                    left = f"{used} of {limit} restarts are used; {self._cause() or 'a worker failed'}"
                    return self._message(record, NotificationKind.RESTART_BUDGET_LOW, "has few restarts left", left)
            case events.NodeLeaving(name=name, why=why) if name and name == self._own_node:
                why = f"node {name}, which runs the coordinator, leaves: {why}"
                return self._message(record, NotificationKind.JOB_INTERRUPTED, "is interrupted", why)
            case events.JobClosed(outcome=Outcome.SUCCEEDED, why=why):
                return self._message(record, NotificationKind.JOB_FINISHED, "finished", why)
            case events.JobClosed(outcome=Outcome.FAILED, why=why):
                return self._message(record, NotificationKind.JOB_FAILED, "failed", self._cause() or why)
            case events.JobClosed(why=why):
                return self._message(record, NotificationKind.JOB_STOPPED, "was stopped", why)
        return None

    def _cause(self) -> str:
        failure = root_cause(self._failures)
        if failure is None:
            return ""
        message = failure.message.split("\n", 1)[0]
        return f"rank {failure.rank} on {failure.host}: {message or how_it_ended(failure)}"

    def _message(self, record: EventRecord, kind: NotificationKind, what: str, why: str) -> Notification:
        why = truncate(without_secrets(clean(why)), MAX_WHY)
        after = duration(record.at - self._began) if self._began is not None else "0"
        text = f"{ICONS[kind]} ripstop job {self._run_id} {what} after {after} (round {self._round}): {why}"
        return Notification(
            for_slack(clean(text)), kind, clean(self._run_id), why, self._round, self._restarts, record.at
        )


ICONS = {
    NotificationKind.JOB_FINISHED: "✓",
    NotificationKind.JOB_FAILED: "✕",
    NotificationKind.JOB_STOPPED: "■",
    NotificationKind.JOB_INTERRUPTED: "▲",
    NotificationKind.RESTART_BUDGET_LOW: "▲",
    NotificationKind.HANG: "▲",
    NotificationKind.STRAGGLER: "▲",
}


def for_slack(text: str) -> str:
    """Slack reads these three characters as markup: `<!channel>` would notify everybody."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
