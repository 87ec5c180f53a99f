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
from ripstop.model.usage import GpuSample, NodeSample, RankSample
from ripstop.telemetry.metrics import BUCKET_BOUNDS_S, Histogram, Totals

Samples = Mapping[str, NodeSample]  # by node; nodes that did not reply in time are missing


class Metric(Struct, frozen=True):
    name: str
    type: str
    help: str
    labels: tuple[str, ...] = ()


_NODE, _RANK, _GPU = ("node",), ("rank", "node"), ("gpu", "node")

METRICS = {
    metric.name: metric
    for metric in (
        # the job now
        Metric("ripstop_job_info", "gauge", "1; the label names the job", ("run_id",)),
        Metric("ripstop_phase", "gauge", "1 for the phase the job is in, 0 for the others", ("phase",)),
        Metric("ripstop_phase_seconds", "gauge", "Time since the job entered its phase"),
        Metric("ripstop_round", "gauge", "Number of the current round, or of the last one"),
        Metric("ripstop_world_size", "gauge", "Workers of the current round; 0 between rounds"),
        Metric("ripstop_nodes", "gauge", "Nodes of the job by state; running ones are members", ("state",)),
        Metric("ripstop_nodes_min", "gauge", "Minimum number of nodes"),
        Metric("ripstop_nodes_max", "gauge", "Maximum number of nodes"),
        Metric("ripstop_nodes_target", "gauge", "Target number of nodes"),
        Metric("ripstop_restart_budget", "gauge", "Failures that the restart budget allows in its window"),
        Metric("ripstop_restart_budget_used", "gauge", "Failures that count against the budget now"),
        # history
        Metric("ripstop_events_total", "counter", "Events of the job, by kind", ("kind",)),
        Metric("ripstop_rounds_total", "counter", "Rounds that were formed"),
        Metric("ripstop_restarts_total", "counter", "Rounds that ended before another one, by cause", ("cause",)),
        Metric("ripstop_charges_total", "counter", "Failures charged to the restart budget"),
        Metric("ripstop_refunds_total", "counter", "Charges refunded because a lost node explained them"),
        Metric("ripstop_worker_failures_total", "counter", "Workers that died or could not be started"),
        Metric("ripstop_nodes_joined_total", "counter", "Nodes that joined the job"),
        Metric("ripstop_nodes_left_total", "counter", "Nodes that left the job"),
        Metric("ripstop_nodes_lost_total", "counter", "Nodes that were lost"),
        Metric("ripstop_nodes_rejected_total", "counter", "Nodes that were rejected"),
        Metric(
            "ripstop_recovery_seconds", "histogram", "How long a node took for each phase of a recovery", ("phase",)
        ),
        Metric("ripstop_checkpoints_total", "counter", "Checkpoints that workers reported"),
        Metric("ripstop_checkpoint_step", "gauge", "Step of the latest checkpoint"),
        Metric("ripstop_checkpoint_timestamp_seconds", "gauge", "When it was saved, in seconds since 1970"),
        # goodput
        Metric("ripstop_goodput_ratio", "gauge", "Share of the job's time spent in steps that were kept"),
        Metric("ripstop_job_seconds", "gauge", "Time since the job began"),
        Metric("ripstop_kept_steps_seconds", "gauge", "Time spent in steps that were kept"),
        Metric("ripstop_lost_steps_seconds", "gauge", "Time spent in steps that were repeated"),
        Metric("ripstop_lost_steps_total", "counter", "Steps that were repeated"),
        # nodes
        Metric("ripstop_node_up", "gauge", "1 if the node replied in time for this page, else 0", ("node", "host")),
        Metric("ripstop_agent_cpu_seconds_total", "counter", "CPU time of the node's agent", _NODE),
        Metric("ripstop_agent_memory_bytes", "gauge", "Resident memory of the node's agent", _NODE),
        # ranks
        Metric("ripstop_worker_cpu_seconds_total", "counter", "CPU time of a worker and its processes", _RANK),
        Metric("ripstop_worker_memory_bytes", "gauge", "Resident memory of a worker and its processes", _RANK),
        Metric("ripstop_worker_threads", "gauge", "Threads of a worker and its processes", _RANK),
        Metric("ripstop_worker_processes", "gauge", "A worker and its processes", _RANK),
        Metric("ripstop_worker_log_bytes_total", "counter", "Bytes in a worker's log files of this round", _RANK),
        Metric("ripstop_worker_step", "gauge", "Latest step that a worker reported", _RANK),
        Metric("ripstop_worker_steps_per_second", "gauge", "Rate of its steps", _RANK),
        Metric("ripstop_worker_heartbeats_total", "counter", "Heartbeats of a worker in this round", _RANK),
        Metric("ripstop_worker_heartbeat_age_seconds", "gauge", "Time since its last heartbeat", _RANK),
        # GPUs
        Metric("ripstop_gpu_utilization_ratio", "gauge", "Share of time in which a GPU was busy", _GPU),
        Metric("ripstop_gpu_memory_used_bytes", "gauge", "Memory in use on a GPU", _GPU),
        Metric("ripstop_gpu_memory_total_bytes", "gauge", "Memory of a GPU", _GPU),
        Metric("ripstop_gpu_temperature_celsius", "gauge", "Temperature of a GPU", _GPU),
        Metric("ripstop_gpu_power_watts", "gauge", "Power draw of a GPU", _GPU),
        Metric("ripstop_gpu_ecc_errors_total", "counter", "Memory errors since the driver started", (*_GPU, "kind")),
    )
}


