"""The spans of jobs, from transcripts of their events."""

import re
from pathlib import Path
from typing import Any

from pytest import approx

from ripstop.model.events import (
    BudgetCharged,
    Event,
    EventRecord,
    FirstStep,
    JobClosed,
    NodeGone,
    NodeJoined,
    Recovered,
    RoundEnded,
    RoundFormed,
    RoundFound,
    RoundResumed,
    StateRestored,
    StepsDone,
    WorkerFailed,
    WorkersStarted,
    WorkersStopped,
)
from ripstop.telemetry.spans import Context, Span, Spans

SEED = bytes(range(16))
PAGE = Path(__file__).parents[2] / "docs" / "tracing.md"
PARENT = Context("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331")


class Job:
    """Passes events to `Spans`, and keeps the spans."""

    def __init__(self, parent: Context | None = None) -> None:
        self._spans = Spans("job7", SEED, parent)
        self.spans: list[Span] = []

    def record(self, at: float, *events: Event, node: str = "") -> list[Span]:
        found = [span for event in events for span in self._spans.on(EventRecord(1, at, node, event))]
        self.spans += found
        return found

    def end(self) -> Span:
        (job,) = self._spans.end()
        self.spans.append(job)
        return job

    def runs(self, at: float, number: int, *nodes: str) -> None:
        """The first round."""
        self.record(at, NodeJoined(nodes[0], "h", 1), formed(number, *nodes))
        for node in nodes:
            self.record(at + 0.1, started(number), node=node)

    def fails(self, at: float, number: int, node: str) -> list[Span]:
        """A worker of the node fails, and the round ends."""
        self.record(at, WorkerFailed(number, 3, 99, "exited with code 7"), node=node)
        self.record(at, BudgetCharged(number, "application", 1, 5, True, "restart 1 of 5"))
        return self.record(at, RoundEnded(number, "application", "rank 3 exited with code 7", 0.0))


def formed(number: int, *nodes: str) -> RoundFormed:
    return RoundFormed(number, nodes, len(nodes), "h:1", number - 1, "because")


def started(number: int, pause: float = 0.0, seconds: float = 0.1) -> WorkersStarted:
    return WorkersStarted(number, 0, 2, 0, (11, 12), seconds, pause, "because")


def recover(job: Job, at: float, number: int, *nodes: str) -> list[Span]:
    """The nodes run again at this time, after 0.1 s each for detect, decide, stop and start."""
    found = []
    for node in nodes:
        found += job.record(at - 0.1, WorkersStopped(number - 1, 0.1), node=node)
        found += job.record(at, started(number, pause=0.4), Recovered(number, 0.1, 0.1, 0.1, 0.1), node=node)
    return found


def names_and_times(spans: list[Span]) -> list[tuple[str, float, float]]:
    return [(span.name, round(span.start, 3), round(span.end, 3)) for span in spans]


def only(spans: list[Span], name: str) -> Span:
    (span,) = (span for span in spans if span.name == name)
    return span


def test_a_recovery_is_a_trace_with_a_span_for_each_node_and_phase() -> None:
    job = Job()
    job.runs(0.0, 1, "a")
    job.fails(10.1, 1, "a")
    job.record(10.2, formed(2, "a"))
    spans = recover(job, 10.4, 2, "a")
    assert names_and_times(spans) == [
        ("detect", 10.0, 10.1), ("decide", 10.1, 10.2), ("stop", 10.2, 10.3), ("start", 10.3, 10.4),
        ("node", 10.0, 10.4),
        ("recovery", 10.0, 10.4),
    ]  # fmt: skip
    node, recovery = spans[-2:]
    assert {span.parent for span in spans[:-2]} == {node.context.span}
    assert (node.parent, recovery.parent) == (recovery.context.span, "")
    assert len({span.context.trace for span in spans}) == 1
    assert len({span.context.span for span in spans}) == len(spans)


