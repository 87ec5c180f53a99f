"""`torch.distributed.launcher`: functions or commands as a job of this node, from inside a program.

A `LaunchConfig` is turned into the words of `ripstop run` and read by the same reader, so that there is one meaning of
every setting; what is launched then runs on the same engine.  Quirks kept from torch: the defaults (three restarts,
`spawn`, etcd), a run id that is made up when there is none, `ChildFailedError`.

The engine runs in the calling thread, or in one of its own where the calling thread is inside an event loop already.
Signals are handled only in the main thread, and are the program's again afterwards.  The program may have children of
its own and other launches meanwhile: only what is in the workers' sessions or below them is ended with the workers, and
a daemon of theirs, with a session of its own, lives on as it does with torch.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from msgspec.structs import replace

from ripstop import launch
from ripstop.agent.machine import ExitAgent
from ripstop.cli.commands.run import configure
from ripstop.cli.options.rendezvous import BACKENDS
from ripstop.compat import metrics
from ripstop.compat.agent import health_check
from ripstop.compat.agent.health_check import HealthCheckServer
from ripstop.compat.events import get_logging_handler
from ripstop.compat.launcher.custom_logs import CustomLogs, is_custom
from ripstop.compat.launcher.event_thread import EventThread
from ripstop.compat.launcher.function_spawner import METHODS, FunctionSpawner
from ripstop.compat.launcher.handler_link import TIMEOUT, HandlerLink
from ripstop.compat.multiprocessing import DefaultLogsSpecs, LogsSpecs, SignalException
from ripstop.compat.multiprocessing.errors import ChildFailedError, ProcessFailure
from ripstop.compat.multiprocessing.function_worker import Inherited, open_descriptors
from ripstop.compat.rendezvous import RendezvousParameters, get_rendezvous_handler, rendezvous_handler_registry
from ripstop.compat.utils import macros
from ripstop.logs.console import Console
from ripstop.logs.directory import LogDirectory
from ripstop.model.config import Entrypoint, Executable, Module, RunConfig, Script, StartMethod
from ripstop.model.errors import UsageError
from ripstop.model.events import Sink
from ripstop.model.failure import Failure
from ripstop.model.parsers import duration
from ripstop.model.round import Outcome
from ripstop.transport.endpoint import Bound
from ripstop.transport.link import Link
from ripstop.workers import processes
from ripstop.workers.environment import shared_environment
from ripstop.workers.spawner import ProcessSpec, ServeStore, Spawner

__all__ = ["LaunchConfig", "elastic_launch", "launch_agent"]

log = logging.getLogger("ripstop.compat")


@dataclass
class LaunchConfig:
    """How to launch; the names, their order and their defaults are torch's."""

    min_nodes: int
    max_nodes: int
    nproc_per_node: int
    logs_specs: LogsSpecs | None = None
    run_id: str = ""
    role: str = "default_role"
    rdzv_endpoint: str = ""
    rdzv_backend: str = "etcd"
    rdzv_configs: dict[str, Any] = field(default_factory=dict)
    rdzv_timeout: int = -1
    max_restarts: int = 3
    monitor_interval: float = 0.1
    start_method: str = "spawn"
    log_line_prefix_template: str | None = None
    metrics_cfg: dict[str, str] = field(default_factory=dict)
    local_addr: str | None = None
    event_log_handler: str = "null"
    numa_options: Any = None
    signals_to_handle: str = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
    duplicate_stdout_filters: list[str] | None = None
    duplicate_stderr_filters: list[str] | None = None
    virtual_local_rank: bool = False
    shutdown_timeout: float | None = None

    def __post_init__(self) -> None:
        if self.rdzv_timeout != -1:
            self.rdzv_configs["timeout"] = self.rdzv_timeout
        else:
            self.rdzv_configs.setdefault("timeout", TIMEOUT)
        if self.logs_specs is None:
            self.logs_specs = DefaultLogsSpecs()
        if self.shutdown_timeout is None:
            self.shutdown_timeout = _shutdown_timeout()
        elif self.shutdown_timeout < 0:
            raise ValueError(f"shutdown_timeout={self.shutdown_timeout}: a time is 0 or more; give seconds")


def _shutdown_timeout() -> float:
    name = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
    try:
        seconds = duration(name, os.environ.get(name) or "30")
    except UsageError as error:
        raise ValueError(str(error)) from None
    return int(seconds) if seconds.is_integer() else seconds  # torch's is whole, and printed by some


