"""What torch's flight recorder says: how far each rank is in its collectives, and for whom the others wait.  Pure.

torch counts the collectives of each process group in each process, and remembers the latest with their state.  Rules:
(1) a rank is in a collective that it has entered and not left, of several in the oldest; (2) a group is stuck in the
oldest collective that any of its ranks is in; whoever has not entered that one is behind; (3) the odd ones are those
that are behind in one group and in no collective of another, where they would wait themselves; (4) where nobody is
behind, the odd ones are those that take part under this number with another operation, or another size where sizes
must agree, than more than half of the group; (5) a message between two ranks is told and not compared, for its number
is theirs alone; (6) what makes no sense is passed over, and of a rank that did not answer nothing is believed.
"""

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from msgspec import Struct

from ripstop.model.failure import MAX_STANDINGS, CollectiveProgress
from ripstop.model.text import clean, rank_list

SHOWN = 20  # entries, for people
_TOLD = 3  # groups, and kinds of ranks in each, in one sentence
_WORD = 80  # characters of a name that comes from a worker
_NUMBERS = 2**62
_DEFAULT = "default_pg"
_BACKENDS = {"fr": "gloo", "nccl": "nccl"}  # whose recorder it is, as `workers/zygote/worker_hooks.py` names them
_SAME_SIZE = frozenset({"all_reduce", "broadcast", "reduce", "_all_gather_base", "_reduce_scatter_base"})


class Collective(Struct, frozen=True):
    """One operation that a rank has entered; `group` is unique within the job, `label` empty for the default group."""

    group: str
    label: str
    number: int
    op: str
    size: str
    state: str
    done: bool
    p2p: bool

    def __str__(self) -> str:
        return f"{_what(self.op, self.number, self.label)}, {self.size or 'no data'}: {self.state}"


class Recording(Struct, frozen=True):
    """What one rank remembers, the latest last, and the groups it is in, each with its label, used or not."""

    entries: tuple[Collective, ...]
    groups: Mapping[str, str]


# what torch prints ----------------------------------------------------------------------------------------------------


def from_torch(text: str | bytes) -> Recording | None:
    """The recorders' dumps, as a worker sends them; None when it is something else."""
    import json  # only where something hangs

    try:
        dumps = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(dumps, dict):
        return None
    entries: list[Collective] = []
    groups: dict[str, str] = {}
    for name, dump in dumps.items():
        if name in _BACKENDS and isinstance(dump, dict):
            groups |= _configured(dump.get("pg_config"), _BACKENDS[name])
            listed = dump.get("entries")
            entries += [entry for one in (listed if isinstance(listed, list) else ()) if (entry := _entry(one))]
    return Recording(tuple(entries), groups | {entry.group: entry.label for entry in entries})


def _configured(groups: Any, backend: str) -> dict[str, str]:
    if not isinstance(groups, dict):
        return {}
    return {
        _key(backend, name): _label(name, group.get("desc"))
        for name, group in groups.items()
        if name and isinstance(group, dict)
    }


def _entry(one: Any) -> Collective | None:
    match one:
        case {
            "process_group": [str(name), str(description), *_],
            "profiling_name": str(op),
            "collective_seq_id": int(collective),
            "p2p_seq_id": int(message),
        }:
            p2p = one.get("is_p2p") is True
            number = message if p2p else collective
            if not 0 <= number < _NUMBERS:
                return None
            backend, _, operation = op.rpartition(":")
            state, retired = str(one.get("state")), one.get("retired") is True
            # gloo's state stays what it was at first; both are retired when they are over
            done = retired or state == "completed"
            return Collective(
                _key(backend, name),
                _label(name, description),
                number,
                _word(operation),
                _size(one),
                "completed" if done else _word(state),
                done,
                p2p,
            )
    return None


def _key(backend: str, name: str) -> str:
    return _word(f"{backend}:{name}")


