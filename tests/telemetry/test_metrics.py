"""The counts of a job, and the page of its metrics."""

import shutil
import subprocess

import pytest
from prometheus_client.parser import text_string_to_metric_families

from ripstop.model.events import (
    BudgetCharged,
    BudgetRefunded,
    CheckpointSaved,
    Event,
    EventRecord,
    FirstStep,
    NodeGone,
    NodeJoined,
    NodeRejected,
    Recovered,
    RoundEndCause,
    RoundEnded,
    RoundFormed,
    StateRestored,
    StepsDone,
    WorkerFailed,
)
from ripstop.model.status import JobStatus, NodeState, NodeStatus, Phase, ReplicationStatus, StragglerStatus
from ripstop.model.usage import GpuSample, NodeSample, RankSample, StandbySample
from ripstop.telemetry.metrics import Totals
from ripstop.telemetry.prometheus import METRICS, prometheus_page

EVENTS: list[tuple[str, Event]] = [
    ("", NodeJoined("a", "h", 1)),
    ("", NodeJoined("b", "h", 1)),
    ("", NodeRejected("c", "no")),
    ("", RoundFormed(1, ("a", "b"), 2, "h:1", 0, "first round")),
    ("a", FirstStep(1, 0, 1, 3.0)),
    ("a", CheckpointSaved(1, 0, 10, "x")),
    ("b", CheckpointSaved(1, 1, 10, "x")),
    ("b", WorkerFailed(1, 1, 7, "exited with code 1")),
    ("", BudgetCharged(1, RoundEndCause.APPLICATION, 1, 3, True, "")),
    ("", RoundEnded(1, RoundEndCause.APPLICATION, "b failed", 0.0)),
    ("a", StepsDone(1, 0, 1, 11, 5.0)),
    ("", RoundFormed(2, ("a", "b"), 2, "h:2", 1, "b failed")),
    ("a", Recovered(2, 0.0, 0.0, 0.2, 0.03)),
    ("b", Recovered(2, 0.004, 0.002, 0.01, 0.03, wait=0.02)),
    ("a", StateRestored(2, 0, "memory", 10, 0.5)),
    ("b", StateRestored(2, 1, "peer", 10, 1.5)),
    ("a", FirstStep(2, 0, 11, 0.7)),
    ("", NodeGone("b", "lost", True)),
    ("", BudgetRefunded(2, "b")),
    ("", RoundEnded(2, RoundEndCause.NODE_LOST, "b lost", 0.0)),
    ("", NodeGone("a", "left", False)),
]


def counted_totals() -> Totals:
    totals = Totals()
    for i, (node, event) in enumerate(EVENTS):
        totals.on(EventRecord(i, 100.0 + i, node, event))
    return totals


def test_the_events_of_a_job_are_counted() -> None:
    totals = counted_totals()
    assert (totals.rounds, totals.charged, totals.refunded, totals.worker_failures) == (2, 1, 1, 1)
    assert (totals.nodes_joined, totals.nodes_lost, totals.nodes_left, totals.nodes_rejected) == (2, 1, 1, 1)
    assert {cause: n for cause, n in totals.restarts.items() if n} == {
        RoundEndCause.APPLICATION: 1,
        RoundEndCause.NODE_LOST: 1,
    }
    assert (totals.checkpoints, totals.checkpoint) == (1, (10, 105.0))
    assert totals.events["round_formed"] == 2


def test_a_charge_that_is_not_allowed_is_not_counted() -> None:
    totals = Totals()
    totals.on(
        EventRecord(1, 100.0, "", BudgetCharged(1, RoundEndCause.APPLICATION, 0, 0, False, "0 of 0 restarts are spent"))
    )
    assert totals.charged == 0


def test_a_phase_without_duration_is_not_observed() -> None:
    counted = {phase: (sum(h.counts), round(h.sum, 6)) for phase, h in counted_totals().recovery.items()}
    assert counted == {
        "detect": (1, 0.004),
        "decide": (1, 0.002),
        "stop": (2, 0.21),
        "wait": (1, 0.02),
        "start": (2, 0.06),
        "first_step": (1, 0.7),  # not of the first round: nothing was healed there
    }


def test_an_agent_cannot_record_events_of_the_coordinator() -> None:
    totals = Totals()
    totals.on(EventRecord(1, 1.0, "a", RoundEnded(1, "of my own making", "", 0.0)))
    totals.on(EventRecord(2, 1.0, "a", NodeGone("b", "lost", True)))
    assert (sum(totals.restarts.values()), totals.nodes_lost) == (0, 0)


def full_page() -> str:
    """A page with a value for every metric."""
    nodes = tuple(NodeStatus(name, "h", 1, "default", NodeState.RUNNING, i, i) for i, name in enumerate("ab"))
    slow = (StragglerStatus("b", (1,), 0.3, 0.1, 60.0, "load 3.0 per CPU"),)
    copies = (ReplicationStatus("state", 2, 7, 1, 0.5, 1000),)
    status = JobStatus("job7", Phase.RUNNING, "", 5.0, 2, 2, 1, 3, 1, 4, 4, nodes, replication=copies, stragglers=slow)
    rank = RankSample(0, 12.5, 2**30, 8, 2, 1000, 11, 2.5, 0.1, 40, 0.1, 7, 0.5, 3000, 0.25)
    gpu, standby = GpuSample(0, 0.9, 1, 2, 60, 650.0, 0, 0), StandbySample(0, 2**23, 2**29)
    sample = NodeSample(118.0, 2, 0.5, 2**25, (rank,), (gpu,), (standby,))
    return prometheus_page(counted_totals(), status, {"a": sample}, 120.0).decode()


