"""`torch.distributed.elastic.multiprocessing` and its `.api`: start n processes of a function or a command, and wait.

A synchronous API for one group of workers, without rendezvous and without restarts.  `context` supervises groups, and
has the class for commands; `function_context` has the one for functions.  `logs_specs` and `tail_log` are about the
workers' output, and `errors` about their failures.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ripstop.compat.multiprocessing.context import (
    PContext,
    RunProcsResult,
    SignalException,
    SubprocessContext,
    validate_context_ranks,
)
from ripstop.compat.multiprocessing.errors import ProcessFailure
from ripstop.compat.multiprocessing.function_context import MultiprocessContext
from ripstop.compat.multiprocessing.logs_specs import DefaultLogsSpecs, LogsDest, LogsSpecs, Std, get_std_cm, to_map
from ripstop.compat.multiprocessing.subprocess_handler import SubprocessHandler, get_subprocess_handler
from ripstop.compat.multiprocessing.tail_log import TailLog

__all__ = [
    "DefaultLogsSpecs",
    "LogsDest",
    "LogsSpecs",
    "MultiprocessContext",
    "PContext",
    "ProcessFailure",
    "RunProcsResult",
    "SignalException",
    "Std",
    "SubprocessContext",
    "SubprocessHandler",
    "TailLog",
    "get_std_cm",
    "get_subprocess_handler",
    "start_processes",
    "to_map",
]


def start_processes(
    name: str,
    entrypoint: Callable[..., Any] | str,
    args: dict[int, tuple[Any, ...]],
    envs: dict[int, dict[str, str]],
    logs_specs: LogsSpecs,
    log_line_prefixes: dict[int, str] | None = None,
    start_method: str = "spawn",
    numa_options: Any = None,
    duplicate_stdout_filters: list[str] | None = None,
    duplicate_stderr_filters: list[str] | None = None,
) -> PContext:
    """Start one process for every entry of `args` and `envs`, whose keys are the local ranks.

    A string as `entrypoint` is a command, and its arguments are converted to strings; otherwise it is a function, which
    `start_method` starts.  `name` is in the prefix of lines on the console.  Lines of tee'd streams that contain one of
    the `duplicate_…_filters` are also copied to one file for all ranks.
    """
    validate_context_ranks(args, len(args), "args")
    validate_context_ranks(envs, len(args), "envs")
    filters = duplicate_stdout_filters, duplicate_stderr_filters
    context: PContext
    if isinstance(entrypoint, str):
        context = SubprocessContext(name, entrypoint, args, envs, logs_specs, log_line_prefixes, numa_options, *filters)
    else:
        context = MultiprocessContext(
            name, entrypoint, args, envs, start_method, logs_specs, log_line_prefixes, numa_options, *filters
        )
    try:
        context.start()
    except BaseException:
        context.close()
        raise
    return context
