"""Interprets torch's flight recorder: how far ranks are in their collectives, and which ranks others wait for.  Pure.

torch numbers the collectives of each process group in each process, and records the latest ones with their state.
Rules:

1. A rank is inside a collective that it has entered and not left; if there are several, inside the oldest.
2. A group is stuck in the oldest collective that any of its ranks is inside.  Ranks that have not entered it are
   behind.
3. The odd ranks are members that are behind in one group and are inside no collective of another group.
4. If no rank is behind, the odd ranks are members that entered another operation under this number than more than half
   of the group, or another size where sizes must be equal.
5. Messages between two ranks are reported and not compared: only the two ranks share their numbers.
6. Entries that make no sense are skipped.  A rank that did not reply is not part of the comparison.
"""

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from msgspec import Struct

from ripstop.model.failure import MAX_STANDINGS, CollectiveProgress
from ripstop.model.text_formatting import clean, rank_list

MAX_SHOWN_ENTRIES = 20
_MAX_SHOWN_GROUPS = 3  # and kinds of ranks in each group, in one message
_MAX_NAME_CHARS = 80  # of a name that comes from a worker
_MAX_NUMBER = 2**62
_DEFAULT_GROUP = "default_pg"
_BACKENDS = {"fr": "gloo", "nccl": "nccl"}  # by the recorder's name in `workers/zygote/process.py`
_SAME_SIZE = frozenset({"all_reduce", "broadcast", "reduce", "_all_gather_base", "_reduce_scatter_base"})


class Collective(Struct, frozen=True):
    """One operation that a rank entered; `group` is unique in the job, `label` is empty for the default group."""

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
    """The entries of one rank, the latest last, and the labels of all its groups, used or not."""

    entries: tuple[Collective, ...]
    groups: Mapping[str, str]


# parsing --------------------------------------------------------------------------------------------------------------


def from_torch(text: str | bytes) -> Recording | None:
    """Parse the dumps of the recorders, as a worker sends them; None if this is not possible."""
    import json  # only if a worker hangs

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
            groups |= _group_labels(dump.get("pg_config"), _BACKENDS[name])
            listed = dump.get("entries")
            entries += [entry for item in (listed if isinstance(listed, list) else ()) if (entry := _entry(item))]
    return Recording(tuple(entries), groups | {entry.group: entry.label for entry in entries})


def _group_labels(groups: Any, backend: str) -> dict[str, str]:
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
            if not 0 <= number < _MAX_NUMBER:
                return None
            backend, _, operation = op.rpartition(":")
            state, retired = str(one.get("state")), one.get("retired") is True
            # gloo never changes the state; both backends retire operations that ended
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
    if description == _DEFAULT_GROUP:
        return ""
    return _word(description if isinstance(description, str) and description not in ("", "undefined") else name)


@lru_cache(maxsize=1024)  # few different names, thousands of times
def _word(text: str) -> str:
    return " ".join(clean(text).split())[:_MAX_NAME_CHARS]


def _size(entry: Mapping[str, Any]) -> str:
    """The number and type of the input elements: `1024 Float`."""
    shapes, kinds = entry.get("input_sizes"), entry.get("input_dtypes")
    try:
        elements = str(sum(math.prod(int(side) for side in shape) for shape in shapes or ()))
    except (TypeError, ValueError, OverflowError):
        return ""
    return f"{elements} {_word(str(kinds[0]))}" if isinstance(kinds, list) and kinds else ""


def as_text(recording: Recording) -> str:
    """The latest operations, one a line, the latest at the end."""
    shown = recording.entries[-MAX_SHOWN_ENTRIES:]
    more = len(recording.entries) - len(shown)
    return "\n".join([*([f"… {more} before"] if more else []), *map(str, shown)]) or "nothing is recorded"


# one rank -------------------------------------------------------------------------------------------------------------


def group_progress(recording: Recording) -> tuple[CollectiveProgress, ...]:
    """The progress of a rank in each of its groups; the default group and groups with pending operations first."""
    operations: dict[tuple[str, bool], dict[int, tuple[int, Collective]]] = {}
    for when, entry in enumerate(recording.entries):  # the last entry of a number represents a batch of operations
        operations.setdefault((entry.group, entry.p2p), {})[entry.number] = (when, entry)
    found: list[tuple[int, CollectiveProgress]] = []
    for (group, p2p), numbered in operations.items():
        pending = _pending([entry for _, entry in numbered.values()])
        if p2p and not pending:
            continue
        when, latest = numbered[max(numbered)]
        shown = numbered[pending][1] if pending else latest
        found.append((when, CollectiveProgress(group, latest.label, latest.number, pending, shown.op, shown.size, p2p)))
    used = {progress.group for _, progress in found}
    found += [(-1, CollectiveProgress(group, label)) for group, label in recording.groups.items() if group not in used]
    found.sort(key=lambda one: (one[1].label != "", not one[1].pending, -one[0]))
    return tuple(progress for _, progress in found[:MAX_STANDINGS])


def _pending(operations: Sequence[Collective]) -> int:
    """The number of the oldest operation that has not ended; 0 if all have.

    Collectives of one NCCL group end in order.  So all before one that has ended are over, too, even if they are parts
    of a batch and not marked.
    """
    ordered = not any(entry.p2p or entry.group.startswith("gloo:") for entry in operations)
    over = max((entry.number for entry in operations if entry.done), default=0) if ordered else 0
    return min((entry.number for entry in operations if not entry.done and entry.number > over), default=0)