def test_every_metric_is_on_the_page_with_its_type_help_and_labels() -> None:
    families = {family.name: family for family in text_string_to_metric_families(full_page())}
    for metric in METRICS.values():
        name = metric.name.removesuffix("_total") if metric.type == "counter" else metric.name
        family = families.pop(name)
        assert (family.type, family.documentation) == (metric.type, metric.help)
        labels = {label for sample in family.samples for label in sample.labels}
        assert labels - {"le"} == set(metric.labels)
    assert not families


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool here: apt install prometheus")
def test_promtool_accepts_the_page() -> None:
    checked = subprocess.run(
        ["promtool", "check", "metrics"], input=full_page(), capture_output=True, text=True, timeout=120, check=False
    )
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


def test_names_follow_the_conventions_of_prometheus() -> None:
    assert all((m.type == "counter") == m.name.endswith("_total") for m in METRICS.values())
    assert len({m.help for m in METRICS.values()}) == len(METRICS)


def test_a_job_is_in_exactly_one_phase() -> None:
    lines = [line for line in full_page().splitlines() if line.startswith("ripstop_phase{")]
    assert [line for line in lines if line.endswith(" 1.0")] == ['ripstop_phase{phase="running"} 1.0']


def test_a_node_that_did_not_reply_is_down_and_has_no_ranks() -> None:
    lines = full_page().splitlines()
    assert 'ripstop_node_up{host="h",node="a"} 1.0' in lines
    assert 'ripstop_node_up{host="h",node="b"} 0.0' in lines
    assert not any('rank="1"' in line for line in lines)


def test_unknown_values_are_left_out() -> None:
    status = JobStatus("job7", Phase.GATHERING, "", 5.0, 0, 0, 0, 3, 1, 4, 4, ())
    empty = prometheus_page(
        Totals(), status, {"a": NodeSample(1.0, 1, 0.5, 1, (RankSample(0, 1.0, 1, 1, 1, 0),))}, 120.0
    ).decode()
    absent = ("state", "goodput", "gpu", "checkpoint_step", "worker_step", "heartbeat", "lost_steps")
    assert [name for name in absent if f"ripstop_{name}" in empty or f"worker_{name}" in empty] == []


def test_hostile_records_and_names_do_not_break_the_page() -> None:
    totals = counted_totals()
    most = 2**63 - 1
    for seq, event in enumerate(
        (
            Recovered(2, 1e308, 1e308, 1e308, 1e308),
            Recovered(2, 1e308, 1e308, 1e308, 1e308),
            FirstStep(most, most, -most, -1e308),
            StepsDone(most, -most, -most, most, 1e308),
            StepsDone(most - 1, -most, -most, most, 1e308),
            CheckpointSaved(1, 1, most, ""),
            StateRestored(most, 1, "the moon", most, 1.0),
            StateRestored(most, 1, "disk", most, -1e308),
        )
    ):
        totals.on(EventRecord(seq, -1e308, "a", event))
    status = JobStatus(
        "job7\ud800", Phase.RUNNING, "", 5.0, 2, 2, 1, 3, 1, 4, 4, (NodeStatus("\udfff", "h", 1, "r", NodeState.SPARE),)
    )
    text = prometheus_page(totals, status, {}, 120.0).decode()
    assert 'ripstop_job_info{run_id="job7?"} 1.0' in text
    assert list(text_string_to_metric_families(text))


def test_buckets_are_cumulative() -> None:
    lines = [line for line in full_page().splitlines() if 'phase="stop"' in line]
    assert 'ripstop_recovery_seconds_bucket{le="0.01",phase="stop"} 1.0' in lines
    assert 'ripstop_recovery_seconds_bucket{le="0.25",phase="stop"} 2.0' in lines
    assert 'ripstop_recovery_seconds_bucket{le="+Inf",phase="stop"} 2.0' in lines
    assert 'ripstop_recovery_seconds_count{phase="stop"} 2.0' in lines


def test_the_workers_that_the_last_recovery_kept_in_place_are_summed_over_its_nodes() -> None:
    totals = Totals()
    for number, (node, round, kept) in enumerate([("a", 2, 4), ("a", 3, 1), ("b", 3, 2), ("b", 2, 4)]):
        totals.on(EventRecord(number, 200.0, node, Recovered(round, 0.1, 0.1, 0.1, 0.1, kept)))  # the last one is late
    assert (totals.recovered_round, totals.kept) == (3, 3)


def test_restores_are_counted_by_source_and_those_of_the_latest_round_are_known() -> None:
    totals = counted_totals()
    assert {source: sum(h.counts) for source, h in totals.state_restores.items()} == {"memory": 1, "peer": 1}
    assert totals.restored_from == {2: {"memory", "peer"}}
    totals.on(EventRecord(90, 200.0, "a", StateRestored(3, 0, "disk", 5, 2.0)))
    totals.on(EventRecord(91, 200.0, "b", StateRestored(2, 0, "memory", 5, 2.0)))  # it arrives late
    assert totals.restored_from == {3: {"disk"}}
    assert 'ripstop_state_restore_seconds_sum{source="peer"} 1.5' in full_page()
    assert 'ripstop_state_commit_age_seconds{node="a",rank="0"} 0.5' in full_page()
