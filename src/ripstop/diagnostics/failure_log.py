"""Why a round failed, for the log of the coordinator's node: the root cause with its traceback, in short.  Pure.

A job that fails prints its report; this is for the failures that it survives.
"""

from collections.abc import Callable, Iterator

from ripstop.diagnostics.evidence_events import Evidence, evidence_from_event
from ripstop.diagnostics.failure_ranking import root_cause
from ripstop.diagnostics.failure_report import failure_report_log_tail
from ripstop.model.events import EventRecord, RoundEndCause, RoundEnded, WorkerEvidence
from ripstop.model.failure import how_it_ended

MAX_EVIDENCE = 64  # failures of one round that are compared
MAX_TRACEBACK_LINES = 20
MAX_TAIL_LINES = 5
FAILURES = (RoundEndCause.APPLICATION, RoundEndCause.INFRASTRUCTURE)


class FailureLog:
    """`write` takes one block; its first line is the summary."""

    def __init__(self, write: Callable[[str, str], None]) -> None:
        self._write = write
        self._round = 0
        self._evidence: list[Evidence] = []  # of the round

    def add(self, record: EventRecord) -> None:
        match record.event:
            case WorkerEvidence(round=round) as event:
                if round > self._round:
                    self._round, self._evidence = round, []
                if round == self._round and len(self._evidence) < MAX_EVIDENCE:
                    self._evidence.append(evidence_from_event(event))
            case RoundEnded(round=round, cause=cause) if cause in FAILURES and round == self._round:
                if block := "\n".join(_failure_log_block(self._evidence)):
                    self._write("%s", block)


def _failure_log_block(evidence: list[Evidence]) -> Iterator[str]:
    """Nothing if there is no more to say than the other lines of the log do."""
    cause = root_cause(each.failure for each in evidence)
    if cause is None:
        return
    details = cause.traceback.split("\n")[-MAX_TRACEBACK_LINES:] if cause.traceback else []
    details += failure_report_log_tail(cause)[-MAX_TAIL_LINES:]
    if not details:
        return
    files = next(each.files for each in evidence if each.failure is cause)
    logs = f", logs {files[0]}" if files else ""
    yield f"round={cause.round} root cause: rank {cause.rank} on {cause.host} {how_it_ended(cause)}{logs}"
    yield from details