def test_a_recovery_names_the_failed_worker_and_the_budget() -> None:
    job = Job()
    job.runs(0.0, 1, "a", "b")
    job.fails(10.0, 1, "b")
    job.record(10.0, formed(2, "a", "b"))
    recovery = only(recover(job, 11.0, 2, "a", "b"), "recovery")
    assert recovery.attributes == {
        "ripstop.run_id": "job7", "ripstop.round": 1, "ripstop.next_round": 2,
        "ripstop.cause": "application", "ripstop.why": "rank 3 exited with code 7",
        "ripstop.node": "b", "ripstop.rank": 3, "ripstop.restarts_used": 1, "ripstop.restarts_limit": 5,
    }  # fmt: skip
    assert [event.name for event in recovery.events] == [
        "worker_failed", "budget_charged", "round_ended", "round_formed",
    ]  # fmt: skip
    assert recovery.events[0].attributes["ripstop.why"] == "exited with code 7"
    assert not recovery.error


def test_a_recovery_names_the_lost_node() -> None:
    job = Job()
    job.runs(0.0, 1, "a", "b")
    job.record(10.0, NodeGone("spare", "left", False), NodeGone("b", "lost: its lease ran out", True))
    job.record(10.0, RoundEnded(1, "node_lost", "node b lost", 0.0), formed(2, "a"))
    recovery = only(recover(job, 11.0, 2, "a"), "recovery")
    assert recovery.attributes["ripstop.node"] == "b"
    assert [event.name for event in recovery.events] == ["node_gone", "round_ended", "round_formed"]


def test_a_recovery_ends_when_its_last_node_runs() -> None:
    job = Job()
    job.runs(0.0, 1, "a", "b")
    job.fails(10.0, 1, "b")
    job.record(10.0, formed(2, "a", "b"))
    assert [span.name for span in recover(job, 11.0, 2, "a")][-1] == "node"
    assert only(recover(job, 12.0, 2, "b"), "recovery").end == 12.0


def test_if_workers_report_steps_a_recovery_ends_with_the_first_step_of_each_node() -> None:
    job = Job()
    job.runs(0.0, 1, "a", "b")
    job.record(1.0, FirstStep(1, 0, 0, 0.9), node="a")  # only workers of the first node report steps
    job.fails(10.0, 1, "b")
    job.record(10.0, formed(2, "a", "b"))
    assert {span.name for span in recover(job, 11.0, 2, "a", "b")} == {"detect", "decide", "stop", "start", "node"}
    spans = job.record(13.0, FirstStep(2, 0, 7, 2.0), node="a")
    assert names_and_times(spans) == [("first_step", 11.0, 13.0), ("node", 10.6, 13.0), ("recovery", 10.0, 13.0)]
    assert spans[0].attributes["ripstop.step"] == 7


def test_a_restore_of_state_is_a_span_of_its_node() -> None:
    job = Job()
    job.runs(0.0, 1, "a")
    job.fails(10.0, 1, "a")
    job.record(10.0, formed(2, "a"))
    node = only(recover(job, 11.0, 2, "a"), "node")
    (restore,) = job.record(12.0, StateRestored(2, 0, "peer", 6, 0.5), node="a")
    assert names_and_times([restore]) == [("restore", 11.5, 12.0)]
    assert (restore.parent, restore.attributes["ripstop.source"]) == (node.context.span, "peer")
    assert job.record(12.0, StateRestored(1, 0, "peer", 6, 0.5), node="a") == []  # of an older round


def test_an_unexpected_first_step_belongs_to_the_recovery() -> None:
    job = Job()
    job.runs(0.0, 1, "a")
    job.fails(10.0, 1, "a")
    job.record(10.0, formed(2, "a"))
    node = only(recover(job, 11.0, 2, "a"), "node")
    (step,) = job.record(13.0, FirstStep(2, 0, 7, 2.0), node="a")
    assert (step.name, step.parent, step.context.trace) == ("first_step", node.context.span, node.context.trace)


def test_waiting_for_a_round_after_the_workers_stopped_is_a_phase() -> None:
    job = Job()
    job.runs(0.0, 1, "a")
    job.fails(10.0, 1, "a")
    job.record(10.2, WorkersStopped(1, 0.1), node="a")
    job.record(15.2, formed(2, "a"))
    recovered = Recovered(2, detect=0.0, decide=0.1, stop=0.1, wait=5.0, start=0.1)
    spans = job.record(15.3, started(2, pause=5.3), recovered, node="a")
    assert names_and_times(spans)[:4] == [
        ("decide", 10.0, 10.1), ("stop", 10.1, 10.2), ("wait", 10.2, 15.2), ("start", 15.2, 15.3),
    ]  # fmt: skip


