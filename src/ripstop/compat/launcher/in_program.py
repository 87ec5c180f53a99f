"""Runs the engine inside the calling program.

The engine runs in the calling thread, or in its own thread if the calling thread runs an event loop.  It handles
signals only in the main thread, and restores the program's handlers afterwards.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from ripstop import launch
from ripstop.agent.machine_io import ExitAgent
from ripstop.compat.agent.health_check import HealthCheckServer
from ripstop.compat.events import get_logging_handler
from ripstop.compat.launcher.configuration import LaunchConfig
from ripstop.compat.launcher.custom_logs import CustomLogs, is_custom
from ripstop.compat.launcher.event_thread import EventThread
from ripstop.compat.launcher.handler_link import link_to_handler
from ripstop.compat.launcher.spawners import LauncherCommandSpawner, LauncherFunctionSpawner
from ripstop.compat.multiprocessing.function_worker import Inherited
from ripstop.compat.multiprocessing.logs_specs import is_created_by_logs_specs
from ripstop.compat.utils import macros
from ripstop.logs.console import Console
from ripstop.logs.directory import LogDirectory
from ripstop.model.config import RunConfig
from ripstop.model.errors import UsageError
from ripstop.model.round import Outcome
from ripstop.system.descriptors import open_descriptors
from ripstop.telemetry.torch_handler import torch_handler_sink
from ripstop.workers.processes import Children


def run_engine_in_program(
    run: RunConfig,
    config: LaunchConfig,
    entrypoint: Callable[..., Any] | str,
    args: Sequence[Any],
    name: str,
    server: HealthCheckServer | None,
) -> tuple[ExitAgent, dict[int, Any]]:
    """How this node's part of the job ended, and the workers' return values by global rank."""
    handled = *(signal.Signals[each] for each in run.signals), signal.SIGINT, signal.SIGCHLD  # by the engine or asyncio
    inherited = Inherited(handled, open_descriptors())
    environ = {key: value for key, value in os.environ.items() if key not in launch.SECRET_VARIABLES}
    results = Path(tempfile.mkdtemp(prefix="ripstop_results_"))
    children = Children(in_program=True)
    spawner: LauncherFunctionSpawner | LauncherCommandSpawner
    try:
        # First, because it finds out whether the function can be sent to workers.
        if isinstance(entrypoint, str):
            spawner = LauncherCommandSpawner(children, run, environ)
        else:
            by_rank = [tuple(macros.substitute(list(args), str(rank))) for rank in range(run.slots)]
            spawner = LauncherFunctionSpawner(
                children, entrypoint, by_rank, config.start_method, results, environ, inherited
            )
        with ExitStack() as parts:
            parts.callback(children.close)
            parts.callback(spawner.close)
            directory = LogDirectory(run.logs, run.run_id, made_up=is_created_by_logs_specs(run.logs.directory))
            if server is not None:
                server.ready_callback = lambda: spawner.has_started
            if (bound := launch.bind_endpoint(run)) is not None:
                parts.callback(bound.listening.close)
            sinks = []
            if not isinstance(get_logging_handler(config.event_log_handler), logging.NullHandler):
                events = EventThread(config.event_log_handler)
                parts.callback(events.close)
                sinks.append(torch_handler_sink(run, name, events.put))
            source = CustomLogs(config.logs_specs, run.logs, run.role) if is_custom(config.logs_specs) else None
            link = link_to_handler(run, config.rdzv_configs) if run.handler is not None else None
            console = Console(_in_program_output_objects())
            part = partial(
                launch.run_agent, run, directory, spawner, environ, bound, source, sinks, link, console=console
            )
            if _is_in_event_loop():
                end = _run_engine_in_thread(part)
            else:
                with _signals_restored(handled):
                    end = asyncio.run(part())
        succeeded = end.report is not None and end.report.outcome is Outcome.SUCCEEDED
        values = spawner.returned() if succeeded else {}
        directory.tidy(succeeded=succeeded)
        return end, values
    except UsageError as error:
        raise ValueError(str(error)) from None
    finally:
        shutil.rmtree(results, ignore_errors=True)


def _in_program_output_objects() -> dict[int, TextIO | None]:
    """Objects that replace the program's stdout and stderr, by descriptor: torch shows workers' output there.

    If there is none, the descriptors are faster, and no lock of a file is held while workers are forked.
    """
    found: dict[int, TextIO | None] = {}
    for fd, target in ((1, sys.stdout), (2, sys.stderr)):
        try:
            is_descriptor = target is not None and target.fileno() == fd
        except (OSError, ValueError, AttributeError):  # not a file
            is_descriptor = False
        if is_descriptor:
            with suppress(OSError, ValueError):  # a closed pipe, a full disk
                target.flush()  # earlier prints come first
        else:
            found[fd] = target
    return found


# the event loop -------------------------------------------------------------------------------------------------------


def _is_in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _run_engine_in_thread(part: Callable[[], Any]) -> ExitAgent:
    """An exception in the waiting thread, such as Ctrl-C, cancels the engine first."""
    tasks: list[asyncio.Task[Any]] = []
    outcomes: list[ExitAgent | BaseException] = []
    started = threading.Event()

    async def supervised() -> ExitAgent:
        task = asyncio.current_task()
        assert task is not None, "this is one"
        tasks.append(task)
        started.set()
        end: ExitAgent = await part()
        return end

    def main() -> None:
        try:
            outcomes.append(asyncio.run(supervised()))
        except BaseException as error:
            outcomes.append(error)

    thread = threading.Thread(target=main, name="ripstop")
    thread.start()
    try:
        thread.join()
    except BaseException:
        started.wait()
        with suppress(RuntimeError):  # the loop has just ended
            tasks[0].get_loop().call_soon_threadsafe(tasks[0].cancel)
        thread.join()
        raise
    tasks.clear()
    end = outcomes.pop()
    if isinstance(end, BaseException):
        try:
            raise end
        finally:
            del end  # no reference cycle through its traceback, which refers to what was launched
    return end


@contextmanager
def _signals_restored(handled: Sequence[signal.Signals]) -> Iterator[None]:
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
            if handler is not None:  # None: not set by Python
                signal.signal(signum, handler)
