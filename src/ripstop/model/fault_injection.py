"""The faults that `ripstop chaos` injects into a running job, their limits, and an agent's reply.  Pure.

`docs/chaos.md` describes each kind.  Every fault but a kill has a duration, after which the agent undoes it.
"""

import signal
from enum import StrEnum
from typing import Annotated

from msgspec import Meta, Struct

INJECT_QUERY = "inject"  # the agents' query that injects a fault; without an argument, it only asks for permission
EXIT_SIGNAL = signal.SIGRTMIN + 12  # forked workers exit at this signal, with its number as exit code
MAX_SECONDS = 600
MAX_PERCENT = 95
MAX_BYTES = 1 << 40


class FaultKind(StrEnum):
    """What is done, and to what."""

    WORKER_KILL = "worker-kill"
    WORKER_SEGV = "worker-segv"
    WORKER_EXIT = "worker-exit"
    WORKER_OOM = "worker-oom"
    WORKER_STOP = "worker-stop"
    WORKER_SLOW = "worker-slow"
    AGENT_KILL = "agent-kill"
    AGENT_STOP = "agent-stop"
    CONNECTION_DROP = "connection-drop"
    DISK_FILL = "disk-fill"

    @property
    def has_rank(self) -> bool:
        """It is done to a worker, otherwise to a node."""
        return self.startswith("worker-")

    @property
    def is_lasting(self) -> bool:
        """The agent undoes it after some seconds."""
        return self in LASTING

    @property
    def is_fatal(self) -> bool:
        """The round cannot go on: only a later one heals it."""
        return self in FATAL


LASTING = frozenset({FaultKind.WORKER_OOM, FaultKind.WORKER_STOP, FaultKind.WORKER_SLOW, FaultKind.AGENT_STOP,
                     FaultKind.DISK_FILL})  # fmt: skip
FATAL = frozenset({FaultKind.WORKER_KILL, FaultKind.WORKER_SEGV, FaultKind.WORKER_EXIT, FaultKind.AGENT_KILL})


class Fault(Struct, frozen=True, forbid_unknown_fields=True):
    """One fault: `rank` is the worker's, -1 for a fault of the node.

    `seconds` is how long a lasting fault lasts, `percent` how much of the time a slow worker is stopped, `bytes` how
    much disk space is taken.
    """

    id: Annotated[str, Meta(max_length=64)]
    kind: FaultKind
    rank: Annotated[int, Meta(ge=-1, lt=2**31)] = -1
    seconds: Annotated[int, Meta(ge=1, le=MAX_SECONDS)] = 10
    percent: Annotated[int, Meta(ge=1, le=MAX_PERCENT)] = 50
    bytes: Annotated[int, Meta(ge=1, le=MAX_BYTES)] = 64 << 20


class Injection(Struct, frozen=True, forbid_unknown_fields=True):
    """An agent's reply: the round in which it injects the fault, or why it does not.

    `refused`: the agent was started without --allow-chaos.  Otherwise `skipped` is why this machine cannot do it.
    """

    round: int = 0
    skipped: str = ""
    refused: bool = False


def describe_fault_injection(kind: str, node: str, rank: int) -> str:
    return kind + (f" of rank {rank}" if rank >= 0 else "") + (f" on node {node}" if node else "")