class elastic_launch:  # noqa: N801 - torch's name
    """`elastic_launch(config, entrypoint)(*args)`: what each worker returned, by global rank.

    The entrypoint is a function, or a command whose words are the entrypoint and the arguments.
    """

    def __init__(
        self,
        config: LaunchConfig,
        entrypoint: Callable[..., Any] | str | None,
        health_check_server: HealthCheckServer | None = None,
    ) -> None:
        self._config = config
        self._entrypoint = entrypoint
        self._health_check_server = health_check_server

    def __call__(self, *args: Any) -> dict[int, Any]:
        return launch_agent(self._config, self._entrypoint, list(args), self._health_check_server)


def launch_agent(
    config: LaunchConfig,
    entrypoint: Callable[..., Any] | str | None,
    args: list[Any],
    health_check_server: HealthCheckServer | None = None,
) -> dict[int, Any]:
    """Run this node's part of the job and return its workers' values by global rank.

    Raises `ChildFailedError` when the job failed, `SignalException` when a signal stopped it, `ValueError` for a
    configuration that cannot be right.
    """
    if not config.run_id:
        config.run_id = str(uuid.uuid4().int)
        log.warning("config has no run_id, generated a random run_id: %s", config.run_id)
    if entrypoint is None:
        raise ValueError("there is nothing to launch: the entrypoint is None; give a function, or a command's name")
    run = _read(config, entrypoint, args)
    try:
        get_logging_handler(config.event_log_handler)
    except KeyError as error:
        raise ValueError(f"event_log_handler: {error.args[0]}") from None
    for note in run.notes:
        log.warning("%s", note)
    _say_what_has_no_effect(config)
    metrics.initialize_metrics(metrics.MetricsConfig(config.metrics_cfg))
    server = health_check_server or health_check.from_environment()
    try:
        environ = {name: value for name, value in os.environ.items() if name not in launch.SECRETS}
        end, values = _launch(run, config, entrypoint, args, environ, server)
    finally:
        if server is not None:
            server.stop()
    if end.report is not None:
        failed = end.report.outcome is not Outcome.SUCCEEDED
        metrics.put_run_metrics(
            config.role, failed=failed, restarts=end.report.restarts, max_restarts=config.max_restarts
        )
    _raise_unless_it_succeeded(end, _name(entrypoint, args))
    return values


# the configuration ----------------------------------------------------------------------------------------------------


def _read(config: LaunchConfig, entrypoint: Callable[..., Any] | str, args: Sequence[Any]) -> RunConfig:
    """The same settings as `ripstop run` would have read them."""
    if callable(entrypoint) and config.start_method not in METHODS:
        raise ValueError(f"start_method={config.start_method}: there are {', '.join(METHODS)}; choose one of them")
    try:
        run = _configured(config)
    except UsageError as error:
        if not getattr(config.numa_options, "should_fall_back_if_binding_fails", False):
            raise ValueError(str(error)) from None
        try:
            run = _configured(dataclasses.replace(config, numa_options=None))
        except UsageError as other:  # it was not the binding
            raise ValueError(str(other)) from None
        log.warning("workers are not bound: %s", error)
    entry = _entry("-", ()) if callable(entrypoint) else _entry(entrypoint, args)
    start = StartMethod.EXEC if isinstance(entry, Executable) else StartMethod.ZYGOTE
    return replace(run, entry=entry, start=start, role=config.role)  # "" is a role to torch, and torchx gives it


def _configured(config: LaunchConfig) -> RunConfig:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PET_")}
    if config.log_line_prefix_template is not None:
        environ["TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"] = config.log_line_prefix_template
    registered = {config.rdzv_backend} if _is_a_handlers(config.rdzv_backend) else set()
    run = configure([*_words(config), "--no-python", sys.executable], environ, registered)
    assert run is not None, "nobody asked for help"
    return run


def _is_a_handlers(backend: str) -> bool:
    """Is it the name of a rendezvous handler, of the program's own or another package's?"""
    return backend not in BACKENDS and rendezvous_handler_registry._creator(backend) is not None


def _link(run: RunConfig, config: LaunchConfig) -> Link | None:
    """To the handler, where the configuration names one; its settings are of any type, and no words."""
    if run.handler is None:
        return None
    parameters = RendezvousParameters(
        config.rdzv_backend,
        config.rdzv_endpoint,
        run.run_id,
        config.min_nodes,
        config.max_nodes,
        config.local_addr,
        **config.rdzv_configs,
    )
    return HandlerLink(partial(get_rendezvous_handler, parameters), run)


