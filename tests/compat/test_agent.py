"""The agent classes: with torch's rendezvous handler, compared with torch's agent, and as base classes."""

import gc
import inspect
import json
import logging
import os
import re
import signal
import sys
import threading
import time
import urllib.error
import urllib.request
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
import torch.distributed.elastic.agent.server as torch_server
import torch.distributed.elastic.agent.server.local_elastic_agent as torch_local
import torch.distributed.elastic.metrics.api as torch_metrics
import torch.distributed.elastic.multiprocessing as torch_multiprocessing
import torch.distributed.elastic.timer as torch_timer
from torch.distributed.elastic.rendezvous import RendezvousGracefulExitError, RendezvousParameters
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

from ripstop.compat import agent as ours
from ripstop.compat import events, metrics, multiprocessing
from ripstop.compat.agent.health_check import HealthCheckServer, create_healthcheck_server
from ripstop.compat.rendezvous import RendezvousParameters as OurParameters
from ripstop.compat.rendezvous import get_rendezvous_handler
from tests.e2e.harness import free_port

DEADLINE = 120.0
KINDS = ("torch", "ripstop")


@pytest.fixture(autouse=True)
def signals_given_back() -> Iterator[None]:
    """Starting workers turns signals into exceptions for good; the next test wants them as they were."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def handler() -> Iterator[Callable[..., Any]]:
    """Creates torch's c10d rendezvous handlers; those with the same run id and endpoint form a job."""
    made: list[Any] = []

    def make(nodes: int = 1, endpoint: str = "localhost:0", run_id: str = "r") -> Any:
        timeouts = {"join_timeout": 30, "last_call_timeout": 1, "close_timeout": 5}
        parameters = RendezvousParameters("c10d", endpoint, run_id, nodes, nodes, local_addr="localhost", **timeouts)
        backend, store = create_backend(parameters)
        made.append(create_handler(store, backend, parameters))
        return made[-1]

    yield make
    for one in made:
        one.shutdown()


def local(kind: str) -> tuple[Any, Any, Any]:
    """`WorkerSpec`, `LocalElasticAgent` and `DefaultLogsSpecs`, torch's or ours."""
    if kind == "torch":
        return torch_server.WorkerSpec, torch_local.LocalElasticAgent, torch_multiprocessing.DefaultLogsSpecs
    return ours.WorkerSpec, ours.LocalElasticAgent, multiprocessing.DefaultLogsSpecs


def run(kind: str, handler: Any, tmp_path: Path, entrypoint: Any, workers: int = 2, **settings: Any) -> tuple[Any, Any]:
    """Runs an agent to its end; the agent and its result."""
    spec, agent, logs = local(kind)
    options = {
        key: settings.pop(key) for key in ("health_check_server", "uninterruptible_state_timeout") if key in settings
    }
    settings = {"role": "trainer", "max_restarts": 0, "monitor_interval": 0.05} | settings
    made = agent(
        spec(local_world_size=workers, entrypoint=entrypoint, rdzv_handler=handler, **settings),
        logs_specs=logs(log_dir=str(tmp_path)),
        start_method="fork",
        exit_barrier_timeout=30,
        **options,
    )
    return made, made.run()


