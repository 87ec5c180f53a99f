"""When faults are injected and when a job has healed, as transcripts: inputs with times, and the commands."""

from typing import Any

from ripstop.cli.chaos.experiment import (
    Experiment,
    Finish,
    Inject,
    Injected,
    Report,
    Sample,
    Sampled,
    Tick,
)
from ripstop.cli.chaos.plan import PlannedFault, ScheduledFault
from ripstop.cli.chaos.results import Outcome, Result
from ripstop.model import events
from ripstop.model.events import EventRecord
from ripstop.model.fault_injection import FaultKind

KILL = ScheduledFault(1, 10.0, PlannedFault(FaultKind.WORKER_KILL), 0.5)
STOP = ScheduledFault(1, 10.0, PlannedFault(FaultKind.WORKER_STOP, options={"seconds": 5}), 0.5)
DROP = ScheduledFault(2, 20.0, PlannedFault(FaultKind.CONNECTION_DROP), 0.5)
REPLY = Injected("f1", "b", 1, round=1)


class Transcript:
    """An experiment that starts at 100; `at` is seconds after that."""

    def __init__(self, *schedule: ScheduledFault, heal_within: float = 60.0) -> None:
        self.experiment = Experiment(schedule, heal_within, 100.0)

    def on(self, at: float, event: Any, node: str = "") -> list[Any]:
        """The commands, without `Sample`, whose times other tests check."""
        if not isinstance(event, Injected | Sampled | Tick):
            event = EventRecord(1, 0.0, node, event)
        return [c for c in self.experiment.on(event, 100.0 + at) if not isinstance(c, Sample)]

    def round(self, at: float, number: int, *nodes: str, steps: bool = True) -> list[Any]:
        """A round is formed, its nodes start their workers, and one of them steps."""
        out = self.on(at, events.RoundFormed(number, nodes, 2, "s", 0, ""))
        for node in nodes:
            out += self.on(at, events.WorkersStarted(number, 0, 2, 0, (1,), 0.0, 0.0, ""), node)
        return out + (self.on(at, events.FirstStep(number, 0, 1, 0.1), nodes[0]) if steps else [])

    def sampled(self, at: float, round: int, *steps: int | None, age: float | None = None) -> list[Any]:
        progress = {rank: (step, age) for rank, step in enumerate(steps)}
        return self.on(at, Sampled(round, ("a", "b"), at, progress, is_complete=True))


def healed(at: float, seconds: float, number: int = 1, **facts: Any) -> Report:
    kind = DROP.spec.kind if number == 2 else facts.pop("kind", KILL.spec.kind)
    facts = {"node": "b", "rank": 1, **facts}
    return Report(Result(number, kind, Outcome.HEALED, at, seconds=seconds, **facts))


def injected(schedule: tuple[ScheduledFault, ...], **more: Any) -> Transcript:
    """The first fault was injected at 10, in round 1 of the nodes a and b."""
    job = Transcript(*schedule, **more)
    assert job.round(0, 1, "a", "b") == []
    assert job.on(10, Tick()) == [Inject(schedule[0])]
    assert job.on(10, REPLY) == []
    return job


def test_a_killed_worker_is_healed_by_the_first_step_of_the_next_round() -> None:
    job = injected((KILL,))
    assert job.on(10.1, events.FaultEnded("f1", "worker-kill", ""), "b") == []
    assert job.on(10.2, events.RoundFormed(2, ("a", "b"), 2, "s", 1, "")) == []
    assert job.on(10.3, events.WorkersStarted(2, 0, 2, 1, (1,), 0.0, 0.0, ""), "a") == []
    assert job.on(10.4, events.FirstStep(2, 0, 7, 0.1), "a") == []  # the workers of b have not started
    assert job.on(10.5, events.WorkersStarted(2, 1, 2, 1, (2,), 0.0, 0.0, ""), "b") == [
        healed(10.0, 0.5, round=2, restarted=True),
        Finish(),
    ]


def test_steps_of_the_round_that_was_hit_do_not_heal_a_killed_worker() -> None:
    job = injected((KILL,))
    job.on(10.1, events.FaultEnded("f1", "worker-kill", ""), "b")
    for at in (11, 12, 13, 14):
        assert job.sampled(at, 1, at, at) == []


def test_a_round_that_ends_before_it_steps_does_not_heal() -> None:
    job = injected((KILL,))
    assert job.round(11, 2, "a", "b", steps=False) == []
    assert job.round(12, 3, "a", "b") == [healed(10.0, 2.0, round=3, restarted=True), Finish()]


def test_without_step_reports_started_workers_are_enough() -> None:
    job = Transcript(KILL)
    job.round(0, 1, "a", "b", steps=False)
    assert job.on(10, Tick()) == [Inject(KILL)]
    job.on(10, REPLY)
    assert job.round(11, 2, "a", "b", steps=False) == [healed(10.0, 1.0, round=2, restarted=True), Finish()]


def test_a_stopped_worker_is_healed_when_all_workers_step_again_after_its_end() -> None:
    job = injected((STOP,))
    for at in (11, 12, 13):
        assert job.sampled(at, 1, 50, 50) == []
    assert job.on(15, events.FaultEnded("f1", "worker-stop", ""), "b") == []
    assert job.sampled(15.5, 1, 50, 50) == []  # perhaps collected before the end
    assert job.sampled(16.5, 1, 60, 50) == []
    assert job.sampled(17.5, 1, 70, 50) == []  # rank 1 stands still
    assert job.sampled(18.5, 1, 80, 51) == [healed(10.0, 8.5, round=1, kind=STOP.spec.kind), Finish()]