def test_the_start_phase_of_workers_that_go_on_in_place_ends_when_the_last_one_runs() -> None:
    job = Job()
    job.runs(0.0, 1, "a")
    job.fails(10.0, 1, "a")
    job.record(10.1, formed(2, "a"))
    job.record(10.3, started(2, pause=0.3), node="a")  # the new worker
    spans = job.record(10.5, Recovered(2, detect=0.0, decide=0.1, stop=0.0, start=0.4, kept=1), node="a")
    assert names_and_times(spans)[:3] == [("decide", 10.0, 10.1), ("start", 10.1, 10.5), ("node", 10.0, 10.5)]


def test_a_new_node_has_only_a_start_phase() -> None:
    job = Job()
    job.runs(0.0, 1, "a")
    job.record(10.0, RoundEnded(1, "node_joined", "node b joined", 0.0), formed(2, "a", "b"))
    spans = job.record(11.0, started(2), node="b")
    assert names_and_times(spans) == [("start", 10.9, 11.0), ("node", 10.9, 11.0)]
    recover(job, 11.0, 2, "a")
    job.fails(20.0, 2, "a")
    job.record(20.0, formed(3, "a", "c"))  # c was stopped an hour ago
    assert names_and_times(job.record(21.0, started(3, pause=3600.0), Recovered(3, 0, 3599.8, 0.1, 0.1), node="c")) == [
        ("start", 20.9, 21.0), ("node", 20.9, 21.0),
    ]  # fmt: skip


def test_a_new_node_whose_workers_report_steps_has_a_first_step_phase() -> None:
    job = Job()
    job.runs(0.0, 1, "a")
    job.record(10.0, RoundEnded(1, "node_joined", "node b joined", 0.0), formed(2, "a", "b"))
    job.record(11.0, started(2), node="b")
    assert names_and_times(job.record(11.5, FirstStep(2, 1, 7, 0.5), node="b")) == [("first_step", 11.0, 11.5)]


def test_a_failed_recovery_is_an_error_and_the_next_one_links_to_it() -> None:
    job = Job()
    job.runs(0.0, 1, "a", "b")
    job.fails(10.0, 1, "b")
    job.record(10.0, formed(2, "a", "b"))
    recover(job, 11.0, 2, "a")
    first = only(job.record(12.0, RoundEnded(2, "node_lost", "node b lost", 0.0)), "recovery")
    assert first.error == "round 2 ended before 1 of its 2 nodes ran: node b lost"
    assert first.end == 12.0
    job.record(12.0, formed(3, "a"))
    second = only(recover(job, 13.0, 3, "a"), "recovery")
    assert first.context in second.links
    assert not second.error


def test_a_recovery_without_a_next_round_ends_with_the_job() -> None:
    job = Job()
    job.runs(0.0, 1, "a")
    job.fails(10.0, 1, "a")
    recovery = only(job.record(70.0, JobClosed("failed", "no node joined", 1, 1)), "recovery")
    assert recovery.error == "no other round was formed: no node joined"
    assert recovery.end == 70.0
    assert job.end().error == "no node joined"


def test_a_job_and_its_rounds_are_a_trace_with_links_to_recoveries() -> None:
    job = Job()
    job.runs(0.0, 1, "a")
    (first,) = job.fails(10.0, 1, "a")
    job.record(10.0, formed(2, "a"))
    recovery = only(recover(job, 11.0, 2, "a"), "recovery")
    (second,) = job.record(20.0, JobClosed("succeeded", "all workers exited 0", 2, 1))
    root = job.end()
    assert names_and_times([root, first, second]) == [("job", 0.0, 20.0), ("round", 0.0, 10.0), ("round", 10.0, 20.0)]
    assert {span.parent for span in (first, second)} == {root.context.span}
    assert len({span.context.trace for span in (root, first, second, recovery)}) == 2
    assert (first.links, second.links, recovery.links) == ((recovery.context,), (), (root.context,))
    assert (first.error, second.error, root.error) == ("rank 3 exited with code 7", "", "")
    assert (first.attributes["ripstop.cause"], second.attributes["ripstop.cause"]) == ("application", "succeeded")


