"""The data classes of torch's agent: `WorkerSpec` and `WorkerGroup` (what it runs), `RunResult` (how that ended)."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from ripstop.compat.multiprocessing import ProcessFailure

DEFAULT_ROLE = "default"


@dataclass
class WorkerSpec:
    """The workers of one role; the names, their order and their defaults are torch's."""

    role: str
    local_world_size: int
    rdzv_handler: Any
    fn: Callable[..., Any] | None = None
    entrypoint: Callable[..., Any] | str | None = None
    args: tuple[Any, ...] = ()
    max_restarts: int = 3
    monitor_interval: float = 0.1
    master_port: int | None = None
    master_addr: str | None = None
    local_addr: str | None = None
    event_log_handler: str = "null"
    numa_options: Any = None
    duplicate_stdout_filters: list[str] | None = None
    duplicate_stderr_filters: list[str] | None = None
    virtual_local_rank: bool = False

    def __post_init__(self) -> None:
        if self.local_world_size <= 0:
            raise AssertionError(f"local_world_size={self.local_world_size}: a node has workers; give 1 or more")
        if self.monitor_interval <= 0:
            raise AssertionError(f"monitor_interval={self.monitor_interval}: a time is above 0; give seconds")
        if self.fn:
            warnings.warn("WorkerSpec.fn is deprecated; give the function as entrypoint", DeprecationWarning, 2)
            self.entrypoint = self.fn
        if not self.entrypoint:
            raise AssertionError("a WorkerSpec has no entrypoint; give a function, or a command's name")

    def get_entrypoint_name(self) -> str:
        """The function's qualified name, or the command's file name."""
        if isinstance(self.entrypoint, str):
            return Path(self.entrypoint).name
        return str(getattr(self.entrypoint, "__qualname__", self.entrypoint))


@dataclass(slots=True, repr=False, eq=False)
class Worker:
    """One worker; the agent that starts it sets `id`, a local agent to the pid."""

    local_rank: int
    global_rank: int = -1
    role_rank: int = -1
    world_size: int = -1
    role_world_size: int = -1
    id: Any = field(default=None, init=False)

    def __repr__(self) -> str:
        names = ("local_rank", "global_rank", "role_rank", "world_size", "role_world_size")
        return ",".join(f"{name}={getattr(self, name)}" for name in names)


class WorkerState(str, Enum):  # noqa: UP042 - torch's is a str and an Enum, and prints as one
    """The state of a whole `WorkerGroup`: its workers run and stop together."""

    UNKNOWN = "UNKNOWN"  # cannot be recovered
    INIT = "INIT"  # not started
    HEALTHY = "HEALTHY"  # running
    UNHEALTHY = "UNHEALTHY"  # running with an error
    STOPPED = "STOPPED"  # stopped by the agent, for a restart
    SUCCEEDED = "SUCCEEDED"  # all exited 0
    FAILED = "FAILED"  # one failed

    @staticmethod
    def is_running(state: WorkerState) -> bool:
        """Whether there are processes, healthy or not."""
        return state in {WorkerState.HEALTHY, WorkerState.UNHEALTHY}


class WorkerGroup:
    """The workers of a spec on this node; ranks and store are None before the first rendezvous."""

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec
        self.workers = [Worker(local_rank=rank) for rank in range(spec.local_world_size)]
        self.store: Any = None
        self.group_rank: int | None = None
        self.group_world_size: int | None = None
        self.master_addr: str | None = None
        self.master_port: int | None = None
        self.state = WorkerState.INIT


@dataclass
class RunResult:
    """Results of this node's workers, by global rank: return values if all succeeded, otherwise the failures."""

    state: WorkerState
    return_values: dict[int, Any] = field(default_factory=dict)
    failures: dict[int, ProcessFailure] = field(default_factory=dict)

    def is_failed(self) -> bool:
        return self.state == WorkerState.FAILED
