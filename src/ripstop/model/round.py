"""The words both sides of the house share: who a node is, and its place in a round.

Pure data.  A `Place` is all that one node needs to know of a round, so the size of what the coordinator sends to a
node does not grow with the job.
"""

from enum import StrEnum

from msgspec import Struct


class Address(Struct, frozen=True):
    """Where something listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Node(Struct, frozen=True):
    """One agent of a job; `id` is new for every agent process, `wish` is the group rank it would like.

    `number` is what its cluster counts it as, `label` what its user calls the place where it stands: only set where
    ranks go by them (`RankBy`).
    """

    id: str
    host: str
    slots: int
    role: str = "default"
    wish: int | None = None
    number: int | None = None
    label: str = ""


class RankBy(StrEnum):
    """What the nodes that have no rank yet are sorted by."""

    JOIN = "join"  # who was ready first
    ADDRESS = "address"
    SLOT = "slot"  # the node's number in its cluster
    LABEL = "label"


class Place(Struct, frozen=True):
    """What one node is in one round.

    Its workers have the ranks `first_rank` … `first_rank + slots - 1`, and within their role the ranks from
    `role_first_rank` on.  `restarts` counts the failures healed so far in the whole job.
    """

    round: int
    group_rank: int
    group_size: int
    first_rank: int
    world_size: int
    slots: int
    role_first_rank: int
    role_size: int
    store: Address
    restarts: int


class Outcome(StrEnum):
    """How a job ended."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"
