from ripstop.model.events import MAX_TEXT, EventRecord, NodeUnhealthy, WorkersStarted
from ripstop.model.failure import MAX_COLLECTIVES, CollectiveProgress, Failure, Hang
from ripstop.model.round import Node, Outcome
from ripstop.protocol.limits import (
    MAX_EVENT_ITEMS,
    MAX_HEALTH_INTERVAL_S,
    MAX_NAME,
    MAX_PHRASE,
    MAX_REASON,
    event_record_within_limits,
    is_name_within_limits,
    message_within_limits,
)
from ripstop.protocol.messages import Closing, Failed, Heartbeat, Join, Leaving, Ready

LONG = "x" * 100_000
PROGRESS = CollectiveProgress(LONG, LONG, op=LONG, size=LONG)
HANG = Hang(1.0, LONG, LONG, LONG, True, "SS", LONG, (PROGRESS,) * 100)
FAILURE = Failure(0, 0, 1, LONG, 1.0, None, None, LONG, LONG, LONG, LONG, (LONG,) * 1000, LONG, LONG, HANG)


def test_a_failure_and_its_hang_are_truncated() -> None:
    message = message_within_limits(Failed(1, (FAILURE, FAILURE)))
    assert isinstance(message, Failed)
    failure, other = message.failures
    assert failure == other
    assert (len(failure.host), len(failure.signal or "")) == (MAX_NAME, MAX_NAME)
    assert (len(failure.message), len(failure.oom), len(failure.traceback)) == (MAX_REASON, MAX_REASON, 16_384)
    assert (len(failure.error_file), len(failure.logs)) == (1000, 1000)
    assert [len(line) for line in failure.log_tail] == [MAX_PHRASE] * 64
    hang = failure.hang
    assert hang is not None and hang.collectives is not None
    assert [len(text) for text in (hang.sign, hang.call, hang.where)] == [MAX_PHRASE] * 3
    assert (len(hang.state), len(hang.file), len(hang.collectives)) == (1, 1000, MAX_COLLECTIVES)
    progress = hang.collectives[0]
    assert [len(text) for text in (progress.group, progress.label, progress.op, progress.size)] == [MAX_NAME] * 4


def test_the_end_of_a_log_is_kept() -> None:
    message = message_within_limits(Failed(1, (Failure(0, 0, 1, "h", 1.0, log_tail=tuple(map(str, range(100)))),)))
    assert isinstance(message, Failed)
    assert message.failures[0].log_tail == tuple(map(str, range(36, 100)))


def test_a_join_is_truncated_except_for_the_names_that_admission_checks() -> None:
    node = Node("a", LONG, 1, LONG, label=LONG)
    join = Join(node, 1, 2, closing=Closing(LONG, Outcome.STOPPED), problems=(LONG,) * 20, health_interval=1e9)
    message = message_within_limits(join)
    assert isinstance(message, Join) and message.closing is not None
    assert message.node == node
    assert len(message.closing.why) == MAX_REASON and message.closing.outcome is Outcome.STOPPED
    assert [len(problem) for problem in message.problems] == [MAX_PHRASE] * 8
    assert message.health_interval == MAX_HEALTH_INTERVAL_S


def test_a_message_within_the_limits_does_not_change() -> None:
    for message in (Ready(1, 2), Heartbeat(), Leaving("drained"), Join(Node("a", "h", 1), 1, 2, ready=Ready(1, 2))):
        assert message_within_limits(message) == message
    assert message_within_limits(Leaving(LONG)) == Leaving("x" * (MAX_PHRASE - 1) + "…")


def test_an_event_record_is_truncated() -> None:
    event = event_record_within_limits(EventRecord(1, 1.0, "a", NodeUnhealthy("a", (LONG,) * 1000))).event
    assert isinstance(event, NodeUnhealthy)
    assert [len(problem) for problem in event.problems] == [MAX_NAME] * MAX_EVENT_ITEMS
    pids = tuple(range(100_000))
    event = event_record_within_limits(EventRecord(1, 1.0, "a", WorkersStarted(1, 0, 1, 0, pids, 1.0, 1.0, LONG))).event
    assert isinstance(event, WorkersStarted)
    assert (len(event.pids), len(event.why)) == (4096, MAX_TEXT)


def test_a_name_is_short_and_valid_unicode() -> None:
    assert [is_name_within_limits(name) for name in ("höst", "x" * MAX_NAME, "x" * (MAX_NAME + 1), "\ud800")] == [
        True,
        True,
        False,
        False,
    ]
