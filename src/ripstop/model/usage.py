"""Resource usage of one node: its workers and its GPUs.  Pure data.

None means unknown.  Times are in seconds, sizes in bytes.
"""

from msgspec import Struct

from ripstop.model.field_types import Int64, Items

MAX_ARRIVALS = 8  # of a StepProfile


class StepProfile(Struct, frozen=True, forbid_unknown_fields=True):
    """Where the time of a worker's steps goes (`train/step_profile.py`): the latest of `count` profiles.

    `period` is the time of a step.  `arrivals` are the times from its start until the worker entered some of its
    collectives.  `waiting` is the time that collectives took on the GPU.
    """

    count: Int64
    period: float
    arrivals: Items[float]
    waiting: float | None = None


class RankSample(Struct, frozen=True, forbid_unknown_fields=True):
    """One worker with all processes of its session.

    `age` is the time since its last heartbeat, `step_age` since it reported its step, `commit_age` since the last
    commit of its State, of `commit_bytes`.  Its `commits` in this round took `commit_stall` of its training loop.
    """

    rank: Int64
    cpu: float
    memory: Int64
    threads: Int64
    processes: Int64
    log_bytes: Int64
    step: Int64 | None = None
    steps_per_second: float | None = None
    age: float | None = None
    beats: Int64 | None = None
    step_age: float | None = None
    commits: Int64 | None = None
    commit_age: float | None = None
    commit_bytes: Int64 | None = None
    commit_stall: float | None = None
    profile: StepProfile | None = None


class StepSample(Struct, frozen=True, forbid_unknown_fields=True):
    """The latest step that a worker of this round reported, and when, by its node's clock; the age of its commit."""

    round: Int64
    step: Int64
    at: float
    commit_age: float | None = None


class GpuSample(Struct, frozen=True, forbid_unknown_fields=True):
    """One GPU; `utilisation` is a fraction of 1, clocks of its multiprocessors are in MHz.

    `throttled` has the reasons for which the driver lowers the clock now, such as heat.
    """

    index: Int64
    utilisation: float | None = None
    memory_used: Int64 | None = None
    memory_total: Int64 | None = None
    temperature: Int64 | None = None
    power: float | None = None
    ecc_corrected: Int64 | None = None
    ecc_uncorrected: Int64 | None = None
    clock: Int64 | None = None
    clock_max: Int64 | None = None
    throttled: Items[str] = ()


class StandbySample(Struct, frozen=True, forbid_unknown_fields=True):
    """One standby that is ready; `memory` is what only this process uses.

    `until`: it waits before the `script`, or before its `elastic` function.
    """

    local_rank: Int64
    memory: Int64
    gpu_memory: Int64
    until: str = "script"


class NodeSample(Struct, frozen=True, forbid_unknown_fields=True):
    """One node at the time `at` of its own clock; `round` is the round of its workers, or 0."""

    at: float
    round: Int64
    cpu: float  # of the agent itself
    memory: Int64
    ranks: Items[RankSample] = ()
    gpus: Items[GpuSample] = ()
    standbys: Items[StandbySample] = ()
    load: float | None = None  # processes that run or wait, per CPU, in the last minute
    steal: float | None = None  # seconds of CPU time since the start that the hypervisor gave to others, per CPU