def position(found: Sequence[CollectiveProgress]) -> str:
    """`in all_reduce #42`, or the last collective."""
    if pending := [_what(one.op, one.pending, one.label) for one in found if one.pending]:
        return f"in {', '.join(pending)}"
    last = next((one for one in found if one.entered), None)
    return f"in no collective; the last was {_what(last.op, last.entered, last.label)}" if last else "no collective yet"


# all ranks ------------------------------------------------------------------------------------------------------------

Ranks = Mapping[int, Sequence[CollectiveProgress]]  # only ranks that replied


class _StuckGroup(Struct, frozen=True):
    """A process group, and the collective in which it is stuck (rule 2)."""

    number: int
    inside: Mapping[int, CollectiveProgress]
    behind: Mapping[int, CollectiveProgress]
    left: int  # number of ranks that have left it

    def kinds(self) -> dict[str, list[int]]:
        """The ranks inside, by operation and size."""
        kinds: dict[str, list[int]] = {}
        for rank, progress in sorted(self.inside.items()):
            size = f" of {progress.size}" if progress.op in _SAME_SIZE and progress.size else ""
            kinds.setdefault(f"{progress.op}{size}", []).append(rank)
        return kinds


def odd_ones(ranks: Ranks) -> frozenset[int]:
    """The ranks that the others wait for (rules 3 and 4); empty if the recorders do not show it."""
    stuck = _stuck_groups(ranks)
    waiting = {rank for rank, found in ranks.items() if any(progress.pending for progress in found)}
    if late := {rank for group in stuck for rank in group.behind} - waiting:
        return frozenset(late)
    odd: set[int] = set()
    for group in stuck:
        majority = max(group.kinds().values(), key=len)
        if not group.behind and 2 * len(majority) > len(group.inside):
            odd |= group.inside.keys() - set(majority)
    return frozenset(odd)


def in_words(ranks: Ranks) -> str:
    """`ranks 0,2,3 are in all_reduce #42, not entered by rank 1 (last: all_gather #41)`; empty if no rank is inside."""
    odd = odd_ones(ranks)
    stuck = sorted(_stuck_groups(ranks), key=lambda group: not odd & (group.behind.keys() | group.inside.keys()))
    texts = [_in_words(group) for group in stuck]
    messages: dict[str, list[int]] = {}
    for rank, found in sorted(ranks.items()):
        for one in found:
            if one.p2p and one.pending:
                messages.setdefault(_what(one.op, 0, one.label), []).append(rank)
    texts += [f"{rank_list(members)} {_are(members)} in {what}" for what, members in messages.items()]
    more = [f"{len(texts) - _MAX_SHOWN_GROUPS} more groups"] if len(texts) > _MAX_SHOWN_GROUPS else []
    return "; ".join(texts[:_MAX_SHOWN_GROUPS] + more)


def _stuck_groups(ranks: Ranks) -> list[_StuckGroup]:
    groups: dict[str, dict[int, CollectiveProgress]] = {}
    for rank, found in ranks.items():
        for progress in found:
            if not progress.p2p:
                groups.setdefault(progress.group, {})[rank] = progress
    stuck: list[_StuckGroup] = []
    for group, members in groups.items():
        if not (number := min((one.pending for one in members.values() if one.pending), default=0)):
            continue
        if not any(one.label for one in members.values()):  # every rank is in the default group
            members |= {rank: CollectiveProgress(group, "") for rank in ranks if rank not in members}
        inside = {rank: one for rank, one in members.items() if one.pending == number}
        behind = {rank: one for rank, one in members.items() if one.entered < number}
        stuck.append(_StuckGroup(number, inside, behind, len(members) - len(inside) - len(behind)))
    return stuck


def _in_words(group: _StuckGroup) -> str:
    kinds, some = group.kinds(), next(iter(group.inside.values()))
    if len(kinds) > 1:
        where = f" of group {some.label}" if some.label else ""
        texts = [f"{rank_list(members)} {_are(members)} in {kind}" for kind, members in kinds.items()]
        return f"#{group.number}{where} is not the same for all: {_listed(texts)}{_behind_in_words(group)}"
    inside = sorted(group.inside)
    complete = ", and no rank is missing" if not group.behind and not group.left else ""
    what = _what(some.op, group.number, some.label)
    return f"{rank_list(inside)} {_are(inside)} in {what}{_behind_in_words(group)}{complete}"


def _behind_in_words(group: _StuckGroup) -> str:
    lasts: dict[str, list[int]] = {}
    for rank, one in sorted(group.behind.items()):
        lasts.setdefault(_what(one.op, one.entered, "") if one.entered else "none", []).append(rank)
    texts = [f"{rank_list(members)} (last: {last})" for last, members in lasts.items()]
    return f", not entered by {_listed(texts)}" if texts else ""


def _listed(texts: Sequence[str]) -> str:
    more = [f"{len(texts) - _MAX_SHOWN_GROUPS} more kinds"] if len(texts) > _MAX_SHOWN_GROUPS else []
    return ", ".join([*texts[:_MAX_SHOWN_GROUPS], *more])


def _are(ranks: Sequence[int]) -> str:
    return "is" if len(ranks) == 1 else "are"


def _what(op: str, number: int, label: str) -> str:
    return f"{op}{f' #{number}' if number else ''}{f' of group {label}' if label else ''}"
