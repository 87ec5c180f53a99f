"""The page of a job's metrics in Prometheus' text format.

`METRICS` is the complete list; docs/metrics.md is generated from it.  Names contain the unit.  Labels are ranks, nodes
and values of short lists.  Unknown values are left out: there are no zeros for missing GPUs or unreported steps.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import accumulate

from msgspec import Struct
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from ripstop.model.status import JobStatus, NodeState, Phase
from ripstop.model.text_formatting import without_surrogates
from ripstop.model.usage import NodeSample
from ripstop.telemetry.metrics import BUCKET_BOUNDS_S, Histogram, Totals

Samples = Mapping[str, NodeSample]  # by node; nodes that did not reply in time are missing


class Metric(Struct, frozen=True):
    """`field` is the field with the value, in the record that the metric's group is about."""

    name: str
    type: str
    help: str
    labels: tuple[str, ...] = ()
    field: str = ""


_NODE, _RANK, _GPU = ("node",), ("rank", "node"), ("gpu", "node")
_STANDBY = ("local_rank", "node", "until")

JOB_METRICS = (  # of a JobStatus
    Metric("ripstop_job_info", "gauge", "Always 1; the label names the job", ("run_id",)),
    Metric("ripstop_phase", "gauge", "1 for the phase the job is in, 0 for the others", ("phase",)),
    Metric("ripstop_phase_seconds", "gauge", "Time since the job entered its phase", field="seconds"),
    Metric("ripstop_round", "gauge", "Number of the current round, or of the last one", field="round"),
    Metric("ripstop_world_size", "gauge", "Workers of the current round; 0 between rounds", field="world_size"),
    Metric("ripstop_nodes", "gauge", "Nodes of the job, by state", ("state",)),
    Metric("ripstop_nodes_min", "gauge", "Minimum number of nodes", field="min_nodes"),
    Metric("ripstop_nodes_max", "gauge", "Maximum number of nodes", field="max_nodes"),
    Metric("ripstop_nodes_target", "gauge", "Target number of nodes", field="target"),
    Metric("ripstop_restart_budget", "gauge", "Restarts that --max-restarts allows", field="max_restarts"),
    Metric(
        "ripstop_restart_budget_used",
        "gauge",
        "Used restarts of --max-restarts, without those that were refunded or are older than --restart-window",
        field="charged",
    ),
)
STRAGGLER_METRICS = (
    Metric("ripstop_stragglers", "gauge", "Ranks that the others wait for"),
    Metric(
        "ripstop_straggler_slowdown_ratio",
        "gauge",
        "How many times longer a step takes because of the stragglers of a node",
        _NODE,
    ),
)
REPLICATION_METRICS = (  # of a ReplicationStatus
    Metric(
        "ripstop_replication_lag_commits",
        "gauge",
        "Commits since the newest one that is completely copied to other nodes",
        ("state",),
        "commits",
    ),
    Metric(
        "ripstop_replication_age_seconds",
        "gauge",
        "Time since a commit was last copied completely to other nodes",
        ("state",),
        "seconds",
    ),
    Metric(
        "ripstop_replication_bytes_total", "counter", "Bytes of commits that nodes have copied", ("state",), "bytes"
    ),
)
HISTORY_METRICS = (  # of the Totals
    Metric("ripstop_events_total", "counter", "Events of the job, by kind", ("kind",)),
    Metric("ripstop_rounds_total", "counter", "Rounds that were formed", field="rounds"),
    Metric("ripstop_restarts_total", "counter", "Rounds that ended while the job continued, by cause", ("cause",)),
    Metric("ripstop_charges_total", "counter", "Failures and hangs charged to a restart budget", field="charged"),
    Metric(
        "ripstop_refunds_total",
        "counter",
        "Charges taken back because a lost node caused the failure",
        field="refunded",
    ),
    Metric(
        "ripstop_worker_failures_total", "counter", "Workers that died or could not be started", field="worker_failures"
    ),
    Metric("ripstop_nodes_joined_total", "counter", "Nodes that joined the job", field="nodes_joined"),
    Metric("ripstop_nodes_left_total", "counter", "Nodes that left the job", field="nodes_left"),
    Metric("ripstop_nodes_lost_total", "counter", "Nodes that were lost", field="nodes_lost"),
    Metric("ripstop_nodes_rejected_total", "counter", "Nodes that were rejected", field="nodes_rejected"),
    Metric("ripstop_recovery_seconds", "histogram", "How long a node took for each phase of a recovery", ("phase",)),
    Metric(
        "ripstop_inplace_recoveries_total",
        "counter",
        "In-place recoveries, counted once for each node whose workers kept their process",
        field="inplace",
    ),
    Metric("ripstop_checkpoints_total", "counter", "Checkpoints that workers reported", field="checkpoints"),
    Metric("ripstop_checkpoint_step", "gauge", "Step of the latest checkpoint"),
    Metric(
        "ripstop_checkpoint_timestamp_seconds", "gauge", "When the latest checkpoint was saved, in seconds since 1970"
    ),
    Metric("ripstop_state_restore_seconds", "histogram", "How long a restore of train.State took", ("source",)),
)
GOODPUT_METRICS = (  # of the time Spent
    Metric(
        "ripstop_goodput_ratio", "gauge", "Share of the job's time spent in steps that were not lost", field="ratio"
    ),
    Metric("ripstop_job_seconds", "gauge", "Time since the job began"),
    Metric("ripstop_kept_steps_seconds", "gauge", "Time spent in steps that were not lost", field="kept"),
    Metric(
        "ripstop_lost_steps_seconds",
        "gauge",
        "Time spent in steps that were lost, so that a later round repeated them",
        field="lost",
    ),
    Metric(
        "ripstop_lost_steps_total",
        "counter",
        "Steps that were lost, so that a later round repeated them",
        field="steps_lost",
    ),
)
NODE_METRICS = (  # of a NodeSample
    Metric("ripstop_node_up", "gauge", "1 if the node replied to the coordinator in time, else 0", ("node", "host")),
    Metric("ripstop_agent_cpu_seconds_total", "counter", "CPU time of the node's agent", _NODE, "cpu"),
    Metric("ripstop_agent_memory_bytes", "gauge", "Resident memory of the node's agent", _NODE, "memory"),
)
RANK_METRICS = (  # of a RankSample
    Metric("ripstop_worker_cpu_seconds_total", "counter", "CPU time of a worker and its child processes", _RANK, "cpu"),
    Metric(
        "ripstop_worker_memory_bytes", "gauge", "Resident memory of a worker and its child processes", _RANK, "memory"
    ),
    Metric("ripstop_worker_threads", "gauge", "Threads of a worker and its child processes", _RANK, "threads"),
    Metric(
        "ripstop_worker_processes",
        "gauge",
        "Number of processes: the worker and its child processes",
        _RANK,
        "processes",
    ),
    Metric("ripstop_worker_log_bytes_total", "counter", "Bytes in a worker's log files", _RANK, "log_bytes"),
    Metric("ripstop_worker_step", "gauge", "Latest step that a worker reported", _RANK, "step"),
    Metric("ripstop_worker_steps_per_second", "gauge", "Steps per second of a worker", _RANK, "steps_per_second"),
    Metric("ripstop_worker_heartbeats_total", "counter", "Heartbeats of a worker in this round", _RANK, "beats"),
    Metric("ripstop_worker_heartbeat_age_seconds", "gauge", "Time since the last heartbeat of a worker", _RANK, "age"),
    Metric("ripstop_state_commits_total", "counter", "Commits of a worker's State in this round", _RANK, "commits"),
    Metric(
        "ripstop_state_commit_stall_seconds_total",
        "counter",
        "Time that the commits took in a worker's loop",
        _RANK,
        "commit_stall",
    ),
    Metric("ripstop_state_commit_age_seconds", "gauge", "Time since a worker's last commit", _RANK, "commit_age"),
    Metric("ripstop_state_bytes", "gauge", "Size of a worker's last commit", _RANK, "commit_bytes"),
)
STANDBY_METRICS = (  # of a StandbySample
    Metric(
        "ripstop_standby_memory_bytes",
        "gauge",
        "Memory that a standby shares with no other process",
        _STANDBY,
        "memory",
    ),
    Metric("ripstop_standby_gpu_memory_bytes", "gauge", "GPU memory of a standby", _STANDBY, "gpu_memory"),
)
GPU_METRICS = (  # of a GpuSample
    Metric("ripstop_gpu_utilization_ratio", "gauge", "Share of time in which a GPU was busy", _GPU, "utilisation"),
    Metric("ripstop_gpu_memory_used_bytes", "gauge", "Memory in use on a GPU", _GPU, "memory_used"),
    Metric("ripstop_gpu_memory_total_bytes", "gauge", "Memory of a GPU", _GPU, "memory_total"),
    Metric("ripstop_gpu_temperature_celsius", "gauge", "Temperature of a GPU", _GPU, "temperature"),
    Metric("ripstop_gpu_power_watts", "gauge", "Power draw of a GPU", _GPU, "power"),
    Metric("ripstop_gpu_ecc_errors_total", "counter", "Memory errors since the driver started", (*_GPU, "kind")),
)
GROUPS = (
    *(
        JOB_METRICS,
        STRAGGLER_METRICS,
        REPLICATION_METRICS,
        HISTORY_METRICS,
        GOODPUT_METRICS,
        NODE_METRICS,
        RANK_METRICS,
    ),
    *(STANDBY_METRICS, GPU_METRICS),
)
METRICS = {metric.name: metric for group in GROUPS for metric in group}