# side by side with torch's --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_functions_return_values_by_global_rank(kind: str, handler: Callable[..., Any], tmp_path: Path) -> None:
    def work(word: str) -> tuple[str, ...]:
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "ROLE_RANK", "ROLE_NAME", "GROUP_RANK", "GROUP_WORLD_SIZE")
        more = ("LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
        others = ("TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_USE_AGENT_STORE", "TORCH_NCCL_ASYNC_ERROR_HANDLING")
        return (word, *(os.environ[name] for name in names + more + others))

    agent, result = run(kind, handler(), tmp_path, work, args=("hello ${local_rank}",), max_restarts=3)
    assert result.state.value == "SUCCEEDED" and not result.is_failed() and result.failures == {}
    shared = ("trainer", "0", "1", "2", "2", "r", "0", "3", "True", "1")
    assert result.return_values == {r: (f"hello {r}", str(r), str(r), "2", str(r), *shared) for r in range(2)}
    assert agent.get_worker_group().state.value == "SUCCEEDED"


def test_a_large_return_value_does_not_wait_for_the_monitor_interval(
    handler: Callable[..., Any], tmp_path: Path
) -> None:
    size = 16 << 20  # hundreds of times what a pipe holds

    def work() -> bytes:
        return bytes(size)

    began = time.monotonic()
    _, result = run("ripstop", handler(), tmp_path, work, workers=1, monitor_interval=5.0)
    assert len(result.return_values[0]) == size
    assert time.monotonic() - began < DEADLINE / 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_failure_is_reported_by_global_rank_after_the_restarts(
    kind: str, handler: Callable[..., Any], tmp_path: Path
) -> None:
    def work() -> None:
        (tmp_path / f"{os.environ['RANK']}-{os.environ['TORCHELASTIC_RESTART_COUNT']}").touch()
        if os.environ["RANK"] == "1":
            raise ValueError("always")
        time.sleep(60)

    _, result = run(kind, handler(), tmp_path / "logs", work, max_restarts=1)
    assert result.is_failed() and list(result.failures) == [1]
    assert result.failures[1].exitcode == 1 and result.failures[1].message["message"] == "ValueError: always"
    assert {"1-0", "1-1"} <= {path.name for path in tmp_path.iterdir()} <= {"0-0", "0-1", "1-0", "1-1", "logs"}


@pytest.mark.parametrize("kind", KINDS)
def test_workers_find_each_other_through_the_handlers_store(
    kind: str, handler: Callable[..., Any], tmp_path: Path
) -> None:
    def work() -> int:
        dist.init_process_group("gloo")
        everybody: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everybody, dist.get_rank() + 1)
        dist.destroy_process_group()
        return sum(everybody)

    _, result = run(kind, handler(), tmp_path, work)
    assert result.return_values == {0: 3, 1: 3}


@pytest.mark.parametrize("kind", KINDS)
def test_a_command_gets_its_local_rank_in_its_arguments(kind: str, handler: Callable[..., Any], tmp_path: Path) -> None:
    words = ("-c", f"echo ${{local_rank}} $RANK $ROLE_NAME > {tmp_path}/said.$RANK")
    _, result = run(kind, handler(), tmp_path / "logs", "sh", args=words)
    assert result.return_values == {0: None, 1: None}
    assert [(tmp_path / f"said.{rank}").read_text() for rank in range(2)] == ["0 0 trainer\n", "1 1 trainer\n"]