def test_a_worker_that_reports_heartbeats_without_steps_has_progress_by_their_age() -> None:
    job = injected((STOP,))
    job.on(15, events.FaultEnded("f1", "worker-stop", ""), "b")
    job.sampled(15.5, 1, None, None, age=5.5)
    job.sampled(16.5, 1, None, None, age=6.5)
    assert job.sampled(17.5, 1, None, None, age=7.5) == []
    assert job.sampled(18.5, 1, None, None, age=0.1)[0].result.outcome is Outcome.HEALED


def test_the_same_collection_read_twice_is_no_progress() -> None:
    job = injected((STOP,))
    job.on(15, events.FaultEnded("f1", "worker-stop", ""), "b")
    for step in (50, 51, 52):
        assert job.on(16, Sampled(1, ("a", "b"), 7.0, {0: (step, None)}, is_complete=True)) == []


def test_ranks_of_a_node_that_does_not_reply_are_not_healed() -> None:
    job = injected((STOP,))
    job.on(15, events.FaultEnded("f1", "worker-stop", ""), "b")
    for at in (16, 17, 18):
        assert job.on(at, Sampled(1, ("a", "b"), at, {0: (at, None)}, is_complete=False)) == []


def test_a_hang_that_is_detected_is_healed_by_the_next_round_and_the_next_fault_waits_for_its_end() -> None:
    job = injected((STOP, DROP))
    assert job.round(13, 2, "a", "b") == [healed(10.0, 3.0, round=2, restarted=True, kind=STOP.spec.kind)]
    assert job.on(20, Tick()) == []  # the agent has not undone the fault
    assert job.on(21, events.FaultEnded("f1", "worker-stop", "the worker ended"), "b") == [Inject(DROP)]


def test_the_next_fault_waits_until_the_job_trains() -> None:
    job = injected((KILL, DROP))
    job.round(11, 2, "a", "b")
    assert job.on(19, events.RoundFormed(3, ("a", "b"), 2, "s", 1, "")) == []
    assert job.on(20, Tick()) == []
    assert job.round(25, 3, "a", "b") == [Inject(DROP)]


def test_a_fault_that_does_not_heal_in_time_is_reported_and_the_next_ones_are_not_injected() -> None:
    job = injected((KILL, DROP), heal_within=30.0)
    job.on(10.5, events.RoundFormed(2, ("a", "b"), 2, "s", 1, ""))
    (report,) = job.on(40, Tick())
    assert report.result == Result(1, "worker-kill", Outcome.NOT_HEALED, 10.0, node="b", rank=1, why="not within 30 s")
    assert job.on(69, Tick()) == []
    assert job.on(70, Tick()) == [
        Report(Result(2, "connection-drop", Outcome.NOT_INJECTED, 70.0, why="the job did not train for 30 s")),
        Finish(),
    ]


def test_a_lasting_fault_has_its_own_time_and_the_time_to_heal() -> None:
    job = injected((STOP,), heal_within=30.0)
    job.on(15, events.FaultEnded("f1", "worker-stop", ""), "b")
    assert job.on(44.9, Tick()) == []
    assert job.on(45, Tick())[0].result.outcome is Outcome.NOT_HEALED


def test_when_the_job_is_over_nothing_more_is_injected() -> None:
    job = injected((KILL, DROP))
    out = job.on(12, events.JobClosed("failed", "budget", 1, 0))
    assert [c.result.outcome for c in out[:-1]] == [Outcome.NOT_HEALED, Outcome.NOT_INJECTED]
    assert out[0].result.why == "the job is over: failed: budget"
    assert out[-1] == Finish()
    assert job.on(20, Tick()) == []


def test_a_skipped_fault_is_reported_and_the_next_one_comes_at_its_time() -> None:
    job = Transcript(KILL, DROP)
    job.round(0, 1, "a", "b")
    job.on(10, Tick())
    (report,) = job.on(10, Injected(node="b", rank=1, skipped="no cgroup"))
    assert (report.result.outcome, report.result.why) == (Outcome.SKIPPED, "no cgroup")
    assert job.experiment.deadline() == 120.0
    assert job.on(20, Tick()) == [Inject(DROP)]


def test_a_job_whose_events_are_no_longer_kept_trains_if_its_samples_show_progress() -> None:
    job = Transcript(KILL)
    assert job.experiment.on(Tick(), 100.0) == [Sample()]
    for at in (1, 2):
        assert job.sampled(at, 5, at, at) == []
    assert job.sampled(11, 5, 9, 9) == [Inject(KILL)]


def test_samples_are_read_only_while_a_fault_is_open_or_the_job_does_not_train() -> None:
    job = Transcript(KILL)
    assert job.experiment.on(Tick(), 100.0) == [Sample()]
    assert job.experiment.deadline() == 100.5
    job.round(0.1, 1, "a", "b")
    assert job.experiment.deadline() == 110.0
    assert job.experiment.on(Tick(), 110.0) == [Inject(KILL)]
    assert job.experiment.on(REPLY, 110.0) == [Sample()]
    assert job.experiment.deadline() == 110.5


def test_events_of_nodes_do_not_speak_for_the_coordinator() -> None:
    job = injected((KILL,))
    assert job.on(11, events.JobClosed("failed", "no", 1, 0), node="b") == []
    job.on(11, events.JobStarted("r", "1", "a", 1, 2, 3))
    job.on(11, events.JobStarted("r", "1", "b", 1, 2, 3), node="b")
    assert job.experiment.coordinator == "a"
