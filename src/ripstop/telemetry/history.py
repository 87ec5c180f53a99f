"""A job's measurements over time, for plots: step time, goodput, memory and GPU utilisation.  Pure.

The number of points is bounded: when the history is full, each two neighbours become one point and the distance between
points doubles.  So a history covers the whole job, from its first point, in constant memory.
"""

from collections.abc import Iterable
from math import ceil
from typing import Any

from msgspec import Struct
from msgspec.structs import fields

from ripstop.model.usage import NodeSample

MAX_POINTS = 720  # even
FIRST_INTERVAL_S = 10.0
NODES_PER_SECOND = 100  # at most this many nodes are queried per second, on average


class Point(Struct, frozen=True):
    """The job at one time.  None means unknown.

    Step times are in seconds.  `memory` is that of the largest worker, in bytes.  `gpu` is the mean utilisation and
    `gpu_memory` the highest use of one GPU's memory, both as fractions of 1.
    """

    at: float
    step_time_p50: float | None = None
    step_time_p99: float | None = None
    goodput: float | None = None
    memory: float | None = None
    gpu: float | None = None
    gpu_memory: float | None = None


PEAKS = ("step_time_p99", "memory", "gpu_memory")  # the higher of two neighbours counts, not their mean
NAMES = tuple(field.name for field in fields(Point))


class History:
    """The points of one job."""

    def __init__(self) -> None:
        self._points: list[Point] = []
        self._stride = 1  # samples in each point
        self._pending: list[Point] = []  # samples of the next point

    def add(self, sample: Point) -> None:
        self._pending.append(sample)
        if len(self._pending) < self._stride:
            return
        self._points.append(_merge_history_points(self._pending))
        self._pending = []
        if len(self._points) >= MAX_POINTS:
            self._points = [_merge_history_points(self._points[i : i + 2]) for i in range(0, MAX_POINTS, 2)]
            self._stride *= 2

    def columns(self) -> dict[str, list[Any]]:
        """The values of each field, the oldest first; the last point may still change."""
        points = [*self._points, *([_merge_history_points(self._pending)] if self._pending else [])]
        return {name: [getattr(point, name) for point in points] for name in NAMES}


def history_interval_s(nodes: int) -> float:
    """The time between two samples of a job with this number of nodes."""
    return max(FIRST_INTERVAL_S, nodes / NODES_PER_SECOND)


def history_point(samples: Iterable[NodeSample], goodput: float | None, at: float) -> Point:
    """One point from the samples of all nodes."""
    nodes = list(samples)
    times = sorted(1 / rank.steps_per_second for node in nodes for rank in node.ranks if rank.steps_per_second)
    memory = [rank.memory for node in nodes for rank in node.ranks]
    gpus = [gpu for node in nodes for gpu in node.gpus]
    busy = [gpu.utilisation for gpu in gpus if gpu.utilisation is not None]
    filled = [gpu.memory_used / gpu.memory_total for gpu in gpus if gpu.memory_total and gpu.memory_used is not None]
    return Point(
        at,
        step_time_p50=_history_percentile(times, 0.5),
        step_time_p99=_history_percentile(times, 0.99),
        goodput=goodput,
        memory=max(memory, default=None),
        gpu=sum(busy) / len(busy) if busy else None,
        gpu_memory=max(filled, default=None),
    )


def _history_percentile(ordered: list[float], share: float) -> float | None:
    """The smallest value that is not below this share of the values."""
    return ordered[max(0, ceil(share * len(ordered)) - 1)] if ordered else None


def _merge_history_points(points: list[Point]) -> Point:
    return Point(**{name: _merged_history_value(name, [getattr(point, name) for point in points]) for name in NAMES})


def _merged_history_value(name: str, values: list[float | None]) -> Any:
    known = [value for value in values if value is not None]
    if not known or name == "at":
        return values[0]
    return max(known) if name in PEAKS else sum(known) / len(known)
