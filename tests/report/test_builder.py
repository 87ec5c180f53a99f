"""The report of a job, from its events."""

import pytest

from ripstop.model import events
from ripstop.model.events import MAX_TRACEBACK
from ripstop.report.builder import NoEvents, build_report
from ripstop.report.facts import MAX_EVIDENCE_CHARS, MAX_ROUNDS
from ripstop.report.html import render
from ripstop.report.model import JobResult
from tests.report.transcripts import BEGAN, Transcript, evidence

GLOO = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer"
TRACE = 'Traceback (most recent call last):\n  File "train.py", line 3\nValueError: bad shard'


def test_a_job_without_faults_succeeded() -> None:
    job = Transcript()
    job.round(2.0, 1, first_step=0)
    job.steps(12.5, 1, 0, 100, 10.0)
    job.close(12.5)
    report = build_report(job.records)
    assert (report.summary.run_id, report.summary.result) == ("job7", JobResult.SUCCEEDED)
    assert report.incidents == ()
    assert report.summary.goodput == pytest.approx(0.8)
    assert report.summary.seconds_per_step == pytest.approx(0.1)
    assert (report.time.startup, report.time.running) == (pytest.approx(2.5), pytest.approx(10.0))
    assert ("torch", "2.9.0", 2) in [(one.name, one.value, one.nodes) for one in report.versions]


def test_the_coordinators_node_may_leave_without_a_reason() -> None:
    job = Transcript()
    job.add(5.0, events.NodeLeaving("a", ""))
    summary = build_report(job.records).summary
    assert (summary.result, summary.why) == (JobResult.INTERRUPTED, "node a, which ran the coordinator, left")


def test_the_root_cause_is_not_the_worker_that_failed_first_but_the_one_that_explains_the_others() -> None:
    job = Transcript(nodes=("a", "b", "c"))
    job.round(1.0, 1)
    job.failure(5.0, 1, 0, GLOO)
    job.failure(5.1, 1, 2, "ValueError: bad shard", TRACE)
    job.failure(5.2, 1, 1, GLOO)
    job.restart(5.3, 1)
    job.round(5.4, 2, pause=0.7)
    job.close(20.0)
    (incident,) = build_report(job.records).incidents
    assert incident.title == "rank 2 on host-2: ValueError: bad shard"
    assert incident.root is not None and incident.root.traceback == TRACE
    assert (incident.root.node, incident.node) == ("c", "c")
    assert [victim.rank for victim in incident.victims] == [0, 1]
    assert (incident.round, incident.is_end, incident.cause) == (1, False, "application")
    assert incident.decision == "restarted; 1 of 3 restarts are used"


def test_time_is_lost_by_cause_and_phase_and_repeated_steps_count() -> None:
    job = Transcript()
    job.round(1.0, 1, first_step=0)
    job.failure(11.5, 1, 1, "ValueError: x", TRACE)
    job.restart(11.6, 1)
    job.steps(11.7, 1, 0, 100, 10.0)
    job.round(12.0, 2, first_step=81, pause=1.0)
    job.steps(22.5, 2, 81, 181, 10.0)
    job.close(22.5)
    time = build_report(job.records).time
    losses = {loss.cause: loss for loss in time.losses}
    assert losses.keys() == {"application", "start-up"}
    lost = losses["application"]
    assert (lost.count, lost.repeated_steps) == (1, 20)
    assert lost.repeated == pytest.approx(2.0)
    phases = lost.phases
    assert (phases.detect, phases.decide, phases.stop, phases.start) == (0.1, 0.2, 0.3, 0.1)
    assert (phases.wait, phases.first_step) == (pytest.approx(0.3), 0.4)
    assert lost.total == pytest.approx(1.4 + 2.0)
    assert time.in_steps == pytest.approx(18.0)
    assert time.total == pytest.approx(time.startup + time.running + time.downtime)


