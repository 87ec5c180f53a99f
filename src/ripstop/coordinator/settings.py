"""What a job was started with, as far as its coordinator decides by it.  Pure data."""

from msgspec import Struct, field

from ripstop.model.config import Budget, QuarantineLimits, Timing
from ripstop.model.round import RankBy


class JobSettings(Struct, frozen=True):
    """What the job was started with.

    `own` is the node in the coordinator's own process; it needs no lease.  `target` is how many nodes the job is to
    have until an operator says otherwise; None: as many as it can.
    """

    run_id: str
    min_nodes: int
    max_nodes: int
    timing: Timing = field(default_factory=Timing)
    budget: Budget = field(default_factory=Budget)
    fixed_ranks: bool = False
    own: str = ""
    rank_by: RankBy = RankBy.JOIN
    quarantine: QuarantineLimits = field(default_factory=QuarantineLimits)
    target: int | None = None
