"""A failure that the job survives is logged as a short block."""

from ripstop.diagnostics.evidence_events import evidence_to_event
from ripstop.diagnostics.failure_log import MAX_TRACEBACK_LINES, FailureLog
from ripstop.model.events import Event, EventRecord, RoundEnded
from ripstop.model.failure import Failure

TRACEBACK = 'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\nValueError: not a number'
OWN = Failure(1, 1, 2, "b", 100.0, pid=7, exitcode=1, message="ValueError", traceback=TRACEBACK, logs="/l")
VICTIM = Failure(0, 0, 2, "a", 99.0, pid=8, exitcode=1, message="RuntimeError: gloo::x", traceback="gloo::x", logs="/v")
KILLED = Failure(1, 1, 2, "b", 100.0, pid=7, signal="SIGKILL", message="died of SIGKILL", logs="/l")


def blocks(*events: Event) -> list[str]:
    found: list[str] = []
    log = FailureLog(lambda form, text: found.append(form % text))
    for number, event in enumerate(events):
        log.add(EventRecord(number, 0.0, "a", event))
    return found


def ended(cause: str = "application", round: int = 2) -> RoundEnded:
    return RoundEnded(round, cause, "rank 1 on b exited with code 1; restart 1 of 3", 0.0)


def test_the_block_has_the_root_cause_and_its_traceback() -> None:
    (block,) = blocks(evidence_to_event(VICTIM), evidence_to_event(OWN), ended())
    assert block == f"round=2 root cause: rank 1 on b exited with code 1, logs /l\n{TRACEBACK}"


def test_only_the_end_of_a_long_traceback_is_logged() -> None:
    long = Failure(0, 0, 1, "a", 1.0, exitcode=1, message="m", traceback="\n".join(map(str, range(99))))
    (block,) = blocks(evidence_to_event(long), ended(round=1))
    assert block.split("\n")[1:] == [str(n) for n in range(99 - MAX_TRACEBACK_LINES, 99)]


def test_without_a_traceback_the_last_lines_of_stderr_are_logged() -> None:
    tail = Failure(0, 0, 1, "a", 1.0, exitcode=3, message="exited with code 3", log_tail=tuple("abcdefg"))
    (block,) = blocks(evidence_to_event(tail), ended(round=1))
    assert block.split("\n")[1:] == ["c", "d", "e", "f", "g"]


def test_a_killed_worker_leaves_no_more_to_say_than_its_own_line() -> None:
    assert blocks(evidence_to_event(KILLED), ended()) == []


def test_evidence_of_an_earlier_round_and_other_ends_make_no_block() -> None:
    assert blocks(evidence_to_event(OWN), ended(round=3)) == []
    assert blocks(evidence_to_event(OWN), ended("node_joined")) == []
