"""Assigns ranks to nodes.  Pure.

Rules: (1) group ranks are exactly 0 … n-1, and so are global ranks and the ranks within a role; (2) a survivor keeps
its group rank if the new size allows it; a replacement for a lost node (the same number, `RankBy.SLOT`) counts as that
survivor; (3) a node that requests a rank then gets it if it is free; (4) the remaining ranks go first to survivors
whose rank no longer exists, then to new nodes, sorted by the job's `RankBy`, equal ones in the order given; (5) nodes
whose numbers are exactly 0 … n-1 get them as ranks (`RankBy.SLOT`), so that a job that ran without a node for a while
has its old ranks again after the replacement.

So `RankBy` sorts all nodes in the first round, and except for rule 5 only new nodes later: a running job needs stable
ranks more than sorted ones.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from ipaddress import ip_address
from itertools import accumulate
from operator import itemgetter
from typing import Any

from ripstop.model.round import Address, Node, Place, RankBy

Candidate = tuple[Node, int | None]  # a node and its last group rank; None: a new node


def order(candidates: Sequence[Candidate], by: RankBy = RankBy.JOIN) -> list[Node]:
    """The nodes in the order of their new group ranks."""
    if by is RankBy.SLOT and (numbered := _ranked_by_own_numbers([node for node, _ in candidates])):
        return numbered
    assigned: list[Node | None] = [None] * len(candidates)  # by rank

    def assign(node: Node, rank: int | None) -> bool:
        """Give the node this rank, if the rank exists and is free."""
        if rank is None or not 0 <= rank < len(assigned) or assigned[rank] is not None:
            return False
        assigned[rank] = node
        return True

    survivors = [(before, node) for node, before in candidates if before is not None]
    displaced = [(before, node) for before, node in survivors if not assign(node, before)]
    displaced.sort(key=itemgetter(0))
    new_nodes = sorted((node for node, before in candidates if before is None), key=_KEYS[by])
    unranked = [*(node for _, node in displaced), *new_nodes]
    rest = iter([node for node in unranked if not assign(node, node.requested_rank)])
    return [node if node is not None else next(rest) for node in assigned]


def _ranked_by_own_numbers(nodes: Sequence[Node]) -> list[Node] | None:
    """The nodes by their numbers, if those are exactly 0 … n-1 (rule 5)."""
    found = sorted(nodes, key=_rank_sort_key_by_number)
    return found if [node.number for node in found] == list(range(len(found))) else None


def denied_ranks(candidates: Sequence[Candidate], nodes: Sequence[Node]) -> Iterator[tuple[str, int, int, str]]:
    """The denied rank requests: node id, requested rank, actual rank, and why.

    A node that keeps its rank is left out: its request was denied in an earlier round.
    """
    before = {node.id: rank for node, rank in candidates}
    for rank, node in enumerate(nodes):
        if node.requested_rank is None or rank in (node.requested_rank, before[node.id]):
            continue
        if not 0 <= node.requested_rank < len(nodes):
            why = f"the ranks of {len(nodes)} nodes are 0 to {len(nodes) - 1}"
        elif before[(holder := nodes[node.requested_rank]).id] == node.requested_rank:
            why = f"node {holder.id} has that rank and keeps it"
        else:
            why = f"node {holder.id} requested it too and comes first"
        yield node.id, node.requested_rank, rank, why


# sort keys of new nodes -----------------------------------------------------------------------------------------------


def _rank_sort_key_by_address(node: Node) -> tuple[int, int, Any]:
    """IPv4 before IPv6 before names, so that neighbours in the network are neighbours in rank."""
    try:
        ip = ip_address(node.host.partition("%")[0])
    except ValueError:
        return 9, 0, _natural_rank_sort_key(node.host)
    return ip.version, int(ip), ()


def _rank_sort_key_by_number(node: Node) -> tuple[bool, int]:
    return node.number is None, node.number or 0


def _natural_rank_sort_key(text: str) -> list[tuple[int, str]]:
    """Sorts rack9 before rack10: digits compare as numbers, without the conversion of a long text to an int."""
    parts = re.findall(r"[0-9]+|[^0-9]+", text)
    return [(len(part.lstrip("0")), part.lstrip("0")) if part[0] in "0123456789" else (-1, part) for part in parts]


_KEYS: dict[RankBy, Callable[[Node], Any]] = {
    RankBy.JOIN: lambda node: 0,
    RankBy.ADDRESS: _rank_sort_key_by_address,
    RankBy.SLOT: _rank_sort_key_by_number,
    RankBy.LABEL: lambda node: _natural_rank_sort_key(node.label),
}


# places ---------------------------------------------------------------------------------------------------------------


def places(
    nodes: Sequence[Node],
    *,
    round: int,
    store: Address,
    restarts: int,
    partners: Sequence[Address | None] | None = None,
) -> list[Place]:
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
            partner=partners[i] if partners else None,
        )
        for i, node in enumerate(nodes)
    ]