def _label(name: str, description: Any) -> str:
    if description == _DEFAULT:
        return ""
    return _word(description if isinstance(description, str) and description not in ("", "undefined") else name)


@lru_cache(maxsize=1024)  # the same few, thousands of times
def _word(text: str) -> str:
    return " ".join(clean(text).split())[:_WORD]


def _size(entry: Mapping[str, Any]) -> str:
    """`1024 Float`: how many elements of what kind go in."""
    shapes, kinds = entry.get("input_sizes"), entry.get("input_dtypes")
    try:
        elements = str(sum(math.prod(int(side) for side in shape) for shape in shapes or ()))
    except (TypeError, ValueError, OverflowError):
        return ""
    return f"{elements} {_word(str(kinds[0]))}" if isinstance(kinds, list) and kinds else ""


def as_text(recording: Recording) -> str:
    """For people: the latest operations, the last one at the end."""
    shown = recording.entries[-SHOWN:]
    more = len(recording.entries) - len(shown)
    return "\n".join([*([f"… {more} before"] if more else []), *map(str, shown)]) or "nothing is recorded"


# how far one rank is --------------------------------------------------------------------------------------------------


def standings(recording: Recording) -> tuple[CollectiveProgress, ...]:
    """How far a rank is in each of its groups, the default one and those it is stuck in first."""
    operations: dict[tuple[str, bool], dict[int, tuple[int, Collective]]] = {}
    for when, entry in enumerate(recording.entries):  # the last of one number tells of a whole batch of operations
        operations.setdefault((entry.group, entry.p2p), {})[entry.number] = (when, entry)
    found: list[tuple[int, CollectiveProgress]] = []
    for (group, p2p), numbered in operations.items():
        pending = _pending([entry for _, entry in numbered.values()])
        if p2p and not pending:
            continue
        when, latest = numbered[max(numbered)]
        shown = numbered[pending][1] if pending else latest
        found.append((when, CollectiveProgress(group, latest.label, latest.number, pending, shown.op, shown.size, p2p)))
    used = {standing.group for _, standing in found}
    found += [(-1, CollectiveProgress(group, label)) for group, label in recording.groups.items() if group not in used]
    found.sort(key=lambda one: (one[1].label != "", not one[1].pending, -one[0]))
    return tuple(standing for _, standing in found[:MAX_STANDINGS])


def _pending(operations: Sequence[Collective]) -> int:
    """The number of the oldest that is not over, 0 when all are.

    Collectives of one NCCL group end in their order, so what comes before one that has ended is over, too: parts of a
    batch are not marked as such.
    """
    ordered = not any(entry.p2p or entry.group.startswith("gloo:") for entry in operations)
    over = max((entry.number for entry in operations if entry.done), default=0) if ordered else 0
    return min((entry.number for entry in operations if not entry.done and entry.number > over), default=0)


def position(found: Sequence[CollectiveProgress]) -> str:
    """`in all_reduce #42`, or what was the last."""
    if pending := [_what(one.op, one.pending, one.label) for one in found if one.pending]:
        return f"in {', '.join(pending)}"
    last = next((one for one in found if one.entered), None)
    return f"in no collective; the last was {_what(last.op, last.entered, last.label)}" if last else "no collective yet"


# all ranks together ---------------------------------------------------------------------------------------------------

Ranks = Mapping[int, Sequence[CollectiveProgress]]  # of those that answered


class _Stuck(Struct, frozen=True):
    """One group, and the collective in which it is stuck."""

    number: int
    inside: Mapping[int, CollectiveProgress]
    behind: Mapping[int, CollectiveProgress]
    left: int  # how many ranks have it behind them

    def kinds(self) -> dict[str, list[int]]:
        """The ranks inside, by what they take it to be."""
        kinds: dict[str, list[int]] = {}
        for rank, standing in sorted(self.inside.items()):
            size = f" of {standing.size}" if standing.op in _SAME_SIZE and standing.size else ""
            kinds.setdefault(f"{standing.op}{size}", []).append(rank)
        return kinds


