"""The one configuration, frozen, and its only reader of the environment.

Flags, environment variables and API calls become a `RunConfig` here; nobody else reads settings.  What the words mean
to a user is in `cli/run.py`; this module holds the values and the rules between them.
"""

from dataclasses import dataclass, field
from enum import Enum, IntFlag
from pathlib import Path

from ripstop.round import Address


@dataclass(frozen=True, slots=True)
class Script:
    """`python -u path args…`."""

    path: str
    args: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Module:
    """`python -u -m name args…`."""

    name: str
    args: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Command:
    """Any program: `argv[0]` is looked up on PATH."""

    argv: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Function:
    """A pickled `(callable, args)` in the file `call`; the pickled return value goes to the file `result`."""

    call: Path
    result: Path


Entry = Script | Module | Command | Function


class Start(Enum):
    """How workers come to life."""

    ZYGOTE = "zygote"  # forked from a process that has imported what they need
    EXEC = "exec"  # a new interpreter each


class Streams(IntFlag):
    """Which of a worker's output streams; the numbers are torchrun's."""

    NONE = 0
    OUT = 1
    ERR = 2
    ALL = 3


@dataclass(frozen=True, slots=True)
class StreamMap:
    """A choice of streams for every local rank, with exceptions."""

    default: Streams = Streams.NONE
    by_rank: tuple[tuple[int, Streams], ...] = ()

    def of(self, local_rank: int) -> Streams:
        return dict(self.by_rank).get(local_rank, self.default)


@dataclass(frozen=True, slots=True)
class Logs:
    """Where workers' output goes.  `directory` None: a new one below the system's temporary directory."""

    directory: Path | None = None
    redirects: StreamMap = field(default_factory=StreamMap)
    tee: StreamMap = field(default_factory=StreamMap)


@dataclass(frozen=True, slots=True)
class Budget:
    """How many failures are healed: `max_restarts` in any `window` seconds (0: in the whole run).

    `backoff` is the longest pause before a restart when rounds keep dying young; 0 restarts at once, always.
    """

    max_restarts: int = 0
    window: float = 0.0
    backoff: float = 30.0


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds the rendezvous waits, for what."""

    settle: float = 2.0  # for more nodes, once the minimum is ready
    join: float = 600.0  # for the minimum, and at first for the coordinator
    lease: float = 3.0  # for a word from a silent peer
    coordinator: float = 600.0  # for a coordinator that has gone away
    shutdown: float = 30.0  # for workers to stop by themselves after SIGTERM


class Backend(Enum):
    """Where the coordinator is."""

    LOCAL = "local"  # in this process and for this node alone
    COORDINATOR = "c10d"  # at the endpoint, in whichever agent could bind it
    STATIC = "static"  # the same, with ranks and node count fixed by the user


@dataclass(frozen=True, slots=True)
class RunConfig:
    """All of `ripstop run`."""

    entry: Entry
    run_id: str
    min_nodes: int = 1
    max_nodes: int = 1
    slots: int = 1
    role: str = "default"
    backend: Backend = Backend.LOCAL
    endpoint: Address | None = None
    is_host: bool | None = None  # None: whoever can bind the endpoint
    local_addr: str | None = None
    node_rank: int | None = None
    store_port: int = 0  # 0: a new free port every round
    budget: Budget = field(default_factory=Budget)
    timing: Timing = field(default_factory=Timing)
    start: Start = Start.ZYGOTE
    preload: tuple[str, ...] | None = None  # None: what the script imports
    logs: Logs = field(default_factory=Logs)
    token: str = field(default="", repr=False)
    notes: tuple[str, ...] = ()  # said once at the start: what was assumed, what has no effect
