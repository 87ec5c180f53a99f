"""What one node is doing at the moment it was asked: its workers and its GPUs, in numbers.  Pure data.

None is what is not known there.  Times are in seconds, sizes in bytes.
"""

from msgspec import Struct


class RankSample(Struct, frozen=True):
    """One worker with all processes of its session; `age` is the time since it last reported progress."""

    rank: int
    cpu: float
    memory: int
    threads: int
    processes: int
    log_bytes: int
    step: int | None = None
    steps_per_second: float | None = None
    age: float | None = None
    beats: int | None = None


class StepSample(Struct, frozen=True):
    """The step that one worker of this round had reported last, at this time of its node's clock."""

    round: int
    step: int
    at: float


class GpuSample(Struct, frozen=True):
    """One GPU; `utilisation` is a share of 1."""

    index: int
    utilisation: float | None = None
    memory_used: int | None = None
    memory_total: int | None = None
    temperature: int | None = None
    power: float | None = None
    ecc_corrected: int | None = None
    ecc_uncorrected: int | None = None


class NodeSample(Struct, frozen=True):
    """One node, at this time of its clock; `round` is that of its workers, 0 when it has none."""

    at: float
    round: int
    cpu: float  # of the agent itself
    memory: int
    ranks: tuple[RankSample, ...] = ()
    gpus: tuple[GpuSample, ...] = ()