@pytest.mark.parametrize("kinds", [("torch", "ripstop"), ("ripstop", "torch"), ("ripstop", "ripstop")])
def test_agents_of_torch_and_ripstop_agree_on_ranks_in_one_job(
    kinds: tuple[str, str], handler: Callable[..., Any], tmp_path: Path
) -> None:
    endpoint = f"localhost:{free_port()}"
    results: dict[int, Any] = {}

    def node(index: int) -> None:
        one = handler(nodes=2, endpoint=endpoint)
        command = ("-c", f"echo $ROLE_NAME $ROLE_RANK/$ROLE_WORLD_SIZE $WORLD_SIZE > {tmp_path}/{index}.$RANK")
        role = ("eater", "drinker")[index]
        results[index] = run(kinds[index], one, tmp_path / "l", "sh", workers=index + 1, args=command, role=role)[1]

    threads = [threading.Thread(target=node, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
    said = {path.suffix: path.read_text().split() for path in tmp_path.glob("?.?")}
    assert sorted(said) == [".0", ".1", ".2"] and all(words[2] == "3" for words in said.values())
    assert sorted(words[:2] for words in said.values()) == [["drinker", "0/2"], ["drinker", "1/2"], ["eater", "0/1"]]
    assert sorted(rank for result in results.values() for rank in result.return_values) == [0, 1, 2]


@pytest.mark.parametrize("kind", KINDS)
def test_a_newcomer_restarts_the_workers_and_costs_no_restart(
    kind: str, handler: Callable[..., Any], tmp_path: Path
) -> None:
    class Growing:
        """A handler that sees one node waiting, once."""

        def __init__(self, inner: Any) -> None:
            self._inner = inner
            self.rounds = 0

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

        def next_rendezvous(self) -> Any:
            self.rounds += 1
            return self._inner.next_rendezvous()

        def num_nodes_waiting(self) -> int:
            return 1 if self.rounds == 1 and (tmp_path / "0").exists() else 0

    growing = Growing(handler())

    def work() -> str:
        (tmp_path / "0").touch()
        if growing.rounds == 1:
            time.sleep(60)
        return os.environ["TORCHELASTIC_RESTART_COUNT"]

    _, result = run(kind, growing, tmp_path / "logs", work, workers=1)
    assert growing.rounds == 2 and result.return_values == {0: "0"}


@pytest.mark.parametrize("kind", KINDS)
def test_the_spec_rejects_invalid_values(kind: str) -> None:
    spec, _, _ = local(kind)
    for wrong in ({"local_world_size": 0}, {"monitor_interval": 0}, {"entrypoint": None}):
        with pytest.raises(AssertionError):
            spec(**({"role": "r", "local_world_size": 1, "rdzv_handler": None, "entrypoint": print} | wrong))
    with pytest.warns(DeprecationWarning):
        assert spec(role="r", local_world_size=1, rdzv_handler=None, fn=print).entrypoint is print
    assert spec("r", 1, None, entrypoint="/bin/true").get_entrypoint_name() == "true"
    assert spec("r", 1, None, entrypoint=signals_given_back).get_entrypoint_name() == "signals_given_back"


@pytest.mark.parametrize("name", ["WorkerSpec", "Worker", "WorkerGroup", "RunResult", "SimpleElasticAgent"])
def test_classes_are_made_with_torchs_arguments(name: str) -> None:
    def arguments(module: ModuleType) -> list[tuple[str, Any]]:
        found = inspect.signature(getattr(module, name)).parameters.values()
        return [(one.name, str(one.default)) for one in found]

    theirs = arguments(torch_server)
    assert [one for one in arguments(ours) if one[0] in dict(theirs)] == theirs


def test_states_are_torchs() -> None:
    assert {state.name: state.value for state in ours.WorkerState} == {
        state.name: state.value for state in torch_server.WorkerState
    }
    running = [state for state in ours.WorkerState if ours.WorkerState.is_running(state)]
    assert running == [ours.WorkerState.HEALTHY, ours.WorkerState.UNHEALTHY]


# as something to extend -----------------------------------------------------------------------------------------------


def recording(base: Any) -> Any:
    """An agent without processes, which writes down which of its hooks are called."""

    class Recording(base):  # type: ignore[misc]
        def __init__(self, spec: Any, states: list[str]) -> None:
            super().__init__(spec, exit_barrier_timeout=5)
            self.calls: list[str] = []
            self.states = states

        def _start_workers(self, worker_group: Any) -> dict[int, Any]:
            self.calls.append("start")
            return {worker.local_rank: f"id{worker.global_rank}" for worker in worker_group.workers}

        def _stop_workers(self, worker_group: Any) -> None:
            self.calls.append("stop")

        def _monitor_workers(self, worker_group: Any) -> Any:
            state = self.states.pop(0)
            self.calls.append(f"monitor {state}")
            kind = type(worker_group.state)
            values = {worker.global_rank: None for worker in worker_group.workers} if state == "SUCCEEDED" else {}
            result = torch_server.RunResult if base is torch_server.SimpleElasticAgent else ours.RunResult
            return result(kind(state), values)

        def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
            self.calls.append(f"shutdown {death_sig.name} {timeout}")

        def _rendezvous(self, worker_group: Any) -> None:
            self.calls.append("rendezvous")
            super()._rendezvous(worker_group)

        def _exit_barrier(self) -> None:
            self.calls.append("barrier")
            super()._exit_barrier()

    return Recording


class OneNode:
    """The least that a rendezvous handler is."""

    use_agent_store = False

    def __init__(self, error: Exception | None = None) -> None:
        self._error = error
        self._store = dist.HashStore()

    def next_rendezvous(self) -> Any:
        if self._error:
            raise self._error
        where = SimpleNamespace(master_addr="here", master_port=1)
        return SimpleNamespace(store=self._store, rank=0, world_size=1, bootstrap_store_info=where)

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return "r"

    def get_backend(self) -> str:
        return "mine"


BASES = [torch_server.SimpleElasticAgent, ours.SimpleElasticAgent]


@pytest.mark.parametrize("base", BASES, ids=KINDS)
@pytest.mark.parametrize(
    "states",
    [
        ["HEALTHY", "SUCCEEDED"],
        ["FAILED", "HEALTHY", "SUCCEEDED"],
        ["UNHEALTHY", "FAILED", "FAILED"],
    ],
    ids=" ".join,
)
def test_hooks_are_called_as_torch_calls_them(base: Any, states: list[str]) -> None:
    expected = {
        "HEALTHY SUCCEEDED": ["monitor HEALTHY", "monitor SUCCEEDED", "barrier"],
        "FAILED HEALTHY SUCCEEDED": [
            "monitor FAILED", "stop", "rendezvous", "start", "monitor HEALTHY", "monitor SUCCEEDED", "barrier",
        ],
        "UNHEALTHY FAILED FAILED": [
            "monitor UNHEALTHY", "stop", "rendezvous", "start", "monitor FAILED", "stop", "rendezvous", "start",
            "monitor FAILED", "stop",
        ],
    }[" ".join(states)]  # fmt: skip
    module = torch_server if base is torch_server.SimpleElasticAgent else ours
    spec = module.WorkerSpec("r", 1, OneNode(), entrypoint=print, max_restarts=2, monitor_interval=0.001)
    agent = recording(base)(spec, list(states))
    result = agent.run()
    assert agent.calls == ["rendezvous", "start", *expected, "shutdown SIGTERM 30"]
    assert result.state.value == states[-1]
    group = agent.get_worker_group()
    assert (group.master_addr, group.master_port, group.group_rank, group.group_world_size) == ("here", 1, 0, 1)
    assert (group.workers[0].id, str(group.workers[0])) == (
        "id0",
        "local_rank=0,global_rank=0,role_rank=0,world_size=1,role_world_size=1",
    )


@pytest.mark.parametrize("base", BASES, ids=KINDS)
def test_a_rendezvous_that_ends_gracefully_ends_the_agent_without_a_result(base: Any) -> None:
    module = torch_server if base is torch_server.SimpleElasticAgent else ours
    spec = module.WorkerSpec("r", 1, OneNode(RendezvousGracefulExitError()), entrypoint=print)
    agent = recording(base)(spec, [])
    assert agent.run() is None
    assert agent.calls == ["rendezvous", "shutdown SIGTERM 30"]


@pytest.mark.parametrize("base", BASES, ids=KINDS)
def test_an_error_that_is_not_a_workers_failure_is_raised_after_the_shutdown(base: Any) -> None:
    module = torch_server if base is torch_server.SimpleElasticAgent else ours
    agent = recording(base)(module.WorkerSpec("r", 1, OneNode(OSError("net")), entrypoint=print), [])
    with pytest.raises(OSError, match="net"):
        agent.run()
    assert agent.calls[-1].startswith("shutdown")


def test_events_are_those_that_torchs_handlers_know() -> None:
    spec = ours.WorkerSpec("r", 1, OneNode(), entrypoint=print)
    theirs = torch_server.WorkerSpec("r", 1, OneNode(), entrypoint=print)
    one = recording(ours.SimpleElasticAgent)(spec, []).get_event_succeeded()
    other = recording(torch_server.SimpleElasticAgent)(theirs, []).get_event_succeeded()
    assert (one.name, one.source, one.metadata) == (other.name, other.source, other.metadata)


class Collector(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.events: list[dict[str, Any]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.events.append(json.loads(record.getMessage()))


class Broken(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        raise ValueError("no route to the event host")


class Blocked(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        threading.Event().wait()


@pytest.mark.parametrize("handler", [Broken, Blocked])
def test_an_event_handler_that_raises_or_blocks_does_not_affect_the_job(
    handler: type[logging.Handler], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    name = handler.__name__
    monkeypatch.setitem(events._log_handlers, name, handler())
    monkeypatch.setattr("ripstop.compat.launcher.event_thread.CLOSE_TIMEOUT_S", 0.1)
    monkeypatch.setattr("ripstop.compat.launcher.event_thread.MAX_QUEUED_EVENTS", 2)
    spec = ours.WorkerSpec("r", 3, OneNode(), entrypoint=print, event_log_handler=name)
    result = recording(ours.SimpleElasticAgent)(spec, [ours.WorkerState.SUCCEEDED]).run()
    assert result.state is ours.WorkerState.SUCCEEDED
    assert f"the event handler {name}" in caplog.text


def test_an_unknown_event_handler_is_rejected_before_any_worker_starts() -> None:
    agent = recording(ours.SimpleElasticAgent)(
        ours.WorkerSpec("r", 1, OneNode(), entrypoint=print, event_log_handler="nobody's"), []
    )
    with pytest.raises(KeyError, match="there is no such event handler"):
        agent.run()
    assert "start" not in "".join(agent.calls)


@pytest.mark.parametrize("kind", KINDS)
def test_the_metrics_of_a_run_are_torchs(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = torch_metrics if kind == "torch" else metrics
    seen: list[tuple[str, Any]] = []

    class Handler(module.MetricHandler):  # type: ignore[name-defined]
        def emit(self, metric_data: Any) -> None:
            if metric_data.group_name == "torchelastic":
                seen.append((metric_data.name, metric_data.value))

    monkeypatch.setitem(module._metrics_map, "torchelastic", Handler())
    run(kind, OneNode(), tmp_path, os.getpid, workers=1, max_restarts=3)
    once = {name for name, _ in seen}
    named = [f"{part}.{what}" for part in MEASURED for what in ("success", "duration.ms")]
    assert once == {*named, *(f"workers.trainer.{name}" for name in COUNTED)} | (once & {"workers.trainer.healthy"})
    values = dict(seen)
    assert values["workers.trainer.run_success_no_retries"] == 1 and values["workers.trainer.flakiness"] == 0
    assert values["workers.trainer.remaining_restarts"] == 3


MEASURED = (
    "SimpleElasticAgent.run", "SimpleElasticAgent._initialize_workers", "SimpleElasticAgent._rendezvous",
    "SimpleElasticAgent._assign_worker_ranks", "LocalElasticAgent._start_workers", "LocalElasticAgent._monitor_workers",
)  # fmt: skip
COUNTED = (
    "remaining_restarts", "succeeded", "flakiness", "run_total", "run_success_with_retries", "run_success_no_retries",
    "run_failed_with_retries", "run_failed_no_retries",
)  # fmt: skip


# health ---------------------------------------------------------------------------------------------------------------


def ask(server: HealthCheckServer, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}{path}", timeout=120) as answer:
            return answer.status, answer.read().decode().strip()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode().strip()


def test_the_health_check_reports_live_and_ready() -> None:
    signs = [time.time()]
    server = create_healthcheck_server(lambda: signs[0], port=0, timeout=30)
    server.start()
    try:
        assert ask(server, "/live") == ask(server, "/ready") == (200, "ok")
        server.ready_callback = lambda: False
        assert ask(server, "/ready") == (503, "no workers are running") and ask(server, "/live")[0] == 200
        signs[0] -= 31
        status, text = ask(server, "/live")
        assert status == 503 and re.search(r"no activity for [3-9]\d s", text)
        assert ask(server, "/else")[0] == 404
    finally:
        server.stop()
    server.stop()
    with pytest.raises(urllib.error.URLError):
        ask(server, "/live")


def test_a_health_check_port_in_use_does_not_affect_the_job() -> None:
    first = create_healthcheck_server(time.time, port=0, timeout=30)
    first.start()
    second = create_healthcheck_server(time.time, port=first.port, timeout=30)
    second.start()
    second.stop()
    try:
        assert ask(first, "/live")[0] == 200
    finally:
        first.stop()


def test_an_agent_is_ready_while_its_workers_run(handler: Callable[..., Any], tmp_path: Path) -> None:
    server = create_healthcheck_server(time.time, port=0, timeout=30)
    server.ready_callback = lambda: False
    server.start()

    def work() -> Any:
        end = time.monotonic() + DEADLINE
        while ask(server, "/ready")[0] != 200 and time.monotonic() < end:
            time.sleep(0.01)
        return ask(server, "/ready")

    _, result = run("ripstop", handler(), tmp_path, work, workers=1, health_check_server=server)
    assert result.return_values == {0: (200, "ok")}
    with pytest.raises(urllib.error.URLError):
        ask(server, "/live")


def test_the_port_of_the_health_check_comes_from_the_environment(
    handler: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the agent, whose server it is then, dies by reference count alone when it is over."""
    port = free_port()
    monkeypatch.setenv(ours.TORCHELASTIC_HEALTH_CHECK_PORT, str(port))

    def work() -> int:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/live", timeout=120) as answer:
            return int(answer.status)

    gc.disable()
    try:
        agent, result = run("ripstop", handler(), tmp_path, work, workers=1)
        assert result.return_values == {0: 200}
        gone = weakref.ref(agent)
        del agent
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("backend", ["c10d", "static"])
def test_an_agent_its_handler_and_its_stores_die_by_reference_count_when_the_run_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str, fails: bool
) -> None:
    """A store that waits for garbage to be collected may be destroyed in a forked child, which aborts there."""
    endpoint = f"127.0.0.1:{free_port()}"
    stores, make = list[weakref.ref[Any]](), dist.TCPStore  # type: ignore[attr-defined]

    def store(*args: Any, **kwargs: Any) -> Any:
        made = make(*args, **kwargs)
        stores.append(weakref.ref(made))
        return made

    def work() -> None:
        if fails:
            raise ValueError("as wanted")

    def after_a_run() -> tuple[list[Any], HealthCheckServer]:
        handler = get_rendezvous_handler(OurParameters(backend, endpoint, "r", 1, 1, "127.0.0.1", rank=0))
        server = create_healthcheck_server(time.time, port=0, timeout=30)
        server.start()
        agent, _ = run("ripstop", handler, tmp_path, work, workers=1, max_restarts=1, health_check_server=server)
        handler.shutdown()
        return [weakref.ref(agent), weakref.ref(handler), *stores], server

    monkeypatch.setattr(dist, "TCPStore", store)
    gc.disable()
    try:
        things, server = after_a_run()
        assert [type(thing()) for thing in things if thing() is not None] == []
        assert len(things) > 2 and server.port == 0
    finally:
        gc.enable()


# watchdogs ------------------------------------------------------------------------------------------------------------


def test_a_worker_that_misses_a_file_timers_deadline_is_killed_and_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With torch's server the agent would be killed too."""
    monkeypatch.setenv(ours.TORCHELASTIC_ENABLE_FILE_TIMER, "1")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setitem(events._log_handlers, "collected", collector := Collector())

    def work() -> str:
        client = torch_timer.FileTimerClient(os.environ["TORCHELASTIC_TIMER_FILE"])
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            with torch_timer.expires(after=0.3, scope="stuck", client=client):
                time.sleep(600)
        return "done"

    settings: dict[str, Any] = {"max_restarts": 1, "event_log_handler": "collected"}
    _, result = run("ripstop", OneNode(), tmp_path / "logs", work, **settings)
    assert result.return_values == {0: "done", 1: "done"}
    assert not list(tmp_path.glob("watchdog_timer_*"))
    names = [event["name"] for event in collector.events]
    assert names.count("watchdog started") == names.count("watchdog stopped") == 2
    (missed, *_) = [event for event in collector.events if event["name"] == "timer expired"]
    assert json.loads(missed["metadata"]["metadata"])["scope_id"] == "stuck"
    assert names.count("torchelastic.worker.status.START") == 4
    assert names.count("torchelastic.worker.status.SUCCEEDED") == 2


def test_a_worker_stuck_in_the_kernel_makes_the_group_unhealthy_and_is_not_restarted(
    handler: Callable[..., Any], tmp_path: Path
) -> None:
    """A parent between vfork and its child's exec is in that state, as long as we like."""
    stuck = "import ctypes, os, signal; ctypes.CDLL(None).vfork() or signal.pause()"
    settings = {"args": ("-c", stuck), "uninterruptible_state_timeout": 0.3, "max_restarts": 3}
    _, result = run("ripstop", handler(), tmp_path, sys.executable, workers=1, **settings)
    assert result.state is ours.WorkerState.UNHEALTHY
