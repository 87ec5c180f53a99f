"""The configuration of a run.

Flags, environment variables and API calls become one frozen `RunConfig`; no other code reads settings.  `parsers.py`
and `rendezvous_conf.py` parse the values; `cli/commands/run.py` and `cli/options/` define the flags.
"""

from enum import Enum, IntFlag
from pathlib import Path

from msgspec import Struct, field

from ripstop.model.round import Address, RankBy

COORDINATOR_PORT = 29400
API_PORT = 29480
ETCD_PORT = 2379
ETCD_PREFIX = "/ripstop"
MASTER_PORT = 29500
MAX_NODES = 100_000
MAX_SLOTS = 4_096
DRAIN_TIMEOUT_S = 20.0


SECRET_FIELDS = frozenset({"notify_url", "password", "token"})


class Redacted(Struct, frozen=True):
    """A record whose repr leaves out `SECRET_FIELDS`, so that no log line or traceback shows them."""

    def __repr__(self) -> str:
        shown = (f"{name}={getattr(self, name)!r}" for name in self.__struct_fields__ if name not in SECRET_FIELDS)
        return f"{type(self).__name__}({', '.join(shown)})"


class Script(Struct, frozen=True):
    """`python -u path args…`."""

    path: str
    args: tuple[str, ...] = ()


class Module(Struct, frozen=True):
    """`python -u -m name args…`."""

    name: str
    args: tuple[str, ...] = ()


class Executable(Struct, frozen=True):
    """Any program: `argv[0]` is looked up on PATH."""

    argv: tuple[str, ...]


Entrypoint = Script | Module | Executable


class StartMethod(Enum):
    """How workers are started."""

    ZYGOTE = "zygote"  # forked from a process that has imported their modules
    EXEC = "exec"  # a new interpreter for each worker


class OutputStreams(IntFlag):
    """A choice of a worker's output streams; the numbers are torchrun's."""

    NONE = 0
    OUT = 1
    ERR = 2
    ALL = 3


class ConfiguredStreams(Struct, frozen=True):
    """A choice of streams for all local ranks, with exceptions."""

    default: OutputStreams = OutputStreams.NONE
    by_rank: tuple[tuple[int, OutputStreams], ...] = ()

    def of(self, local_rank: int) -> OutputStreams:
        return dict(self.by_rank).get(local_rank, self.default)


class Logs(Struct, frozen=True):
    """Where workers' output goes.  `directory` None: a new one below the system's temporary directory.

    A console line that contains one of the stream's `*_filters` is also written to a file of such lines.
    """

    directory: Path | None = None
    redirects: ConfiguredStreams = field(default_factory=ConfiguredStreams)
    tee: ConfiguredStreams = field(default_factory=ConfiguredStreams)
    shown: frozenset[int] | None = None  # local ranks whose output goes to the console; None: all
    stdout_filters: tuple[str, ...] = ()
    stderr_filters: tuple[str, ...] = ()
    prefix: str = "[${role_name}${local_rank}]:"  # of each line on the console
    specs: str = ""  # the plugin that chooses the files; "": none
    kept: bool = True  # False: the files are removed at the end of the job


class LogFormat(Enum):
    """The form of ripstop's own lines on stderr."""

    TEXT = "text"
    JSON = "json"  # one object a line


class LogLevel(Enum):
    """The least severe of ripstop's own lines that are written."""

    DEBUG = "debug"  # every event
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class OwnLog(Struct, frozen=True):
    """ripstop's own lines on stderr.  `live`: at a terminal, a line that is updated in place shows what is awaited."""

    level: LogLevel = LogLevel.INFO
    format: LogFormat = LogFormat.TEXT
    live: bool = True


class Budget(Struct, frozen=True):
    """The restart budget: `max_restarts` failures in any `window` seconds (0: in the whole run).

    `backoff` is the longest pause before a restart when rounds fail soon after their start; 0: no pause.  Hangs have
    their own budget: `max_infra_restarts` in any `infra_window` seconds.
    """

    max_restarts: int = 0
    window: float = 0.0
    backoff: float = 30.0
    max_infra_restarts: int = 3
    infra_window: float = 3600.0


class Timing(Struct, frozen=True):
    """Timeouts in seconds."""

    last_call: float = 30.0  # wait for more nodes before the first round, once the minimum is ready
    join: float = 600.0  # wait for the minimum of nodes, and for the first connection to the coordinator
    lease: float = 3.0  # without a message from a peer, after which it is lost
    coordinator: float = 600.0  # wait for a lost coordinator to return
    shutdown: float = 30.0  # between SIGTERM and SIGKILL for workers
    inprocess: float = 5.0  # for a worker to leave its round and go on in place, before it is replaced; 0: none does