def odd_ones(ranks: Ranks) -> frozenset[int]:
    """The ranks that the others wait for; empty when the recorders do not tell."""
    stuck = _stuck(ranks)
    waiting = {rank for rank, found in ranks.items() if any(standing.pending for standing in found)}
    if late := {rank for group in stuck for rank in group.behind} - waiting:
        return frozenset(late)
    odd: set[int] = set()
    for group in stuck:
        crowd = max(group.kinds().values(), key=len)
        if not group.behind and 2 * len(crowd) > len(group.inside):
            odd |= group.inside.keys() - set(crowd)
    return frozenset(odd)


def in_words(ranks: Ranks) -> str:
    """`ranks 0,2,3 are in all_reduce #42, not entered by rank 1 (last: all_gather #41)`; empty: nobody is in any."""
    odd = odd_ones(ranks)
    stuck = sorted(_stuck(ranks), key=lambda group: not odd & (group.behind.keys() | group.inside.keys()))
    said = [_sentence(group) for group in stuck]
    messages: dict[str, list[int]] = {}
    for rank, found in sorted(ranks.items()):
        for one in found:
            if one.p2p and one.pending:
                messages.setdefault(_what(one.op, 0, one.label), []).append(rank)
    said += [f"{rank_list(those)} {_are(those)} in {what}" for what, those in messages.items()]
    more = [f"{len(said) - _TOLD} more groups"] if len(said) > _TOLD else []
    return "; ".join(said[:_TOLD] + more)


def _stuck(ranks: Ranks) -> list[_Stuck]:
    groups: dict[str, dict[int, CollectiveProgress]] = {}
    for rank, found in ranks.items():
        for standing in found:
            if not standing.p2p:
                groups.setdefault(standing.group, {})[rank] = standing
    stuck: list[_Stuck] = []
    for group, members in groups.items():
        if not (number := min((one.pending for one in members.values() if one.pending), default=0)):
            continue
        if not any(one.label for one in members.values()):  # everybody is in the default group
            members |= {rank: CollectiveProgress(group, "") for rank in ranks if rank not in members}
        inside = {rank: one for rank, one in members.items() if one.pending == number}
        behind = {rank: one for rank, one in members.items() if one.entered < number}
        stuck.append(_Stuck(number, inside, behind, len(members) - len(inside) - len(behind)))
    return stuck


def _sentence(group: _Stuck) -> str:
    kinds, some = group.kinds(), next(iter(group.inside.values()))
    if len(kinds) > 1:
        where = f" of group {some.label}" if some.label else ""
        told = [f"{rank_list(those)} {_are(those)} in {kind}" for kind, those in kinds.items()]
        return f"#{group.number}{where} is not the same for all: {_listed(told)}{_absent(group)}"
    inside = sorted(group.inside)
    nobody = ", and nobody is missing" if not group.behind and not group.left else ""
    return f"{rank_list(inside)} {_are(inside)} in {_what(some.op, group.number, some.label)}{_absent(group)}{nobody}"


def _absent(group: _Stuck) -> str:
    lasts: dict[str, list[int]] = {}
    for rank, one in sorted(group.behind.items()):
        lasts.setdefault(_what(one.op, one.entered, "") if one.entered else "none", []).append(rank)
    told = [f"{rank_list(those)} (last: {last})" for last, those in lasts.items()]
    return f", not entered by {_listed(told)}" if told else ""


def _listed(told: Sequence[str]) -> str:
    more = [f"{len(told) - _TOLD} more kinds"] if len(told) > _TOLD else []
    return ", ".join([*told[:_TOLD], *more])


def _are(ranks: Sequence[int]) -> str:
    return "is" if len(ranks) == 1 else "are"


def _what(op: str, number: int, label: str) -> str:
    return f"{op}{f' #{number}' if number else ''}{f' of group {label}' if label else ''}"
