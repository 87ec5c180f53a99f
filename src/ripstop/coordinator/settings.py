"""The settings of a job that its coordinator needs.  Pure data."""

from msgspec import Struct, field

from ripstop.model.config import Budget, QuarantineLimits, Timing
from ripstop.model.round import RankBy


class JobSettings(Struct, frozen=True):
    """`own` is the node in the coordinator's process; it needs no lease.

    `target` is the number of nodes that the job uses until an operator scales it; None: as many as possible.
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