def test_a_lost_node_is_the_cause_and_the_workers_that_lost_it_are_victims() -> None:
    job = Transcript()
    job.round(1.0, 1)
    job.failure(5.0, 1, 0, GLOO)
    job.add(5.1, events.NodeGone("b", "lost: no message for 3 s", True))
    job.restart(5.1, 1, "node_lost", "node b lost: no message for 3 s")
    job.round(5.2, 2, pause=0.5)
    job.close(9.0)
    report = build_report(job.records)
    (incident,) = report.incidents
    assert incident.title == "node b was lost: no message for 3 s"
    assert incident.root is None and [victim.rank for victim in incident.victims] == [0]
    assert [(node.name, node.is_lost, node.root_causes) for node in report.nodes] == [("a", False, 0), ("b", True, 1)]


def test_the_suspect_rank_of_a_hang_is_the_cause_with_its_stack() -> None:
    job = Transcript()
    job.round(1.0, 1)
    job.add(9.0, events.WorkerHangs(1, 0, 100, 5.0, "no heartbeat", "in all_reduce (train.py:3)"), "a")
    stack = "thread MainThread\n  read_shard (train.py:37)"
    hang = {
        "hangs": True,
        "exitcode": -1,
        "call": "read_shard",
        "where": "train.py:37",
        "collectives": "in no collective",
    }
    waiting = {
        "hangs": True,
        "exitcode": -1,
        "waits": True,
        "sign": "no heartbeat",
        "call": "all_reduce",
        "where": "t:3",
    }
    job.add(9.0, evidence(1, 0, BEGAN + 4, "waits in all_reduce", **waiting), "a")
    job.add(9.1, evidence(1, 1, BEGAN + 4, "is in read_shard", stack, **hang), "b")
    job.add(9.2, events.HangDiagnosed(1, (1,), "rank 0 waits in all_reduce; rank 1 is in read_shard"))
    job.add(9.2, events.RoundEnded(1, "infrastructure", "a hang", 0.0))
    job.failure(9.3, 1, 0, GLOO)  # while it is stopped
    job.round(9.4, 2, pause=1.0)
    (incident,) = build_report(job.records).incidents
    assert incident.title == "rank 1 on host-1 hung: rank 0 waits in all_reduce; rank 1 is in read_shard"
    assert incident.root is not None and incident.root.traceback == stack
    assert incident.root.collectives == "in no collective"
    assert [(victim.rank, victim.message) for victim in incident.victims] == [(0, "waits in all_reduce")]


def test_a_failure_that_ends_the_job_is_its_cause() -> None:
    job = Transcript(max_restarts=0)
    job.round(1.0, 1)
    job.failure(5.0, 1, 1, "ValueError: bad shard", TRACE)
    job.add(5.1, events.BudgetCharged(1, "application", 0, 0, False, "spent"))
    job.add(5.1, events.JobClosing("failed", "rank 1 exited with code 1; 0 of 0 restarts are spent"))
    job.close(5.5, "failed", "rank 1 exited with code 1; 0 of 0 restarts are spent")
    report = build_report(job.records)
    assert report.summary.result is JobResult.FAILED
    assert report.summary.cause == "rank 1 on host-1: ValueError: bad shard"
    assert report.incidents[-1].is_end and report.incidents[-1].decision == "not restarted; 0 of 0 restarts are used"


def test_a_job_whose_coordinators_node_left_was_interrupted() -> None:
    job = Transcript()
    job.round(1.0, 1)
    job.add(5.0, events.NodeLeaving("a", "SIGTERM"))
    job.add(5.1, events.NodeGone("a", "left: SIGTERM", False))
    job.add(5.1, events.RoundEnded(1, "node_left", "node a left: SIGTERM", 0.0))
    summary = build_report(job.records).summary
    assert summary.result is JobResult.INTERRUPTED
    assert summary.cause == "node a left: SIGTERM"
    assert "which ran the coordinator" in summary.why


