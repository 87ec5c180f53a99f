"""`torch.distributed.elastic.utils`, its `.api`, `.logging`, `.log_level` and `.process_state`: helpers without torch.

`store` works on c10d stores, `data` iterates over datasets after a restart.
"""

import os
import socket
import sys
from collections.abc import Sequence
from contextlib import closing, suppress
from logging import Logger, getLogger  # not the module: torch has a submodule of this name
from string import Template
from typing import Any

from ripstop.system import linux

__all__ = [
    "get_env_variable_or_raise",
    "get_free_port",
    "get_log_level",
    "get_logger",
    "get_socket_with_port",
    "is_uninterruptible_state",
    "macros",
    "read_proc_state",
]


def get_env_variable_or_raise(env_name: str) -> str:
    """The variable's value; ValueError if it is not set."""
    if (value := os.environ.get(env_name)) is None:
        raise ValueError(f"the environment variable {env_name} is needed and is not set; export it first")
    return value


def get_socket_with_port() -> socket.socket:
    """A socket that listens on a free port of localhost; the port is reserved until the socket is closed."""
    errors = []
    for family, _, _, _, address in socket.getaddrinfo("localhost", 0, type=socket.SOCK_STREAM):
        try:
            return socket.create_server(address, family=family, backlog=0)
        except OSError as error:
            errors.append(str(error))
    raise RuntimeError(
        f"no address of localhost gives a port ({'; '.join(errors)}); check that localhost resolves to 127.0.0.1 or ::1"
    )


def get_free_port() -> int:
    """A port of localhost that was free; `get_socket_with_port` reserves it."""
    with closing(get_socket_with_port()) as taken:
        return int(taken.getsockname()[1])


class macros:  # noqa: N801 (torch's name)
    """Placeholders in the arguments of workers."""

    local_rank = "${local_rank}"

    @staticmethod
    def substitute(args: Sequence[Any], local_rank: str) -> list[Any]:
        """Replace the placeholder in every string; other `$` patterns do not change."""
        values = {"local_rank": local_rank}
        return [Template(arg).safe_substitute(values) if isinstance(arg, str) else arg for arg in args]


def get_log_level() -> str:
    """The level of loggers if LOGLEVEL is not set."""
    return "WARNING"


def get_logger(name: str | None = None) -> Logger:
    """A logger with this name, or the calling module's, at the level in LOGLEVEL."""
    logger = getLogger(name or sys._getframe(1).f_globals.get("__name__"))
    level = os.environ.get("LOGLEVEL") or get_log_level()
    with suppress(ValueError):
        level = int(level)  # type: ignore[assignment]
    try:
        logger.setLevel(level)
    except ValueError:
        raise ValueError(
            f"LOGLEVEL={level} is not a level; set it to DEBUG, INFO, WARNING, ERROR or CRITICAL"
        ) from None
    return logger


def read_proc_state(pid: int) -> str | None:
    """The letter of the process's state (R, S, D, Z …); None if there is no such process."""
    process = linux.read_linux_process(pid)
    return process.state if process is not None else None


def is_uninterruptible_state(state: str | None) -> bool:
    """Whether the process is in uninterruptible sleep."""
    return state is not None and state.startswith("D")
