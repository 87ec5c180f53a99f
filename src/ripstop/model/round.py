"""A node, and its place in a round.  Pure data.

A `Place` has all that one node needs for a round.  It does not list the members, so that its size does not grow with
the job.
"""

from enum import StrEnum

from msgspec import Struct

from ripstop.model.field_types import Int64


class Address(Struct, frozen=True, forbid_unknown_fields=True):
    """Host and port of a listening socket."""

    host: str
    port: Int64

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Node(Struct, frozen=True, forbid_unknown_fields=True):
    """One agent of a job.  Every agent process has a new `id`.

    `requested_rank` is the group rank that the user requests (`--node-rank`).  `number` and `label` are set only if
    ranks are sorted by them (`RankBy`): the node's number in its cluster, and the user's label for its location.
    """

    id: str
    host: str
    slots: Int64
    role: str = "default"
    requested_rank: Int64 | None = None
    number: Int64 | None = None
    label: str = ""


class RankBy(StrEnum):
    """Sort key for nodes that have no rank yet."""

    JOIN = "join"  # the order in which they became ready
    ADDRESS = "address"
    SLOT = "slot"  # the node's number in its cluster
    LABEL = "label"


class Place(Struct, frozen=True, forbid_unknown_fields=True):
    """One node's part in one round.

    Its workers have the ranks `first_rank` … `first_rank + slots - 1`, and within their role the ranks from
    `role_first_rank` on.  `restarts` counts the job's restarts so far.  `partner` is where the node listens
    that holds copies of this node's training state; None: the job keeps no such copies.
    """

    round: Int64
    group_rank: Int64
    group_size: Int64
    first_rank: Int64
    world_size: Int64
    slots: Int64
    role_first_rank: Int64
    role_size: Int64
    store: Address
    restarts: Int64
    partner: Address | None = None


class CommitId(Struct, frozen=True, forbid_unknown_fields=True):
    """A commit of a `train.State`: the round in which it was made, and its number."""

    round: Int64
    number: Int64


class Outcome(StrEnum):
    """How a job ended."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"