def test_the_span_of_a_job_has_its_goodput_if_workers_report_steps() -> None:
    job = Job()
    job.runs(0.0, 1, "a")
    job.record(5.0, FirstStep(1, 0, 0, 4.9), node="a")
    job.record(10.0, JobClosed("succeeded", "all workers exited 0", 1, 0))
    job.record(10.1, StepsDone(1, 0, 0, 50, 5.0), node="a")  # recorded when its workers stop
    assert job.end().attributes["ripstop.goodput"] == approx(0.5)
    silent = Job()
    silent.runs(0.0, 1, "a")
    silent.record(10.0, JobClosed("succeeded", "all workers exited 0", 1, 0))
    assert "ripstop.goodput" not in silent.end().attributes


def test_with_a_parent_all_spans_belong_to_its_trace() -> None:
    job = Job(PARENT)
    job.runs(0.0, 1, "a")
    job.fails(10.0, 1, "a")
    job.record(10.0, formed(2, "a"))
    recover(job, 11.0, 2, "a")
    job.record(20.0, JobClosed("succeeded", "all workers exited 0", 2, 1))
    root = job.end()
    assert {span.context.trace for span in job.spans} == {PARENT.trace}
    assert root.parent == PARENT.span
    assert {span.parent for span in job.spans if span.name in ("round", "recovery")} == {root.context.span}
    assert not any(span.links for span in job.spans)


def test_a_new_coordinator_sends_only_spans_that_it_saw_from_the_beginning() -> None:
    job = Job()
    told_again: list[tuple[Event, ...]] = [
        (WorkerFailed(1, 3, 99, "exited with code 7"),),
        (started(2, pause=0.4), Recovered(2, 0.1, 0.1, 0.1, 0.1), FirstStep(2, 0, 0, 0.1)),
    ]
    assert not [span for events in told_again for span in job.record(100.0, *events, node="a")]
    job.record(101.0, RoundFound(2, 1), RoundResumed(2, 1))
    job.fails(110.0, 2, "a")
    job.record(110.0, formed(3, "a"))
    assert names_and_times(recover(job, 111.0, 3, "a"))[0] == ("detect", 110.6, 110.7)
    assert only(job.spans, "round").start == 101.0


def test_repeated_and_stale_events_make_no_span() -> None:
    job = Job()
    job.runs(0.0, 1, "a", "b")
    job.fails(10.0, 1, "b")
    job.record(10.0, formed(2, "a", "b"))
    recover(job, 11.0, 2, "a")
    stale: list[Any] = [Recovered(2, 0.1, 0.1, 0.1, 0.1), Recovered(1, 0.1, 0.1, 0.1, 0.1), FirstStep(1, 0, 0, 0.1)]
    assert not job.record(11.5, *stale, node="a")


def test_a_span_keeps_its_latest_events() -> None:
    job = Job()
    job.runs(0.0, 1, "a")
    for rank in range(100):
        job.record(9.0, WorkerFailed(1, rank, 99, "exited with code 7"), node="a")
    (ended,) = job.fails(10.0, 1, "a")
    assert len(ended.events) == 32
    assert ended.events[-1].name == "round_ended"


def test_the_documentation_lists_every_span_and_attribute() -> None:
    job = Job()
    job.runs(0.0, 1, "a")
    job.record(1.0, FirstStep(1, 0, 0, 0.9), node="a")
    job.fails(10.0, 1, "a")
    job.record(10.0, formed(2, "a"))
    recover(job, 11.0, 2, "a")
    job.record(12.0, StateRestored(2, 0, "memory", 6, 0.5), node="a")
    job.record(13.0, FirstStep(2, 0, 7, 2.0), node="a")
    job.record(20.0, JobClosed("succeeded", "all workers exited 0", 2, 1))
    job.end()
    named = set(re.findall(r"`([^`\n]+)`", PAGE.read_text()))
    assert {span.name for span in job.spans} <= named
    attributes = {attribute for span in job.spans for attribute in span.attributes}
    assert attributes == {name for name in named if re.fullmatch(r"ripstop\.[a-z_]+", name)}
