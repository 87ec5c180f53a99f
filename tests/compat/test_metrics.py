"""Metrics beside torch's: the same names, calls and numbers."""

import logging
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed.elastic.metrics as torch_metrics
import torch.distributed.elastic.metrics.api as torch_api

from ripstop.compat import metrics
from tests.compat.signatures import taken_by_both

KINDS: dict[str, Any] = {"torch": torch_metrics, "ripstop": metrics}


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Handlers are a process's; the next test wants none."""
    before = [(module, dict(module._metrics_map), module._default_metrics_handler) for module in (torch_api, metrics)]
    yield
    for module, handlers, default in before:
        module._metrics_map.clear()
        module._metrics_map.update(handlers)
        module._default_metrics_handler = default


@pytest.mark.parametrize("name", [name for name in metrics.__all__ if name != "MetricData"])
def test_the_signatures_are_torchs(name: str) -> None:
    taken_by_both(getattr(torch_metrics, name, None) or getattr(torch_api, name), getattr(metrics, name))


def collecting(base: Any) -> Any:
    class Collector(base):
        def __init__(self) -> None:
            self.seen: list[tuple[str, str, Any]] = []

        def emit(self, metric_data: Any) -> None:
            assert metric_data._fields == ("timestamp", "group_name", "name", "value")
            self.seen.append((metric_data.group_name, metric_data.name, metric_data.value))

    return Collector()


def function() -> str:
    return "done"


class Class:
    def method(self) -> None:
        raise KeyError


@pytest.mark.parametrize("kind", KINDS)
def test_a_metric_goes_to_its_groups_handler_or_to_the_default(kind: str) -> None:
    module = KINDS[kind]
    mine, default = collecting(module.MetricHandler), collecting(module.MetricHandler)
    module.put_metric("nobody.listens", 1)
    module.configure(default)
    module.configure(mine, "mine")
    module.put_metric("a", 1)
    module.put_metric("b", 2, "mine")
    module.getStream("mine").add_value("c", 3)
    with pytest.warns(FutureWarning):
        module.publish_metric("mine", "d", 4)
    assert default.seen == [("torchelastic", "a", 1)]
    assert mine.seen == [("mine", "b", 2), ("mine", "c", 3), ("mine", "d", 4)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_function_is_measured(kind: str) -> None:
    module = KINDS[kind]
    seen = collecting(module.MetricHandler)
    module.configure(seen)
    assert module.prof(function)() == "done"
    with pytest.raises(KeyError):
        module.prof(group="mine")(Class.method)(Class())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert module.profile("old")(function)() == "done"
    assert [(group, name) for group, name, _ in seen.seen] == [
        ("torchelastic", "test_metrics.function.success"),
        ("torchelastic", "test_metrics.function.duration.ms"),
        ("mine", "Class.method.failure"),
        ("mine", "Class.method.duration.ms"),
        ("old", "function.success"),
        ("old", "function.duration.ms"),
    ]
    assert all(isinstance(value, int) for _, _, value in seen.seen)


@pytest.mark.parametrize("kind", KINDS)
def test_the_console_shows_a_line(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    module = KINDS[kind]
    module.ConsoleMetricHandler().emit(module.MetricData(1.5, "g", "n", 7))
    module.NullMetricHandler().emit(module.MetricData(1.5, "g", "n", 7))
    assert capsys.readouterr().out == "[1.5][g]: n=7\n"
    assert module.MetricsConfig().params == {} and module.MetricsConfig({"a": "b"}).params == {"a": "b"}
    assert module.initialize_metrics(module.MetricsConfig()) is None


def test_an_exception_of_a_handler_is_logged_once_and_goes_no_further(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(metrics.MetricHandler):
        def emit(self, metric_data: metrics.MetricData) -> None:
            raise ValueError("no route to the metrics host")

    metrics.configure(Broken())
    with caplog.at_level(logging.ERROR):
        assert metrics.prof(function)() == "done"
    assert caplog.text.count("Broken failed at a metric") == 1


def test_metrics_without_a_handler_go_to_torchs_module() -> None:
    seen = collecting(torch_metrics.MetricHandler)
    torch_metrics.configure(seen, "torchelastic")
    metrics.put_metric("a", 1)
    assert seen.seen == [("torchelastic", "a", 1)]
    assert "torch.distributed.elastic.metrics.api" in sys.modules
