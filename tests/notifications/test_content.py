"""Which events become messages, and what they say."""

import pytest

from ripstop.model import events
from ripstop.notifications.content import Notification, NotificationContentWriter, NotificationKind, for_slack
from tests.report.transcripts import Transcript


def messages(job: Transcript) -> list[Notification]:
    notifications = NotificationContentWriter("job7")
    return [message for record in job.records if (message := notifications.on(record))]


def test_a_successful_job_sends_one_message() -> None:
    job = Transcript()
    job.round(1.0, 1)
    job.close(200.0)
    (message,) = messages(job)
    assert message.event is NotificationKind.JOB_FINISHED
    assert message.text == "✓ ripstop job job7 finished after 3 min 20 s (round 1): all workers exited 0"


def test_a_failed_job_names_the_root_cause() -> None:
    job = Transcript()
    job.round(1.0, 1)
    job.failure(5.0, 1, 0, "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer")
    job.failure(5.1, 1, 1, "ValueError: bad shard\nsecond line", "Traceback\nValueError: bad shard")
    job.close(6.0, "failed", "rank 0 exited with code 1; 0 of 0 restarts are spent")
    (message,) = messages(job)
    assert (message.event, message.why) == (NotificationKind.JOB_FAILED, "rank 1 on host-1: ValueError: bad shard")


def test_failures_of_an_earlier_round_are_not_the_cause() -> None:
    job = Transcript()
    job.round(1.0, 1)
    job.failure(5.0, 1, 0, "ValueError: old")
    job.restart(5.1, 1)
    job.round(5.2, 2)
    job.close(6.0, "failed", "too few nodes for 600 s")
    assert messages(job)[-1].why == "too few nodes for 600 s"


@pytest.mark.parametrize(("used", "limit", "is_low"), [(1, 3, False), (3, 3, True), (7, 10, False), (8, 10, True)])
def test_a_low_restart_budget_is_announced(used: int, limit: int, is_low: bool) -> None:
    job = Transcript()
    job.round(1.0, 1)
    job.add(5.0, events.BudgetCharged(1, "application", used, limit, True, "x"))
    assert [message.event for message in messages(job)] == [NotificationKind.RESTART_BUDGET_LOW] * is_low


def test_hangs_stragglers_and_interruptions_are_announced_and_other_events_are_not() -> None:
    job = Transcript()
    job.round(1.0, 1)
    job.add(2.0, events.HangDiagnosed(1, (1,), "rank 1 is in read_shard"))
    job.add(2.5, events.StragglerDetected(1, "b", (1,), 0.3, 0.1, 120.0, "rank 1 on node b: a step takes 300 ms"))
    job.add(2.6, events.StragglerEnded(1, "b", (1,), 60.0, "as fast as its peers again"))
    job.add(3.0, events.BudgetCharged(1, "infrastructure", 3, 3, True, "x"))
    job.add(3.1, events.NodeLeaving("b", "SIGTERM"))
    job.add(3.2, events.NodeGone("b", "left: SIGTERM", False))
    job.add(4.0, events.NodeLeaving("a", "SIGTERM"))
    found = messages(job)
    kinds = [NotificationKind.HANG, NotificationKind.STRAGGLER, NotificationKind.JOB_INTERRUPTED]
    assert [message.event for message in found] == kinds
    assert found[0].why == "rank 1 is in read_shard" and found[2].why.endswith("leaves: SIGTERM")
    assert found[1].text.endswith("waits for a straggler after 2.5 s (round 1): rank 1 on node b: a step takes 300 ms")


def test_no_text_of_a_job_mentions_anybody_or_has_control_characters() -> None:
    job = Transcript()
    job.round(1.0, 1)
    job.close(2.0, "failed", "<!channel> <https://evil|click> \x1b[31m& more\x00")
    (message,) = messages(job)
    assert message.text.endswith("&lt;!channel&gt; &lt;https://evil|click&gt; &amp; more")
    assert for_slack("<a&b>") == "&lt;a&amp;b&gt;"


def test_a_secret_at_the_end_of_a_long_text_is_removed() -> None:
    """Truncated first, the URL would have no `@`."""
    job = Transcript()
    job.round(1.0, 1)
    job.close(2.0, "failed", f"{'x' * 470} https://me:hunter2-and-more-of-it@host/path {'y' * 100}")
    (message,) = messages(job)
    assert len(message.why) == 500 and "hunter" not in message.text and "https://***@host" in message.why
