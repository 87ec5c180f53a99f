"""`torch.distributed.launcher` and its `.api`: launch functions or commands as a job, from inside a program.

`elastic_launch(config, entrypoint)(*args)` runs this node's part of a job on ripstop's engine and returns the workers'
values.  `configuration` turns a `LaunchConfig` into the engine's configuration, `in_program` runs the engine,
`spawners` starts commands and functions, `handler_link` connects to a rendezvous handler of another package, and
`event_thread` to the program's event handlers.

Defaults are torch's: three restarts, `spawn`, etcd, a random run id.  The program may have other children and other
launches at the same time.  Only processes in the workers' sessions, or below them, end with the workers; a daemon with
its own session lives on, as with torch.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ripstop.agent.machine_io import ExitAgent
from ripstop.compat import metrics
from ripstop.compat.agent.health_check import HealthCheckServer, health_check_from_environment
from ripstop.compat.events import get_logging_handler
from ripstop.compat.launcher.configuration import LaunchConfig, run_config_from_launcher_config
from ripstop.compat.launcher.in_program import run_engine_in_program
from ripstop.compat.multiprocessing import SignalException
from ripstop.compat.multiprocessing.errors import ChildFailedError, ProcessFailure
from ripstop.model.failure import Failure
from ripstop.model.round import Outcome

__all__ = ["LaunchConfig", "elastic_launch", "launch_agent"]

log = logging.getLogger("ripstop.compat")


class elastic_launch:  # noqa: N801 - torch's name
    """`elastic_launch(config, entrypoint)(*args)` returns what each worker returned, by global rank.

    The entrypoint is a function, or the name of a command with `args` as its arguments.
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
    run = run_config_from_launcher_config(config, entrypoint, args)
    try:
        get_logging_handler(config.event_log_handler)
    except KeyError as error:
        raise ValueError(f"event_log_handler: {error.args[0]}") from None
    for note in run.notes:
        log.warning("%s", note)
    if os.environ.get("TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT"):
        log.warning("TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT has an effect with LocalElasticAgent only")
    metrics.initialize_metrics(metrics.MetricsConfig(config.metrics_cfg))
    name = _name(entrypoint, args)
    server = health_check_server or health_check_from_environment()
    try:
        end, values = run_engine_in_program(run, config, entrypoint, args, name, server)
    finally:
        if server is not None:
            server.stop()
    if end.report is not None:
        failed = end.report.outcome is not Outcome.SUCCEEDED
        metrics.put_run_metrics(
            config.role, failed=failed, restarts=end.report.restarts, max_restarts=config.max_restarts
        )
    _raise_for_failure(end, name)
    return values


def _name(entrypoint: Callable[..., Any] | str, args: Sequence[Any]) -> str:
    """The job's name in torch's errors."""
    if not isinstance(entrypoint, str):
        return str(getattr(entrypoint, "__name__", entrypoint))
    if entrypoint == sys.executable:
        return next((str(arg) for arg in args if not str(arg).startswith("-")), "")
    return entrypoint


def _raise_for_failure(end: ExitAgent, name: str) -> None:
    if end.code >= 128:
        signum = signal.Signals(end.code - 128)
        raise SignalException(f"Process {os.getpid()} got signal: {signum}", sigval=signum)
    if end.report is not None and end.report.outcome is Outcome.SUCCEEDED:
        return
    failures = {failure.rank: _process_failure(failure) for failure in end.report.failures} if end.report else {}
    if failures:
        raise ChildFailedError(name, failures)
    raise RuntimeError(f"{name} did not succeed: {end.why}")


def _process_failure(failure: Failure) -> ProcessFailure:
    exitcode = failure.exitcode if failure.exitcode is not None else 1
    if failure.signal is not None:
        exitcode = -_signal_number(failure.signal)
    torchs = ProcessFailure(failure.local_rank, failure.pid or -1, exitcode, failure.error_file)
    torchs._at, torchs.timestamp = failure.at, int(failure.at)
    if not Path(failure.error_file or ".").is_file():  # on another node, or never written: use the engine's report
        extra = {"py_callstack": failure.traceback, "timestamp": str(int(failure.at))}
        if failure.traceback:
            torchs.message = {"message": failure.message, "extraInfo": extra}
            torchs.error_file_data = {"message": torchs.message}
        elif failure.signal is None or failure.oom:
            torchs.message = failure.message
    return torchs


def _signal_number(name: str) -> int:
    return int(signal.Signals[name]) if name in signal.Signals.__members__ else int(name.removeprefix("SIG"))