class HealthLimits(Struct, frozen=True):
    """When this node is healthy.  It is checked before it joins, and then every `interval` seconds.

    `command` is the user's own check, with `interval` as its timeout; empty: none.  A limit of 0 disables its check.
    """

    command: tuple[str, ...] = ()
    interval: float = 30.0
    min_disk: int = 32 << 20  # bytes free where logs and temporary files go
    max_skew: float = 60.0  # seconds between this node's clock and the coordinator's, when it joins


class Checkpoints(Struct, frozen=True):
    """Commits of `ripstop.train.State` on disk: one every `interval` seconds, of which the newest `keep` stay."""

    directory: Path
    interval: float = 600.0
    keep: int = 2


class QuarantineLimits(Struct, frozen=True):
    """A node that caused `failures` failures in `window` seconds is quarantined for `cooldown`; 0 failures: never."""

    failures: int = 3
    window: float = 600.0
    cooldown: float = 600.0


class StragglerMode(Enum):
    """What happens when the other ranks wait for a slow one."""

    OFF = "off"
    REPORT = "report"
    REPLACE = "replace"  # a spare takes the place of its node, if one is ready


class StragglerLimits(Struct, frozen=True):
    """A rank is a straggler if steps take `factor` times as long as without it, for `seconds`."""

    mode: StragglerMode = StragglerMode.REPORT
    factor: float = 1.5
    seconds: float = 120.0


class Tls(Struct, frozen=True):
    """PEM files.  `cert` and `key` are this node's own; `ca` verifies its peers (None: the system's authorities).

    A coordinator with a `ca` requires every agent to have a certificate that it signed.
    """

    cert: Path | None = None
    key: Path | None = None
    ca: Path | None = None


class Tracing(Struct, frozen=True):
    """The collector of the job's spans, for log lines; OpenTelemetry's SDK reads its own variables.

    `parent` has the ids of the trace and of the span that contain the job, in hexadecimal digits.
    """

    endpoint: str
    parent: tuple[str, str] | None = None


class Backend(Enum):
    """Where the coordinator runs."""

    LOCAL = "local"  # in this process, for this node only
    COORDINATOR = "c10d"  # in the agent that could bind the endpoint
    STATIC = "static"  # the same, with ranks and node count fixed by the user
    ETCD = "etcd"  # in the agent that etcd elected
    HANDLER = "handler"  # nowhere: another package's rendezvous handler is used


class Etcd(Redacted, frozen=True):
    """How to reach the etcd that elects the coordinator; a job's keys are below `PREFIX/RUN_ID/`.

    `ca` None: the system's authorities.  `cert` and `key` are this client's own, for an etcd that requires them.
    `port` is where this node listens if it is elected; 0: any free port.
    """

    endpoints: tuple[Address, ...]
    prefix: str
    tls: bool = False
    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    user: str = ""
    password: str = ""
    port: int = 0


class Handler(Struct, frozen=True):
    """A torch rendezvous handler: the name of its entry point, and its parameters."""

    name: str
    endpoint: str = ""
    conf: tuple[tuple[str, str], ...] = ()


class UserKey(Struct, frozen=True):
    """A file with a key that only this user can read, on all nodes; the job's secret is derived from it.

    `context` tells jobs apart.  The node that `is_creator` makes the file if there is none.
    """

    path: Path
    context: str
    is_creator: bool


STOP_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")  # stop the agent by default


class Numa(Enum):
    """Which CPUs a worker is bound to, near the GPU whose index is the worker's local rank."""

    NODE = "node"  # all of the GPU's NUMA node
    SOCKET = "socket"  # all of the GPU's socket
    EXCLUSIVE = "exclusive"  # cores of the GPU's node that no other worker has
    CORE_COMPLEX = "core-complex"  # cores of the node that share a last-level cache


class Binding(Struct, frozen=True):
    """CPUs of one worker, and its preferred NUMA node for memory (None: any)."""

    cpus: tuple[int, ...]
    memory: int | None = None


class StandbyUntil(Enum):
    """Where a standby waits to become a worker.

    SCRIPT: a standby that waits before the script.  ELASTIC: a run-ahead standby, which has run the script up to its
    function with `train.elastic`.  Meanwhile it shadows a worker: it has the variables of that worker's place.
    """

    SCRIPT = "script"
    ELASTIC = "elastic"