def page(totals: Totals, status: JobStatus, samples: Samples, now: float) -> bytes:
    metrics = _Page()
    _job(metrics, status)
    _history(metrics, totals)
    _goodput(metrics, totals, now)
    for node in status.nodes:
        metrics.put("ripstop_node_up", node.name in samples, node.name, node.host)
    for name, sample in samples.items():
        metrics.put("ripstop_agent_cpu_seconds_total", sample.cpu, name)
        metrics.put("ripstop_agent_memory_bytes", sample.memory, name)
        for rank in sample.ranks:
            _rank(metrics, rank, name)
        for gpu in sample.gpus:
            _gpu(metrics, gpu, name)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(metrics)
    return generate_latest(registry)


class _Page(Collector):
    """The samples of one page, by metric."""

    def __init__(self) -> None:
        self._families: dict[str, Family] = {}

    def put(self, name: str, value: float | None, *labels: str) -> None:
        if value is not None:
            metric = METRICS[name]
            texts = (label.encode("utf-8", "replace").decode() for label in labels)  # Prometheus rejects invalid UTF-8
            self._family(metric).add_sample(name, dict(zip(metric.labels, texts, strict=True)), float(value))

    def put_histogram(self, name: str, histogram: Histogram, *labels: str) -> None:
        metric = METRICS[name]
        family, of = self._family(metric), dict(zip(metric.labels, labels, strict=True))
        for bound, count in zip((*map(str, BUCKET_BOUNDS_S), "+Inf"), accumulate(histogram.counts), strict=True):
            family.add_sample(f"{name}_bucket", of | {"le": bound}, count)
        family.add_sample(f"{name}_sum", of, histogram.sum)
        family.add_sample(f"{name}_count", of, sum(histogram.counts))

    def collect(self) -> Iterable[Family]:
        return self._families.values()

    def _family(self, metric: Metric) -> Family:
        family = self._families.get(metric.name)
        if family is None:
            family = Family(metric.name.removesuffix("_total"), metric.help, metric.type)  # the library adds the suffix
            self._families[metric.name] = family
        return family