def test_a_job_without_an_end_is_unfinished() -> None:
    job = Transcript()
    job.round(1.0, 1)
    job.add(900.0, events.CheckpointSaved(1, 0, 7, "/x"), "a")
    summary = build_report(job.records).summary
    assert summary.result is JobResult.UNFINISHED and summary.seconds == pytest.approx(900.0)
    assert "it still runs, or the process of its coordinator was killed" in summary.why


def test_an_agent_that_ended_without_the_coordinator_shows_that_it_was_killed() -> None:
    job = Transcript()
    job.round(1.0, 1)
    job.add(60.0, events.AgentEnded(1, "no coordinator for 30 s"), "b")
    assert build_report(job.records).summary.why == (
        "the process of the coordinator was killed, and node b ended without it: no coordinator for 30 s"
    )


def test_a_node_that_left_a_running_job_is_no_sign_of_a_killed_coordinator() -> None:
    job = Transcript()
    job.round(1.0, 1)
    job.add(5.0, events.NodeGone("b", "left: drained", False))
    job.add(5.1, events.AgentEnded(0, "drained"), "b")
    assert "it still runs" in build_report(job.records).summary.why


def test_the_events_of_one_node_are_enough() -> None:
    job = Transcript()
    job.round(1.0, 1, first_step=0)
    job.failure(5.0, 1, 1, "ValueError: bad shard", TRACE)
    job.add(5.2, events.WorkersStopping(1, "rank 1 exited with code 1"), "b")
    job.add(5.4, events.AgentEnded(1, "rank 1 exited with code 1"), "b")
    report = build_report(record for record in job.records if record.node == "b")
    assert (report.summary.run_id, report.summary.result) == ("job7", JobResult.FAILED)
    assert report.incidents[0].title == "rank 1 on host-1: ValueError: bad shard"
    assert any("single nodes" in note for note in report.notes)


def test_planned_changes_are_no_failures() -> None:
    job = Transcript()
    job.round(1.0, 1)
    job.add(5.0, events.OperatorAction("restart", "uid 1000", "done"))
    job.restart(5.0, 1, "operator", "an operator asked for it")
    job.round(5.1, 2, pause=0.3)
    job.restart(7.0, 2, "node_joined", "node c joined")
    job.round(7.1, 3, pause=0.3)
    job.close(9.0)
    report = build_report(job.records)
    assert report.incidents == () and report.summary.restarts == 0
    assert [action.text for action in report.actions] == ["restart by uid 1000: done"]
    assert [round.cause for round in report.rounds] == ["operator", "node_joined", ""]


def test_the_health_of_nodes_is_counted() -> None:
    job = Transcript()
    job.round(1.0, 1)
    job.add(2.0, events.NodeUnhealthy("b", ("disk: 1 MiB free",)))
    job.add(3.0, events.NodeHealthy("b"))
    job.add(4.0, events.NodeUnhealthy("b", ("GPU 3: ECC errors",)))
    job.add(4.0, events.NodeQuarantined("b", "3 failures in 600 s", 600.0))
    node = build_report(job.records).nodes[1]
    assert (node.unhealthy, node.problems, node.quarantines) == (2, ("GPU 3: ECC errors",), 1)


def test_a_job_of_many_rounds_is_bounded_and_counts_all_of_them() -> None:
    job = Transcript(nodes=("a",))
    number = 3 * MAX_ROUNDS
    for round in range(1, number + 1):
        job.round(10.0 * round, round, pause=1.0 if round > 1 else 0.0)
        job.failure(10.0 * round + 9, round, 0, "ValueError: x", TRACE)
        job.restart(10.0 * round + 9, round)
    report = build_report(job.records)
    assert (report.summary.rounds, report.summary.restarts) == (number, number)
    assert MAX_ROUNDS // 2 <= len(report.rounds) == len(report.incidents) <= MAX_ROUNDS
    assert report.omitted["rounds"] == number - len(report.rounds)
    assert sum(loss.count for loss in report.time.losses if loss.cause == "application") == number - 1


