"""Finds the ranks that caused a hang, and describes the hang: from stacks and from torch's flight recorder.  Pure.

In a round that hangs, workers that wait for others are victims.  These groups are checked in order.  The first one that
is not empty, and does not have all ranks, has the suspect ranks, which caused the hang:

1. Processes stopped by a signal.
2. Ranks that the flight recorder shows as suspects, and of these the ones that do not wait by their stacks, if any.
3. Ranks that do not wait.
4. Ranks outside the one location that more than half of the ranks share.
5. Ranks that do not wait and made no progress for about as long as the first rank that was found to hang.

Rules for the flight recorder (`flight_recorder.py` says how far each rank is in each process group):

6. A group is stuck in the oldest collective that any of its ranks is inside.  Ranks that have not entered it are
   behind.
7. The suspect ranks are members that are behind in one group and are inside no operation of another group.
8. If no rank is behind, the suspect ranks are members that are inside another operation under this number than more
   than half of the members inside, or in another size where sizes must be equal.
9. Messages between two ranks are reported and not compared: only the two ranks share their numbers.
10. A rank that did not reply is not part of the comparison.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

from msgspec import Struct

from ripstop.model.failure import CollectiveProgress, Failure, Hang
from ripstop.model.text_formatting import is_or_are, rank_list

K = TypeVar("K", bound=Hashable)

_MAX_LOCATIONS = 4  # in one message
_MAX_SHOWN_GROUPS = 3  # and kinds of ranks in each group, in one message
_SAME_SIZE = frozenset({"all_reduce", "broadcast", "reduce", "_all_gather_base", "_reduce_scatter_base"})

Ranks = Mapping[int, Sequence[CollectiveProgress]]  # only ranks that replied


def hangs_among(failures: Iterable[Failure], round: int) -> dict[int, Hang]:
    """The hangs of this round, by rank."""
    return {failure.rank: failure.hang for failure in failures if failure.hang and failure.round == round}


def suspect_ranks(hangs: Mapping[int, Hang]) -> frozenset[int]:
    """The ranks that the others wait for (rules 1 to 5); empty if nothing distinguishes them."""
    if 0 < len(stopped := [rank for rank, hang in hangs.items() if _hangs_because_stopped(hang)]) < len(hangs):
        return frozenset(stopped)
    if suspects := suspects_in_collectives(_collectives_of_hangs(hangs)):
        return frozenset(rank for rank in suspects if not hangs[rank].waits) or suspects
    known = {rank: hang for rank, hang in hangs.items() if hang.where}
    not_waiting = {rank for rank, hang in known.items() if not hang.waits}
    if 0 < len(not_waiting) < len(known):
        return frozenset(not_waiting)
    majority = max(_hang_locations(known).values(), key=len, default=[])
    if len(known) / 2 < len(majority) < len(known):
        return frozenset(known.keys() - set(majority))
    if not (limit := min((hang.seconds for hang in known.values() if hang.sign), default=0.0) / 2):
        return frozenset()
    hung = {rank for rank in not_waiting if known[rank].seconds >= limit}  # equal ranks differ by a step, not by half
    return frozenset(hung) if len(hung) < len(known) else frozenset()


def describe_hangs(hangs: Mapping[int, Hang]) -> str:
    """`ranks 0,1,3 wait in all_reduce (train.py:41); rank 2 is in load_batch (data.py:17); flight recorder: …`."""
    suspects = suspect_ranks(hangs)
    groups = sorted(_hang_locations(hangs).items(), key=lambda group: (group[1][0] in suspects, -len(group[1])))
    middle = groups[1 : 1 - _MAX_LOCATIONS]  # between the majority and as many of the suspect groups as fit
    shown = [groups[0], *groups[1 - _MAX_LOCATIONS :]] if middle else groups
    texts = [_describe_location(*group) for group in shown]
    if middle:
        texts.append(f"{sum(len(ranks) for _, ranks in middle)} more elsewhere")
    if recorded := describe_hung_collectives(_collectives_of_hangs(hangs)):
        texts.append(f"flight recorder: {recorded}")
    return "; ".join(texts)


def _hangs_because_stopped(hang: Hang) -> bool:
    return hang.state in ("T", "t")


def _collectives_of_hangs(hangs: Mapping[int, Hang]) -> Ranks:
    return {rank: hang.collectives for rank, hang in hangs.items() if hang.collectives is not None}


def _hang_locations(hangs: Mapping[int, Hang]) -> dict[tuple[str, str, bool, bool], list[int]]:
    return _group_hung_ranks(
        ((hang.call, hang.where, hang.waits, _hangs_because_stopped(hang)), rank)
        for rank, hang in sorted(hangs.items())
    )


def _group_hung_ranks(ranks: Iterable[tuple[K, int]]) -> dict[K, list[int]]:
    groups: dict[K, list[int]] = {}
    for key, rank in ranks:
        groups.setdefault(key, []).append(rank)
    return groups


def _describe_location(key: tuple[str, str, bool, bool], ranks: list[int]) -> str:
    call, where, waits, stopped = key
    one = len(ranks) == 1
    verb = ("waits" if one else "wait") if waits else is_or_are(ranks)
    doing = f"{verb} in {call} ({where})" if where else f"{'does' if one else 'do'} not show where"
    return f"{rank_list(ranks)} {doing}" + (", stopped by a signal" if stopped else "")


# flight recorder ------------------------------------------------------------------------------------------------------


class _HungGroup(Struct, frozen=True):
    """A process group, and the collective in which it is stuck (rule 6)."""

    number: int
    inside: Mapping[int, CollectiveProgress]
    behind: Mapping[int, CollectiveProgress]
    left: int  # number of ranks that have left it

    def kinds(self) -> dict[str, list[int]]:
        """The ranks inside, by operation and size."""
        return _group_hung_ranks(
            (f"{one.op} of {one.size}" if one.op in _SAME_SIZE and one.size else one.op, rank)
            for rank, one in sorted(self.inside.items())
        )


def suspects_in_collectives(ranks: Ranks) -> frozenset[int]:
    """The ranks that the others wait for (rules 7 and 8); empty if the recorders do not show it."""
    stuck = _hung_groups(ranks)
    waiting = {rank for rank, found in ranks.items() if any(progress.pending for progress in found)}
    if late := {rank for group in stuck for rank in group.behind} - waiting:
        return frozenset(late)
    suspects: set[int] = set()
    for group in stuck:
        majority = max(group.kinds().values(), key=len)
        if not group.behind and 2 * len(majority) > len(group.inside):
            suspects |= group.inside.keys() - set(majority)
    return frozenset(suspects)


def describe_hung_collectives(ranks: Ranks) -> str:
    """`ranks 0,2,3 are in all_reduce #42, not entered by rank 1 (last: all_gather #41)`; empty if no rank is inside."""
    suspects = suspects_in_collectives(ranks)
    stuck = sorted(_hung_groups(ranks), key=lambda group: not suspects & (group.behind.keys() | group.inside.keys()))
    messages = _group_hung_ranks(
        (describe_operation(one.op, 0, one.label), rank)
        for rank, found in sorted(ranks.items())
        for one in found
        if one.p2p and one.pending
    )
    texts = [_describe_group(group) for group in stuck]
    texts += [f"{rank_list(members)} {is_or_are(members)} in {what}" for what, members in messages.items()]
    return "; ".join(_shortened_hang_texts(texts, "groups"))


def describe_hang_position(found: Sequence[CollectiveProgress]) -> str:
    """`in all_reduce #42`, or the last collective of a rank."""
    if pending := [describe_operation(one.op, one.pending, one.label) for one in found if one.pending]:
        return f"in {', '.join(pending)}"
    if last := next((one for one in found if one.entered), None):
        return f"in no collective; the last was {describe_operation(last.op, last.entered, last.label)}"
    return "no collective yet"


def describe_operation(op: str, number: int, label: str) -> str:
    return f"{op}{f' #{number}' if number else ''}{f' of group {label}' if label else ''}"


def _hung_groups(ranks: Ranks) -> list[_HungGroup]:
    groups: dict[str, dict[int, CollectiveProgress]] = {}
    for rank, found in ranks.items():
        for progress in found:
            if not progress.p2p:
                groups.setdefault(progress.group, {})[rank] = progress
    stuck: list[_HungGroup] = []
    for group, members in groups.items():
        if not (number := min((one.pending for one in members.values() if one.pending), default=0)):
            continue
        if not any(one.label for one in members.values()):  # every rank is in the default group
            members |= {rank: CollectiveProgress(group, "") for rank in ranks if rank not in members}
        inside = {rank: one for rank, one in members.items() if one.pending == number}
        behind = {rank: one for rank, one in members.items() if one.entered < number}
        stuck.append(_HungGroup(number, inside, behind, len(members) - len(inside) - len(behind)))
    return stuck


def _describe_group(group: _HungGroup) -> str:
    lasts = _group_hung_ranks(
        (describe_operation(one.op, one.entered, "") if one.entered else "none", rank)
        for rank, one in sorted(group.behind.items())
    )
    behind = _shortened_hang_texts([f"{rank_list(members)} (last: {last})" for last, members in lasts.items()], "kinds")
    not_entered = f", not entered by {', '.join(behind)}" if behind else ""
    kinds, some = group.kinds(), next(iter(group.inside.values()))
    if len(kinds) > 1:
        where = f" of group {some.label}" if some.label else ""
        texts = [f"{rank_list(members)} {is_or_are(members)} in {kind}" for kind, members in kinds.items()]
        differing = ", ".join(_shortened_hang_texts(texts, "kinds"))
        return f"#{group.number}{where} is not the same for all: {differing}{not_entered}"
    inside = sorted(group.inside)
    complete = ", and no rank is missing" if not group.behind and not group.left else ""
    what = describe_operation(some.op, group.number, some.label)
    return f"{rank_list(inside)} {is_or_are(inside)} in {what}{not_entered}{complete}"


def _shortened_hang_texts(texts: Sequence[str], what: str) -> list[str]:
    more = [f"{len(texts) - _MAX_SHOWN_GROUPS} more {what}"] if len(texts) > _MAX_SHOWN_GROUPS else []
    return [*texts[:_MAX_SHOWN_GROUPS], *more]
