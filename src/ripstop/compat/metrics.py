"""`torch.distributed.elastic.metrics`: numbers by group and name, for a handler that the program chooses.

Rules: (1) a metric goes to its group's handler, or to the default handler, or nowhere; (2) an exception of a handler is
logged once and does not reach the measured function (with torch it does); (3) if the program has configured torch's
module and not this one, ripstop's metrics go there.
"""

from __future__ import annotations

import abc
import logging
import sys
import time
import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar, overload

__all__ = [
    "ConsoleMetricHandler",
    "MetricData",
    "MetricHandler",
    "MetricStream",
    "MetricsConfig",
    "NullMetricHandler",
    "configure",
    "getStream",
    "get_elapsed_time_ms",
    "initialize_metrics",
    "prof",
    "profile",
    "publish_metric",
    "put_metric",
]

log = logging.getLogger("ripstop.compat")

GROUP = "torchelastic"
_TORCH = "torch.distributed.elastic.metrics.api"

P = ParamSpec("P")
R = TypeVar("R")


class MetricData(NamedTuple):
    """One number; `timestamp` is wall-clock time in seconds."""

    timestamp: float
    group_name: str
    name: str
    value: Any


class MetricsConfig:
    """Parameters for the program's own `initialize_metrics`."""

    __slots__ = ("params",)

    def __init__(self, params: dict[str, str] | None = None) -> None:
        self.params = {} if params is None else params


class MetricHandler(abc.ABC):
    """Receives metrics."""

    @abc.abstractmethod
    def emit(self, metric_data: MetricData) -> None: ...


class ConsoleMetricHandler(MetricHandler):
    """Prints one line for each metric."""

    def emit(self, metric_data: MetricData) -> None:
        print(f"[{metric_data.timestamp}][{metric_data.group_name}]: {metric_data.name}={metric_data.value}")


class NullMetricHandler(MetricHandler):
    """Discards metrics."""

    def emit(self, metric_data: MetricData) -> None:
        pass


class _NotConfigured(NullMetricHandler):
    """Passes metrics to torch's module, if the program has loaded it (rule 3)."""

    def emit(self, metric_data: MetricData) -> None:
        theirs = sys.modules.get(_TORCH)
        if theirs is not None and theirs is not sys.modules[__name__]:
            theirs.put_metric(metric_data.name, metric_data.value, metric_data.group_name)


class MetricStream:
    """Sends the metrics of one group to a handler."""

    def __init__(self, group_name: str, handler: MetricHandler) -> None:
        self.group_name = group_name
        self.handler = handler

    def add_value(self, metric_name: str, metric_value: Any) -> None:
        try:
            self.handler.emit(MetricData(time.time(), self.group_name, metric_name, metric_value))
        except Exception:
            if id(self.handler) not in _failing:
                _failing.add(id(self.handler))
                log.exception("%s failed at a metric; this and later ones may be missing", type(self.handler).__name__)


_metrics_map: dict[str, MetricHandler] = {}
_default_metrics_handler: MetricHandler = _NotConfigured()
_failing: set[int] = set()  # handlers whose failure was logged


def configure(handler: MetricHandler, group: str | None = None) -> None:
    """Set the handler of a group, or the default handler."""
    global _default_metrics_handler
    if group is None:
        _default_metrics_handler = handler
    else:
        _metrics_map[group] = handler


def getStream(group: str) -> MetricStream:  # noqa: N802 - torch's name
    return MetricStream(group, _metrics_map.get(group, _default_metrics_handler))


def put_metric(metric_name: str, metric_value: Any, metric_group: str = GROUP) -> None:
    getStream(metric_group).add_value(metric_name, metric_value)


def publish_metric(metric_group: str, metric_name: str, metric_value: Any) -> None:
    """Deprecated name of `put_metric`."""
    warnings.warn("publish_metric is deprecated; call put_metric(name, value, group)", FutureWarning, stacklevel=2)
    put_metric(metric_name, metric_value, metric_group)


def get_elapsed_time_ms(start_time_in_seconds: float) -> int:
    """Whole milliseconds since this wall-clock time."""
    return int((time.time() - start_time_in_seconds) * 1000)


@overload
def prof(fn: Callable[P, R], group: str = GROUP) -> Callable[P, R]: ...
@overload
def prof(fn: None = None, group: str = GROUP) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
def prof(fn: Any = None, group: str = GROUP) -> Any:
    """`@prof` or `@prof(group="mine")`: a function's `NAME.success`, `NAME.failure` and `NAME.duration.ms`.

    NAME is `Class.method`, or the module's last part and the function.
    """
    if fn:
        return _measured_by_compat_metrics(fn, group, _compat_metric_name(fn))
    return lambda function: _measured_by_compat_metrics(function, group, _compat_metric_name(function))


def profile(group: Any = None) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Deprecated form of `prof`; NAME is only the function's."""
    warnings.warn("profile is deprecated; use prof", FutureWarning, stacklevel=2)
    return lambda function: _measured_by_compat_metrics(function, group, function.__name__)


def _measured_by_compat_metrics(function: Callable[P, R], group: str, name: str) -> Callable[P, R]:
    @wraps(function)
    def measured(*args: P.args, **kwargs: P.kwargs) -> R:
        began = time.time()
        try:
            result = function(*args, **kwargs)
            put_metric(f"{name}.success", 1, group)
        except Exception:
            put_metric(f"{name}.failure", 1, group)
            raise
        finally:
            put_metric(f"{name}.duration.ms", get_elapsed_time_ms(began), group)
        return result

    return measured


def _compat_metric_name(function: Callable[..., Any]) -> str:
    module = (function.__module__ or "").rpartition(".")[2]
    qualified = function.__qualname__
    return f"{module}.{qualified}" if module and "." not in qualified else qualified


def put_run_metrics(role: str, *, failed: bool, restarts: int, max_restarts: int) -> None:
    """The metrics that torch's agent records at the end of a run."""
    flakiness = 100.0 * restarts / (max_restarts + 1)  # percentage of attempts that failed
    numbers = {
        "flakiness": 100 if failed else int(flakiness),
        "run_total": 1,
        "run_success_with_retries": int(not failed and restarts > 0),
        "run_success_no_retries": int(not failed and not restarts),
        "run_failed_with_retries": int(failed and restarts > 0),
        "run_failed_no_retries": int(failed and not restarts),
    }
    for name, value in numbers.items():
        put_metric(f"workers.{role}.{name}", value)


def initialize_metrics(cfg: MetricsConfig | None = None) -> None:
    """A program may replace this function; a launch calls it with `LaunchConfig.metrics_cfg`."""