def _words(config: LaunchConfig) -> Iterator[str]:
    conf = {} if _is_a_handlers(config.rdzv_backend) else config.rdzv_configs
    conf = {key: value for key, value in conf.items() if value is not None}
    rank = conf.pop("rank", None)
    if "join_timeout" in conf and conf.get("timeout") == TIMEOUT:
        del conf["timeout"]  # put there by the default
    if config.rdzv_backend not in BACKENDS and not _is_a_handlers(config.rdzv_backend):
        raise ValueError(
            f"rdzv_backend={config.rdzv_backend!r}: there are c10d, etcd, and static for fixed ranks; write "
            "rdzv_backend='c10d', or register a handler of your own with rendezvous_handler_registry"
        )
    yield f"--nnodes={config.min_nodes}:{config.max_nodes}"
    yield f"--nproc-per-node={config.nproc_per_node}"
    yield f"--rdzv-backend={config.rdzv_backend}"
    yield f"--rdzv-id={config.run_id}"
    if config.role:
        yield f"--role={config.role}"
    yield f"--max-restarts={config.max_restarts}"
    yield f"--shutdown-timeout={config.shutdown_timeout}"
    yield f"--rdzv-conf={','.join(f'{key}={value}' for key, value in conf.items())}"
    if config.rdzv_endpoint:
        yield f"--rdzv-endpoint={config.rdzv_endpoint}"
    if rank is not None and config.rdzv_backend == "static":
        yield f"--node-rank={rank}"
    if config.local_addr:
        yield f"--local-addr={config.local_addr}"
    yield from _words_of_logs(config)
    yield from _words_of_workers(config)


def _words_of_logs(config: LaunchConfig) -> Iterator[str]:
    specs = config.logs_specs
    assert specs is not None, "made by __post_init__"
    if is_custom(specs):
        yield "--tee=3"  # its `reify` says what is teed; this is only so that nobody says that nothing is
    else:
        if specs._root_log_dir:
            yield f"--log-dir={specs._root_log_dir}"
        if specs._root_log_dir != os.devnull:
            yield f"--redirects={_streams(specs._redirects)}"
            yield f"--tee={_streams(specs._tee)}"
        if specs._local_ranks_filter:
            yield f"--local-ranks-filter={','.join(map(str, sorted(specs._local_ranks_filter)))}"
    for name, filters in (("stdout", config.duplicate_stdout_filters), ("stderr", config.duplicate_stderr_filters)):
        if filters:
            yield f"--duplicate-{name}-filters={','.join(word.replace(',', ',,') for word in filters)}"


def _words_of_workers(config: LaunchConfig) -> Iterator[str]:
    default = LaunchConfig.__dataclass_fields__
    if config.signals_to_handle != default["signals_to_handle"].default:
        yield f"--signals-to-handle={config.signals_to_handle}"
    if config.monitor_interval != default["monitor_interval"].default:
        yield f"--monitor-interval={config.monitor_interval}"
    if config.numa_options is not None:
        yield f"--numa-binding={config.numa_options.affinity_mode.value}"
    if config.virtual_local_rank:
        yield "--virtual-local-rank"


def _made_up(directory: Path | None) -> bool:
    """Whether `DefaultLogsSpecs` made this one because none was named."""
    return (
        directory is not None
        and directory.name.startswith("torchelastic_")
        and directory.parent == Path(tempfile.gettempdir())
    )


def _streams(choice: Any) -> str:
    if isinstance(choice, Mapping):
        return ",".join(f"{rank}:{int(one)}" for rank, one in choice.items()) or "0"
    return str(int(choice))


def _entry(entrypoint: str, args: Sequence[Any]) -> Entrypoint:
    """A command; one that is this interpreter and a script or module, as torchrun makes it, is started as such."""
    words = [str(arg) for arg in args]
    match [entrypoint, *words]:
        case [sys.executable, "-u", "-m", name, *rest]:
            return Module(name, tuple(rest))
        case [sys.executable, "-u", path, *rest] if not path.startswith("-"):
            return Script(path, tuple(rest))
    return Executable((entrypoint, *words))


def _say_what_has_no_effect(config: LaunchConfig) -> None:
    if os.environ.get("TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT"):
        log.warning("TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT has an effect with LocalElasticAgent only")