class Standby(Struct, frozen=True):
    """Standby workers of local ranks 0 to `count` - 1.

    With `auto`, none is made where too little GPU memory is free.  `warm_up` is the user's `package.module:function`,
    called with the local rank after the built-in warm-up; "": none.
    """

    count: int = 0
    auto: bool = False
    warm_up: str = ""
    until: StandbyUntil = StandbyUntil.SCRIPT


class RunConfig(Redacted, frozen=True):
    """Configuration of `ripstop run`."""

    entry: Entrypoint
    run_id: str
    min_nodes: int = 1
    max_nodes: int = 1
    target: int | None = None  # initial number of nodes; None: the maximum
    slots: int = 1
    role: str = "default"
    backend: Backend = Backend.LOCAL
    endpoint: Address | None = None
    successors: tuple[Address, ...] = ()  # addresses of a job that elects its coordinator itself; empty: it does not
    etcd: Etcd | None = None
    handler: Handler | None = None
    is_host: bool | None = None  # None: the agent that can bind the endpoint
    local_addr: str | None = None
    node_rank: int | None = None
    rank_by: RankBy = RankBy.JOIN
    node_number: int | None = None  # with rank_by=slot
    node_label: str = ""  # with rank_by=label
    store_port: int = 0  # 0: a free port, new for every round
    budget: Budget = field(default_factory=Budget)
    timing: Timing = field(default_factory=Timing)
    health: HealthLimits = field(default_factory=HealthLimits)
    quarantine: QuarantineLimits = field(default_factory=QuarantineLimits)
    replicates: bool = True  # copies of training state are kept on other nodes
    replication_bandwidth: int = 0  # bytes per second; 0: no limit
    checkpoints: Checkpoints | None = None  # None: no commit is saved to disk
    hang_timeout: float = 0.0  # seconds without progress after which a worker hangs; 0: never
    start: StartMethod = StartMethod.ZYGOTE
    preload: tuple[str, ...] | None = None  # None: the modules that the script imports
    standby: Standby = field(default_factory=Standby)
    logs: Logs = field(default_factory=Logs)
    own_log: OwnLog = field(default_factory=OwnLog)
    bindings: tuple[Binding, ...] = ()  # one for each local rank, or empty
    virtual_local_rank: bool = False  # every worker is local rank 0 and sees only its own GPU
    signals: tuple[str, ...] = STOP_SIGNALS
    event_handler: str = ""  # a torch event handler; "": none
    timer_pipe: Path | None = None  # on which workers set timers; None: no timers
    tracing: Tracing | None = None  # None: no spans
    notify_url: str = ""  # webhook for messages about the job; "": none
    token: str = ""
    user_key: UserKey | None = None  # None: `token` is the job's secret
    earlier_restarts: int = 0  # of this job, before this run of it: how often the cluster requeued it
    tls: Tls | None = None
    api: Address | None = None  # address of the HTTP API of a job on one node; None: no network API
    probe_port: int | None = None  # port of the health probes; None: no probes
    termination_log: Path | None = None  # file for this agent's termination message
    stragglers: StragglerLimits = field(default_factory=StragglerLimits)
    drain_timeout: float = DRAIN_TIMEOUT_S  # for a commit of all ranks before a node leaves; 0: it does not wait
    preemption_notice: str = ""  # a file or URL that says that this machine will be preempted; "": none
    allow_chaos: bool = False  # operators may inject faults into this node
    linger: bool = False  # stay after the end of the job, until a signal
    notes: tuple[str, ...] = ()  # logged once at the start: assumptions, flags without effect


class CoordinatorConfig(Redacted, frozen=True):
    """Configuration of `ripstop coordinator`: a coordinator without workers."""

    run_id: str
    endpoint: Address
    min_nodes: int = 1
    max_nodes: int = 1
    target: int | None = None
    rank_by: RankBy = RankBy.JOIN
    budget: Budget = field(default_factory=Budget)
    timing: Timing = field(default_factory=Timing)
    quarantine: QuarantineLimits = field(default_factory=QuarantineLimits)
    stragglers: StragglerLimits = field(default_factory=StragglerLimits)
    allow_chaos: bool = False
    log_dir: Path | None = None  # for the job's event file; None: no file
    own_log: OwnLog = field(default_factory=OwnLog)
    tracing: Tracing | None = None
    notify_url: str = ""
    token: str = ""
    tls: Tls | None = None
    notes: tuple[str, ...] = ()