def prometheus_page(totals: Totals, status: JobStatus, samples: Samples, now: float) -> bytes:
    metrics = _PrometheusPage()
    _put_job(metrics, status)
    _put_history(metrics, totals, now)
    for node in status.nodes:
        metrics.put("ripstop_node_up", node.name in samples, node.name, node.host)
    for name, sample in samples.items():
        metrics.put_fields(NODE_METRICS, sample, name)
        for rank in sample.ranks:
            metrics.put_fields(RANK_METRICS, rank, str(rank.rank), name)
        for standby in sample.standbys:
            metrics.put_fields(STANDBY_METRICS, standby, str(standby.local_rank), name, standby.until)
        for gpu in sample.gpus:
            metrics.put_fields(GPU_METRICS, gpu, str(gpu.index), name)
            metrics.put("ripstop_gpu_ecc_errors_total", gpu.ecc_corrected, str(gpu.index), name, "corrected")
            metrics.put("ripstop_gpu_ecc_errors_total", gpu.ecc_uncorrected, str(gpu.index), name, "uncorrected")
    registry = CollectorRegistry(auto_describe=False)
    registry.register(metrics)
    return generate_latest(registry)


def _put_job(metrics: "_PrometheusPage", status: JobStatus) -> None:
    metrics.put("ripstop_job_info", 1, status.run_id)
    metrics.put_fields(JOB_METRICS, status)
    for phase in Phase:
        metrics.put("ripstop_phase", phase == status.phase, phase)
    for replica in status.replication:
        metrics.put_fields(REPLICATION_METRICS, replica, replica.state)
    metrics.put("ripstop_stragglers", sum(len(found.ranks) for found in status.stragglers))
    for found in status.stragglers:
        metrics.put("ripstop_straggler_slowdown_ratio", found.step_time / found.median, found.node)
    states = Counter(node.state for node in status.nodes)
    for state in NodeState:
        metrics.put("ripstop_nodes", states[state], state)