def _name(entrypoint: Callable[..., Any] | str, args: Sequence[Any]) -> str:
    """What torch calls the job in its errors."""
    if not isinstance(entrypoint, str):
        return str(getattr(entrypoint, "__name__", entrypoint))
    if entrypoint == sys.executable:
        return next((str(arg) for arg in args if not str(arg).startswith("-")), "")
    return entrypoint


# the run --------------------------------------------------------------------------------------------------------------


class CommandSpawner:
    """A `Spawner` whose workers have arguments of their own: `${local_rank}` in them is a worker's local rank."""

    def __init__(self, config: RunConfig, environ: Mapping[str, str]) -> None:
        shared = shared_environment(environ, config.slots)
        self._spawner = Spawner(config.entry, shared, config.start, config.preload)
        self.warm = self._spawner.warm
        self.close = self._spawner.close
        self._ranks: tuple[int, ...] = ()
        self.has_started = False  # any worker

    async def spawn(self, births: Sequence[ProcessSpec]) -> list[int]:
        if not isinstance(births[0].entry, ServeStore):
            self._ranks = tuple(int(birth.env["RANK"]) for birth in births)
            births = [replace(birth, entry=_substituted(birth.entry, rank)) for rank, birth in enumerate(births)]
            pids = await self._spawner.spawn(births)
            self.has_started = True
            return pids
        return await self._spawner.spawn(births)

    def returned(self) -> dict[int, Any]:
        """A command returns nothing."""
        return dict.fromkeys(self._ranks)


def _substituted(entry: Entrypoint | ServeStore, local_rank: int) -> Entrypoint | ServeStore:
    def words(args: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(macros.substitute(list(args), str(local_rank)))

    match entry:
        case Executable(argv):
            return Executable(words(argv))
        case Script(args=args) | Module(args=args):
            return replace(entry, args=words(args))
    return entry


def _launch(
    run: RunConfig,
    config: LaunchConfig,
    entrypoint: Callable[..., Any] | str,
    args: Sequence[Any],
    environ: dict[str, str],
    server: HealthCheckServer | None,
) -> tuple[ExitAgent, dict[int, Any]]:
    inherited = Inherited(_handled(run), open_descriptors())
    results = Path(tempfile.mkdtemp(prefix="ripstop_results_"))
    source = CustomLogs(config.logs_specs, run.logs, run.role) if is_custom(config.logs_specs) else None
    try:
        # first of all, since it is the one to find out that a function cannot be sent
        spawner = _spawner(run, config, entrypoint, args, results, environ, inherited)
        try:
            directory = LogDirectory(run.logs, run.run_id, made_up=_made_up(run.logs.directory))
            if server is not None:
                server.ready_callback = lambda: spawner.has_started
            told = _told_to_handler(run, config.event_log_handler, _name(entrypoint, args))
            with processes.within_a_program(), _endpoint(run) as bound, told as sinks:
                link = _link(run, config)
                console = Console(_objects_for_output())
                part = partial(
                    launch.take_part, run, directory, spawner, environ, bound, source, sinks, link, console=console
                )
                end = _drive(part, inherited.signals)
        finally:
            spawner.close()
        succeeded = end.report is not None and end.report.outcome is Outcome.SUCCEEDED
        values = spawner.returned() if succeeded else {}
        directory.tidy(succeeded=succeeded)
        return end, values
    except UsageError as error:
        raise ValueError(str(error)) from None
    finally:
        shutil.rmtree(results, ignore_errors=True)


def _objects_for_output() -> dict[int, TextIO | None]:
    """What the program has in the place of its stdout and stderr, by descriptor: torch shows workers there.

    Where it has none, the descriptors themselves are faster, and no lock of a file is held while workers are forked.
    """
    found: dict[int, TextIO | None] = {}
    for fd, target in ((1, sys.stdout), (2, sys.stderr)):
        try:
            usual = target is not None and target.fileno() == fd
        except (OSError, ValueError, AttributeError):  # it is no file
            usual = False
        if usual:
            target.flush()  # what was printed before comes before
        else:
            found[fd] = target
    return found


def _spawner(
    run: RunConfig,
    config: LaunchConfig,
    entrypoint: Callable[..., Any] | str,
    args: Sequence[Any],
    results: Path,
    environ: dict[str, str],
    inherited: Inherited,
) -> FunctionSpawner | CommandSpawner:
    if isinstance(entrypoint, str):
        return CommandSpawner(run, environ)
    by_rank = [tuple(macros.substitute(list(args), str(rank))) for rank in range(run.slots)]
    return FunctionSpawner(entrypoint, by_rank, config.start_method, results, environ, inherited)


@contextmanager
def _endpoint(run: RunConfig) -> Iterator[Bound | None]:
    """The endpoint if it is ours, for as long as the launch takes."""
    bound = launch.bind_endpoint(run)
    try:
        yield bound
    finally:
        if bound is not None:
            bound.listening.close()


@contextmanager
def _told_to_handler(run: RunConfig, handler: str, program: str) -> Iterator[list[Sink]]:
    """What happens goes to an event handler of this program's, while the launch takes."""
    if isinstance(get_logging_handler(handler), logging.NullHandler):
        yield []
        return
    teller = EventThread(handler)
    try:
        yield [launch.torch_sink(run, program, teller.put)]
    finally:
        teller.close()


def _handled(run: RunConfig) -> tuple[signal.Signals, ...]:
    """The signals that the engine, or asyncio for it, puts handlers on."""
    return *(signal.Signals[name] for name in run.signals), signal.SIGINT, signal.SIGCHLD


def _drive(part: Callable[[], Any], handled: Sequence[signal.Signals]) -> ExitAgent:
    """Run the engine in this thread, or beside the event loop that this thread is in."""
    if _is_in_a_loop():
        return _Beside(part).run()
    with _signals_given_back(handled):
        end: ExitAgent = asyncio.run(part())
        return end


def _is_in_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


class _Beside:
    """The engine in a thread of its own; an exception in the waiting thread, as Ctrl-C is, stops it first."""

    def __init__(self, part: Callable[[], Any]) -> None:
        self._part = part
        self._task: Future[asyncio.Task[Any]] = Future()
        self._end: ExitAgent | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._main, name="ripstop")

    def run(self) -> ExitAgent:
        self._thread.start()
        try:
            self._thread.join()
        except BaseException:
            task = self._task.result()
            with suppress(RuntimeError):  # its loop has just ended by itself
                task.get_loop().call_soon_threadsafe(task.cancel)
            self._thread.join()
            raise
        if self._error is not None:
            try:
                raise self._error
            finally:
                self._error = None  # its traceback leads to this frame, and to what was launched
        assert self._end is not None, "it ended one way or the other"
        return self._end

    def _main(self) -> None:
        try:
            self._end = asyncio.run(self._supervised())
        except BaseException as error:
            self._error = error

    async def _supervised(self) -> ExitAgent:
        task = asyncio.current_task()
        assert task is not None, "this is one"
        self._task.set_result(task)
        end: ExitAgent = await self._part()
        return end


