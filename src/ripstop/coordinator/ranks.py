"""Who gets which rank.  Pure.

Rules: (1) group ranks are exactly 0 … n-1, and so are global ranks and the ranks within a role; (2) a survivor keeps
its group rank where the new size allows it, and who stands in for a lost node (the same number, `RankBy.SLOT`) counts
as that survivor; (3) who wishes for a rank that is free then gets it; (4) what is still vacant goes first to survivors
whose rank no longer exists, then to newcomers, sorted by what the job's ranks go by (`RankBy`), those that are alike in
the order given; (5) nodes whose numbers are exactly 0 … n-1 have them for ranks (`RankBy.SLOT`), so that a job that did
without one for a while has its old ranks again when that is replaced.

So `RankBy` decides for everybody in a first round, and later, but for (5), for newcomers only: a rank that was given is
worth more to a running job than a tidy order.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from ipaddress import ip_address
from itertools import accumulate
from typing import Any

from ripstop.model.round import Address, Node, Place, RankBy

Candidate = tuple[Node, int | None]  # a node, and its group rank of before; None: a newcomer


def order(candidates: Sequence[Candidate], by: RankBy = RankBy.JOIN) -> list[Node]:
    """The nodes in the order of their new group ranks."""
    if by is RankBy.SLOT and (numbered := _numbered([node for node, _ in candidates])):
        return numbered
    seats: list[Node | None] = [None] * len(candidates)
    survivors: list[tuple[int, Node]] = []  # whose rank is gone
    newcomers: list[Node] = []
    for node, before in candidates:
        if before is None:
            newcomers.append(node)
        elif before < len(seats) and seats[before] is None:
            seats[before] = node
        else:
            survivors.append((before, node))
    homeless = [node for _, node in sorted(survivors, key=lambda survivor: survivor[0])]
    waiting: list[Node] = []
    for node in [*homeless, *sorted(newcomers, key=_KEYS[by])]:
        if (
            node.requested_rank is not None
            and 0 <= node.requested_rank < len(seats)
            and seats[node.requested_rank] is None
        ):
            seats[node.requested_rank] = node
        else:
            waiting.append(node)
    rest = iter(waiting)
    return [seat if seat is not None else next(rest) for seat in seats]


def _numbered(nodes: Sequence[Node]) -> list[Node] | None:
    """The nodes by their numbers, if those are ranks; see (5)."""
    found = sorted(nodes, key=_by_number)
    return found if [node.number for node in found] == list(range(len(found))) else None


def denied(candidates: Sequence[Candidate], nodes: Sequence[Node]) -> Iterator[tuple[str, int, int, str]]:
    """Whose wish was not granted: its id, the rank it wished for, the rank it has instead, and why.

    Once for a rank: who keeps the one that it has was told before.
    """
    before = {node.id: rank for node, rank in candidates}
    for rank, node in enumerate(nodes):
        if node.requested_rank is None or rank in (node.requested_rank, before[node.id]):
            continue
        if not 0 <= node.requested_rank < len(nodes):
            why = f"the ranks of {len(nodes)} nodes are 0 to {len(nodes) - 1}"
        elif before[(holder := nodes[node.requested_rank]).id] == node.requested_rank:
            why = f"node {holder.id} has that and keeps it"
        else:
            why = f"node {holder.id} wished for it too, and comes first"
        yield node.id, node.requested_rank, rank, why


# what newcomers are sorted by -----------------------------------------------------------------------------------------


def _by_address(node: Node) -> tuple[int, int, Any]:
    """IPv4 before IPv6 before names, so that neighbours in the network are neighbours in rank."""
    try:
        ip = ip_address(node.host.partition("%")[0])
    except ValueError:
        return 9, 0, _natural(node.host)
    return ip.version, int(ip), ()


def _by_number(node: Node) -> tuple[bool, int]:
    return node.number is None, node.number or 0


def _natural(text: str) -> list[tuple[int, str]]:
    """So that rack9 comes before rack10: digits count as the number they are, without making one of a long text."""
    parts = re.findall(r"[0-9]+|[^0-9]+", text)
    return [(len(part.lstrip("0")), part.lstrip("0")) if part[0] in "0123456789" else (-1, part) for part in parts]


_KEYS: dict[RankBy, Callable[[Node], Any]] = {
    RankBy.JOIN: lambda node: 0,
    RankBy.ADDRESS: _by_address,
    RankBy.SLOT: _by_number,
    RankBy.LABEL: lambda node: _natural(node.label),
}


# places ---------------------------------------------------------------------------------------------------------------


def places(nodes: Sequence[Node], *, round: int, store: Address, restarts: int) -> list[Place]:
    """The place of each node, given in group-rank order."""
    firsts = [0, *accumulate(node.slots for node in nodes)]
    in_role: dict[str, int] = {}
    role_firsts = []
    for node in nodes:
        role_firsts.append(in_role.get(node.role, 0))
        in_role[node.role] = role_firsts[-1] + node.slots
    return [
        Place(
            round=round,
            group_rank=i,
            group_size=len(nodes),
            first_rank=firsts[i],
            world_size=firsts[-1],
            slots=node.slots,
            role_first_rank=role_firsts[i],
            role_size=in_role[node.role],
            store=store,
            restarts=restarts,
        )
        for i, node in enumerate(nodes)
    ]