def _put_history(metrics: "_PrometheusPage", totals: Totals, now: float) -> None:
    metrics.put_fields(HISTORY_METRICS, totals)
    for kind, count in sorted(totals.events.items()):
        metrics.put("ripstop_events_total", count, kind)
    for cause, count in totals.restarts.items():
        metrics.put("ripstop_restarts_total", count, cause)
    for phase, histogram in totals.recovery.items():
        metrics.put_histogram("ripstop_recovery_seconds", histogram, phase)
    for source, histogram in totals.state_restores.items():
        metrics.put_histogram("ripstop_state_restore_seconds", histogram, source)
    if totals.checkpoint is not None:
        step, at = totals.checkpoint
        metrics.put("ripstop_checkpoint_step", step)
        metrics.put("ripstop_checkpoint_timestamp_seconds", at)
    spent = totals.goodput.spent(now)
    metrics.put("ripstop_job_seconds", spent.wall)
    if totals.goodput.has_steps:
        metrics.put_fields(GOODPUT_METRICS, spent)


class _PrometheusPage(Collector):
    """The samples of one page, by metric."""

    def __init__(self) -> None:
        self._families: dict[str, Family] = {}

    def put(self, name: str, value: float | None, *labels: str) -> None:
        if value is not None:
            family, of = self._family(name, labels)
            family.add_sample(name, of, float(value))

    def put_fields(self, group: Iterable[Metric], record: Struct, *labels: str) -> None:
        """Put all metrics of the group that have a field."""
        for metric in group:
            if metric.field:
                self.put(metric.name, getattr(record, metric.field), *labels)

    def put_histogram(self, name: str, histogram: Histogram, *labels: str) -> None:
        family, of = self._family(name, labels)
        for bound, count in zip((*map(str, BUCKET_BOUNDS_S), "+Inf"), accumulate(histogram.counts), strict=True):
            family.add_sample(f"{name}_bucket", of | {"le": bound}, count)
        family.add_sample(f"{name}_sum", of, histogram.sum)
        family.add_sample(f"{name}_count", of, sum(histogram.counts))

    def collect(self) -> Iterable[Family]:
        return [self._families[name] for name in METRICS if name in self._families]

    def _family(self, name: str, labels: tuple[str, ...]) -> tuple[Family, dict[str, str]]:
        """The metric's family, and the sample's labels by name."""
        metric = METRICS[name]
        if name not in self._families:
            short = name.removesuffix("_total")  # the library adds the suffix
            self._families[name] = Family(short, metric.help, metric.type)
        texts = map(without_surrogates, labels)  # Prometheus rejects invalid UTF-8
        return self._families[name], dict(zip(metric.labels, texts, strict=True))
