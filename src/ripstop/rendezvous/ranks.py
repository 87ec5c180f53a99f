"""Who gets which rank.  Pure.

Rules: (1) group ranks are exactly 0 … n-1, and so are global ranks and the ranks within a role; (2) a survivor keeps
its group rank where the new size allows it; (3) who wishes for a rank that is free then gets it; (4) what is still
vacant goes first to survivors whose rank no longer exists, then to newcomers in the order given.
"""

from collections.abc import Sequence
from itertools import accumulate

from ripstop.round import Address, Node, Place


def order(candidates: Sequence[tuple[Node, int | None]]) -> list[Node]:
    """The nodes in the order of their new group ranks; each candidate comes with its group rank of before."""
    seats: list[Node | None] = [None] * len(candidates)
    homeless: list[tuple[bool, int, Node]] = []  # newcomer?, rank of before or order of coming, who
    for joined, (node, before) in enumerate(candidates):
        if before is not None and before < len(seats) and seats[before] is None:
            seats[before] = node
        else:
            homeless.append((before is None, joined if before is None else before, node))
    waiting: list[Node] = []
    for _, _, node in sorted(homeless, key=lambda h: h[:2]):
        if node.wish is not None and 0 <= node.wish < len(seats) and seats[node.wish] is None:
            seats[node.wish] = node
        else:
            waiting.append(node)
    rest = iter(waiting)
    return [seat if seat is not None else next(rest) for seat in seats]


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