def test_the_evidence_of_old_failures_is_dropped_before_it_takes_much_memory() -> None:
    job = Transcript(nodes=tuple(f"n{number}" for number in range(20)))
    for round in range(1, 41):
        job.round(float(round), round)
        for rank in range(20):
            job.failure(round + 0.5, round, rank, "ValueError: x", "Traceback\n" + " x" * 100_000)
        job.restart(round + 0.6, round)
    workers = [
        worker for incident in build_report(job.records).incidents for worker in (incident.root, *incident.victims)
    ]
    kept = [len(worker.traceback) for worker in workers if worker]
    assert len(kept) == 800 and kept[0] == 0 and kept[-1] == MAX_TRACEBACK
    assert MAX_EVIDENCE_CHARS // 2 < sum(kept) <= MAX_EVIDENCE_CHARS


def test_wrong_clocks_do_not_break_a_report() -> None:
    job = Transcript()
    job.round(1.0, 1, first_step=0)
    job.add(-1e9, events.AgentMessage("x"), "b")
    job.add(1e15, events.FirstStep(1, 1, 5, -4.0), "b")
    job.close(-5.0)
    summary = build_report(job.records).summary
    assert summary.seconds >= 0 and summary.result is JobResult.SUCCEEDED


def first_run() -> Transcript:
    job = Transcript()
    job.round(1.0, 1)
    job.failure(5.0, 1, 1, "ValueError: bad shard", TRACE)
    return job


@pytest.mark.parametrize("is_closed", [True, False])
def test_of_several_runs_with_one_id_the_last_one_is_reported(is_closed: bool) -> None:
    first, second = first_run(), Transcript(nodes=("c", "d"))
    if is_closed:
        first.close(6.0, "failed", "x")
    second.round(1.0, 1, first_step=0)
    second.close(60.0)
    report = build_report([*first.records, *second.records])
    assert report.summary.result is JobResult.SUCCEEDED and report.incidents == ()
    assert [node.name for node in report.nodes] == ["c", "d"] and report.summary.rounds == 1
    assert any("1 earlier runs" in note for note in report.notes)


@pytest.mark.parametrize("is_found", [True, False])
def test_another_coordinator_of_the_same_run_continues_the_report(is_found: bool) -> None:
    job = first_run()
    job.add(8.0, events.JobStarted("job7", "0.1.0", "b", 1, 2, 3))
    if is_found:
        job.add(8.1, events.RoundFound(1, 2))
    else:
        job.round(8.1, 2, pause=1.0)
    job.close(60.0)
    report = build_report(job.records)
    assert report.summary.nodes == 2 and len(report.incidents) == 1
    assert [action.text for action in report.actions] == ["a new coordinator took over"]


def test_no_events_are_an_error() -> None:
    with pytest.raises(NoEvents):
        build_report([])


def test_stragglers_have_their_times_and_evidence() -> None:
    job = Transcript()
    job.round(2.0, 1)
    job.add(130.0, events.StragglerDetected(1, "b", (1,), 0.213, 0.064, 120.0, "GPU 3: throttled by heat"))
    job.add(190.0, events.StragglerEnded(1, "b", (1,), 180.0, "fast again"))
    job.add(200.0, events.StragglerDetected(1, "a", (0,), 0.2, 0.1, 120.0, "load <b>9</b>"))
    report = build_report(job.records)
    ended, open_one = report.stragglers
    assert (ended.node, ended.ranks, ended.at, ended.ended_at) == ("b", (1,), BEGAN + 130.0, BEGAN + 190.0)
    assert (open_one.step_time, open_one.median, open_one.ended_at) == (0.2, 0.1, None)
    page = render(report)
    assert "GPU 3: throttled by heat" in page and "load &lt;b&gt;9" in page