def _job(metrics: _Page, status: JobStatus) -> None:
    metrics.put("ripstop_job_info", 1, status.run_id)
    for phase in Phase:
        metrics.put("ripstop_phase", phase == status.phase, phase)
    metrics.put("ripstop_phase_seconds", status.seconds)
    metrics.put("ripstop_round", status.round)
    metrics.put("ripstop_world_size", status.world_size)
    states = Counter(dict.fromkeys(NodeState, 0))
    states.update(node.state for node in status.nodes)
    for state, count in states.items():
        metrics.put("ripstop_nodes", count, state)
    metrics.put("ripstop_nodes_min", status.min_nodes)
    metrics.put("ripstop_nodes_max", status.max_nodes)
    metrics.put("ripstop_nodes_target", status.target)
    metrics.put("ripstop_restart_budget", status.max_restarts)
    metrics.put("ripstop_restart_budget_used", status.charged)


def _history(metrics: _Page, totals: Totals) -> None:
    for kind, count in sorted(totals.events.items()):
        metrics.put("ripstop_events_total", count, kind)
    metrics.put("ripstop_rounds_total", totals.rounds)
    for cause, count in totals.restarts.items():
        metrics.put("ripstop_restarts_total", count, cause)
    metrics.put("ripstop_charges_total", totals.charged)
    metrics.put("ripstop_refunds_total", totals.refunded)
    metrics.put("ripstop_worker_failures_total", totals.worker_failures)
    metrics.put("ripstop_nodes_joined_total", totals.nodes_joined)
    metrics.put("ripstop_nodes_left_total", totals.nodes_left)
    metrics.put("ripstop_nodes_lost_total", totals.nodes_lost)
    metrics.put("ripstop_nodes_rejected_total", totals.nodes_rejected)
    for phase, histogram in totals.recovery.items():
        metrics.put_histogram("ripstop_recovery_seconds", histogram, phase)
    metrics.put("ripstop_checkpoints_total", totals.checkpoints)
    if totals.checkpoint is not None:
        step, at = totals.checkpoint
        metrics.put("ripstop_checkpoint_step", step)
        metrics.put("ripstop_checkpoint_timestamp_seconds", at)


def _goodput(metrics: _Page, totals: Totals, now: float) -> None:
    spent = totals.goodput.spent(now)
    metrics.put("ripstop_job_seconds", spent.wall)
    if totals.goodput.has_steps:
        metrics.put("ripstop_goodput_ratio", spent.ratio)
        metrics.put("ripstop_kept_steps_seconds", spent.kept)
        metrics.put("ripstop_lost_steps_seconds", spent.lost)
        metrics.put("ripstop_lost_steps_total", spent.steps_lost)


def _rank(metrics: _Page, sample: RankSample, node: str) -> None:
    of = (str(sample.rank), node)
    metrics.put("ripstop_worker_cpu_seconds_total", sample.cpu, *of)
    metrics.put("ripstop_worker_memory_bytes", sample.memory, *of)
    metrics.put("ripstop_worker_threads", sample.threads, *of)
    metrics.put("ripstop_worker_processes", sample.processes, *of)
    metrics.put("ripstop_worker_log_bytes_total", sample.log_bytes, *of)
    metrics.put("ripstop_worker_step", sample.step, *of)
    metrics.put("ripstop_worker_steps_per_second", sample.steps_per_second, *of)
    metrics.put("ripstop_worker_heartbeats_total", sample.beats, *of)
    metrics.put("ripstop_worker_heartbeat_age_seconds", sample.age, *of)


def _gpu(metrics: _Page, sample: GpuSample, node: str) -> None:
    of = (str(sample.index), node)
    metrics.put("ripstop_gpu_utilization_ratio", sample.utilisation, *of)
    metrics.put("ripstop_gpu_memory_used_bytes", sample.memory_used, *of)
    metrics.put("ripstop_gpu_memory_total_bytes", sample.memory_total, *of)
    metrics.put("ripstop_gpu_temperature_celsius", sample.temperature, *of)
    metrics.put("ripstop_gpu_power_watts", sample.power, *of)
    metrics.put("ripstop_gpu_ecc_errors_total", sample.ecc_corrected, *of, "corrected")
    metrics.put("ripstop_gpu_ecc_errors_total", sample.ecc_uncorrected, *of, "uncorrected")