@contextmanager
def _signals_given_back(handled: Sequence[signal.Signals]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {signum: signal.getsignal(signum) for signum in handled}
    wakeup = signal.set_wakeup_fd(-1)
    try:
        yield
    finally:
        signal.set_wakeup_fd(wakeup)
        for signum, handler in before.items():
            if handler is not None:  # else it was not Python's to begin with
                signal.signal(signum, handler)


# the end --------------------------------------------------------------------------------------------------------------


def _raise_unless_it_succeeded(end: ExitAgent, name: str) -> None:
    if end.code >= 128:
        signum = signal.Signals(end.code - 128)
        raise SignalException(f"Process {os.getpid()} got signal: {signum}", sigval=signum)
    if end.report is not None and end.report.outcome is Outcome.SUCCEEDED:
        return
    failures = {failure.rank: _as_torch_has_it(failure) for failure in end.report.failures} if end.report else {}
    if failures:
        raise ChildFailedError(name, failures)
    raise RuntimeError(f"{name} did not succeed: {end.why}")


def _as_torch_has_it(failure: Failure) -> ProcessFailure:
    exitcode = failure.exitcode if failure.exitcode is not None else 1
    if failure.signal is not None:
        exitcode = -_signal_number(failure.signal)
    told = ProcessFailure(failure.local_rank, failure.pid or -1, exitcode, failure.error_file)
    told._at, told.timestamp = failure.at, int(failure.at)
    if not Path(failure.error_file or ".").is_file():  # it is on another node, or there was none: say what we know
        extra = {"py_callstack": failure.traceback, "timestamp": str(int(failure.at))}
        if failure.traceback:
            told.message = {"message": failure.message, "extraInfo": extra}
            told.error_file_data = {"message": told.message}
        elif failure.signal is None or failure.oom:
            told.message = failure.message
    return told


def _signal_number(name: str) -> int:
    return int(signal.Signals[name]) if name in signal.Signals.__members__ else int(name.removeprefix("SIG"))
