"""A job's numbers as a page that Prometheus reads.

`METRICS` is the whole list, and docs/metrics.md its copy.  Names carry their unit; labels are ranks, nodes and words of
short lists.  What is not known is not there: no zeros for GPUs that nobody has, or steps that nobody reports.
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
from ripstop.telemetry.metrics import BOUNDS, Histogram, Totals

Samples = Mapping[str, NodeSample]  # by node; one that did not answer in time is missing


class Metric(Struct, frozen=True):
    """One name, and what it means."""

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
        Metric("ripstop_phase_seconds", "gauge", "How long the job is in its phase"),
        Metric("ripstop_round", "gauge", "Number of the round that runs, or of the last one"),
        Metric("ripstop_world_size", "gauge", "Workers of the round that runs; 0 between rounds"),
        Metric("ripstop_nodes", "gauge", "Nodes of the job by what they do; running ones are members", ("state",)),
        Metric("ripstop_nodes_min", "gauge", "Nodes that the job needs"),
        Metric("ripstop_nodes_max", "gauge", "Nodes that the job can have"),
        Metric("ripstop_nodes_target", "gauge", "Nodes that the job should have now"),
        Metric("ripstop_restart_budget", "gauge", "Failures that the budget heals in its window"),
        Metric("ripstop_restart_budget_used", "gauge", "Failures that count against the budget now"),
        # what happened
        Metric("ripstop_events_total", "counter", "Events of the job, by kind", ("kind",)),
        Metric("ripstop_rounds_total", "counter", "Rounds that were formed"),
        Metric("ripstop_restarts_total", "counter", "Rounds that ended for another to form, by cause", ("cause",)),
        Metric("ripstop_charges_total", "counter", "Failures charged to the restart budget"),
        Metric("ripstop_refunds_total", "counter", "Charges that were taken back, since a lost node explained them"),
        Metric("ripstop_worker_failures_total", "counter", "Workers that died or could not be started"),
        Metric("ripstop_nodes_joined_total", "counter", "Nodes that became part of the job"),
        Metric("ripstop_nodes_left_total", "counter", "Nodes that said good-bye"),
        Metric("ripstop_nodes_lost_total", "counter", "Nodes that went without a word"),
        Metric("ripstop_nodes_rejected_total", "counter", "Nodes that were not let in"),
        Metric(
            "ripstop_recovery_seconds", "histogram", "How long a node took for each phase of a recovery", ("phase",)
        ),
        Metric("ripstop_checkpoints_total", "counter", "Checkpoints that workers said are safe"),
        Metric("ripstop_checkpoint_step", "gauge", "Step of the latest checkpoint"),
        Metric("ripstop_checkpoint_timestamp_seconds", "gauge", "When it was saved, in seconds since 1970"),
        # goodput
        Metric("ripstop_goodput_ratio", "gauge", "Share of the job's time that was spent in steps that were kept"),
        Metric("ripstop_job_seconds", "gauge", "Time since the job began"),
        Metric("ripstop_kept_steps_seconds", "gauge", "Time that was spent in steps that were kept"),
        Metric("ripstop_lost_steps_seconds", "gauge", "Time that was spent in steps that were done again"),
        Metric("ripstop_lost_steps_total", "counter", "Steps that were done again"),
        # nodes
        Metric("ripstop_node_up", "gauge", "1 if the node answered this scrape, else 0", ("node", "host")),
        Metric("ripstop_agent_cpu_seconds_total", "counter", "CPU time of the node's agent", _NODE),
        Metric("ripstop_agent_memory_bytes", "gauge", "Resident memory of the node's agent", _NODE),
        # ranks
        Metric("ripstop_worker_cpu_seconds_total", "counter", "CPU time of a worker and its processes", _RANK),
        Metric("ripstop_worker_memory_bytes", "gauge", "Resident memory of a worker and its processes", _RANK),
        Metric("ripstop_worker_threads", "gauge", "Threads of a worker and its processes", _RANK),
        Metric("ripstop_worker_processes", "gauge", "A worker and its processes", _RANK),
        Metric("ripstop_worker_log_bytes_total", "counter", "Bytes in a worker's log files of this round", _RANK),
        Metric("ripstop_worker_step", "gauge", "Step that a worker reported last", _RANK),
        Metric("ripstop_worker_steps_per_second", "gauge", "How fast its steps go", _RANK),
        Metric("ripstop_worker_heartbeats_total", "counter", "How often a worker reported in this round", _RANK),
        Metric("ripstop_worker_heartbeat_age_seconds", "gauge", "Time since it did", _RANK),
        # GPUs
        Metric("ripstop_gpu_utilization_ratio", "gauge", "Share of time in which a GPU was busy", _GPU),
        Metric("ripstop_gpu_memory_used_bytes", "gauge", "Memory in use on a GPU", _GPU),
        Metric("ripstop_gpu_memory_total_bytes", "gauge", "Memory of a GPU", _GPU),
        Metric("ripstop_gpu_temperature_celsius", "gauge", "Temperature of a GPU", _GPU),
        Metric("ripstop_gpu_power_watts", "gauge", "Power that a GPU takes", _GPU),
        Metric("ripstop_gpu_ecc_errors_total", "counter", "Memory errors since the driver started", (*_GPU, "kind")),
    )
}


def page(totals: Totals, status: JobStatus, samples: Samples, now: float) -> bytes:
    """All there is to say."""
    found = _Found()
    _job(found, status)
    _history(found, totals)
    _goodput(found, totals, now)
    for node in status.nodes:
        found.put("ripstop_node_up", node.name in samples, node.name, node.host)
    for name, sample in samples.items():
        found.put("ripstop_agent_cpu_seconds_total", sample.cpu, name)
        found.put("ripstop_agent_memory_bytes", sample.memory, name)
        for rank in sample.ranks:
            _rank(found, rank, name)
        for gpu in sample.gpus:
            _gpu(found, gpu, name)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(found)
    return generate_latest(registry)


class _Found(Collector):
    """What was found, by name."""

    def __init__(self) -> None:
        self._families: dict[str, Family] = {}

    def put(self, name: str, value: float | None, *labels: str) -> None:
        if value is not None:
            metric = METRICS[name]
            texts = (label.encode("utf-8", "replace").decode() for label in labels)  # Prometheus takes no other
            self._family(metric).add_sample(name, dict(zip(metric.labels, texts, strict=True)), float(value))

    def put_histogram(self, name: str, histogram: Histogram, *labels: str) -> None:
        metric = METRICS[name]
        family, of = self._family(metric), dict(zip(metric.labels, labels, strict=True))
        for bound, count in zip((*map(str, BOUNDS), "+Inf"), accumulate(histogram.counts), strict=True):
            family.add_sample(f"{name}_bucket", of | {"le": bound}, count)
        family.add_sample(f"{name}_sum", of, histogram.sum)
        family.add_sample(f"{name}_count", of, sum(histogram.counts))

    def collect(self) -> Iterable[Family]:
        return self._families.values()

    def _family(self, metric: Metric) -> Family:
        family = self._families.get(metric.name)
        if family is None:
            family = Family(metric.name.removesuffix("_total"), metric.help, metric.type)  # it adds the suffix itself
            self._families[metric.name] = family
        return family


def _job(found: _Found, status: JobStatus) -> None:
    found.put("ripstop_job_info", 1, status.run_id)
    for phase in Phase:
        found.put("ripstop_phase", phase == status.phase, phase)
    found.put("ripstop_phase_seconds", status.seconds)
    found.put("ripstop_round", status.round)
    found.put("ripstop_world_size", status.world_size)
    states = Counter(dict.fromkeys(NodeState, 0))
    states.update(node.state for node in status.nodes)
    for state, count in states.items():
        found.put("ripstop_nodes", count, state)
    found.put("ripstop_nodes_min", status.min_nodes)
    found.put("ripstop_nodes_max", status.max_nodes)
    found.put("ripstop_nodes_target", status.target)
    found.put("ripstop_restart_budget", status.max_restarts)
    found.put("ripstop_restart_budget_used", status.charged)


def _history(found: _Found, totals: Totals) -> None:
    for kind, count in sorted(totals.events.items()):
        found.put("ripstop_events_total", count, kind)
    found.put("ripstop_rounds_total", totals.rounds)
    for cause, count in totals.restarts.items():
        found.put("ripstop_restarts_total", count, cause)
    found.put("ripstop_charges_total", totals.charged)
    found.put("ripstop_refunds_total", totals.refunded)
    found.put("ripstop_worker_failures_total", totals.worker_failures)
    found.put("ripstop_nodes_joined_total", totals.nodes_joined)
    found.put("ripstop_nodes_left_total", totals.nodes_left)
    found.put("ripstop_nodes_lost_total", totals.nodes_lost)
    found.put("ripstop_nodes_rejected_total", totals.nodes_rejected)
    for phase, histogram in totals.recovery.items():
        found.put_histogram("ripstop_recovery_seconds", histogram, phase)
    found.put("ripstop_checkpoints_total", totals.checkpoints)
    if totals.checkpoint is not None:
        step, at = totals.checkpoint
        found.put("ripstop_checkpoint_step", step)
        found.put("ripstop_checkpoint_timestamp_seconds", at)


def _goodput(found: _Found, totals: Totals, now: float) -> None:
    spent = totals.goodput.spent(now)
    found.put("ripstop_job_seconds", spent.wall)
    if totals.goodput.known:
        found.put("ripstop_goodput_ratio", spent.ratio)
        found.put("ripstop_kept_steps_seconds", spent.kept)
        found.put("ripstop_lost_steps_seconds", spent.lost)
        found.put("ripstop_lost_steps_total", spent.steps_lost)


def _rank(found: _Found, sample: RankSample, node: str) -> None:
    of = (str(sample.rank), node)
    found.put("ripstop_worker_cpu_seconds_total", sample.cpu, *of)
    found.put("ripstop_worker_memory_bytes", sample.memory, *of)
    found.put("ripstop_worker_threads", sample.threads, *of)
    found.put("ripstop_worker_processes", sample.processes, *of)
    found.put("ripstop_worker_log_bytes_total", sample.log_bytes, *of)
    found.put("ripstop_worker_step", sample.step, *of)
    found.put("ripstop_worker_steps_per_second", sample.steps_per_second, *of)
    found.put("ripstop_worker_heartbeats_total", sample.beats, *of)
    found.put("ripstop_worker_heartbeat_age_seconds", sample.age, *of)


def _gpu(found: _Found, sample: GpuSample, node: str) -> None:
    of = (str(sample.index), node)
    found.put("ripstop_gpu_utilization_ratio", sample.utilisation, *of)
    found.put("ripstop_gpu_memory_used_bytes", sample.memory_used, *of)
    found.put("ripstop_gpu_memory_total_bytes", sample.memory_total, *of)
    found.put("ripstop_gpu_temperature_celsius", sample.temperature, *of)
    found.put("ripstop_gpu_power_watts", sample.power, *of)
    found.put("ripstop_gpu_ecc_errors_total", sample.ecc_corrected, *of, "corrected")
    found.put("ripstop_gpu_ecc_errors_total", sample.ecc_uncorrected, *of, "uncorrected")
