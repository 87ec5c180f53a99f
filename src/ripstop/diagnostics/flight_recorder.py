"""Parses a worker's dump of torch's flight recorder: how far the worker is in its collectives.  Pure.

torch numbers the collectives of each process group in each process, and records the latest ones with their state.
Rules: (1) a rank is inside a collective that it has entered and not left; if there are several, inside the oldest;
(2) entries that make no sense are skipped.  `hang_analysis.py` compares ranks.
"""

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from msgspec import Struct

from ripstop.diagnostics.hang_analysis import describe_operation
from ripstop.model.failure import MAX_COLLECTIVES, CollectiveProgress
from ripstop.model.text_formatting import format_clean_text

MAX_SHOWN_ENTRIES = 20
_MAX_NAME_CHARS = 80  # of a name that comes from a worker
_MAX_NUMBER = 2**62
_DEFAULT_GROUP = "default_pg"
_BACKENDS = {"fr": "gloo", "nccl": "nccl"}  # by the recorder's name in `workers/zygote/process.py`


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
        return f"{describe_operation(self.op, self.number, self.label)}, {self.size or 'no data'}: {self.state}"


class Recording(Struct, frozen=True):
    """The entries of one rank, the latest last, and the labels of all its groups, used or not."""

    entries: tuple[Collective, ...]
    groups: Mapping[str, str]


# parsing --------------------------------------------------------------------------------------------------------------


def parse_flight_recorder(text: str | bytes) -> Recording | None:
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
            groups |= _flight_recorder_group_labels(dump.get("pg_config"), _BACKENDS[name])
            listed = dump.get("entries")
            entries += [entry for item in (listed if isinstance(listed, list) else ()) if (entry := _entry(item))]
    return Recording(tuple(entries), groups | {entry.group: entry.label for entry in entries})


def _flight_recorder_group_labels(groups: Any, backend: str) -> dict[str, str]:
    if not isinstance(groups, dict):
        return {}
    return {
        _flight_recorder_group_key(backend, name): _flight_recorder_group_label(name, group.get("desc"))
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
            backend, _, name_of_op = op.rpartition(":")
            state, retired = str(one.get("state")), one.get("retired") is True
            # gloo never changes the state; both backends retire operations that ended
            done = retired or state == "completed"
            return Collective(
                _flight_recorder_group_key(backend, name),
                _flight_recorder_group_label(name, description),
                number,
                _flight_recorder_word(name_of_op),
                _collective_size(one),
                "completed" if done else _flight_recorder_word(state),
                done,
                p2p,
            )
    return None


def _flight_recorder_group_key(backend: str, name: str) -> str:
    return _flight_recorder_word(f"{backend}:{name}")


def _flight_recorder_group_label(name: str, description: Any) -> str:
    if description == _DEFAULT_GROUP:
        return ""
    return _flight_recorder_word(
        description if isinstance(description, str) and description not in ("", "undefined") else name
    )


@lru_cache(maxsize=1024)  # few different names, thousands of times
def _flight_recorder_word(text: str) -> str:
    return " ".join(format_clean_text(text).split())[:_MAX_NAME_CHARS]


def _collective_size(entry: Mapping[str, Any]) -> str:
    """The number and type of the input elements: `1024 Float`."""
    shapes, kinds = entry.get("input_sizes"), entry.get("input_dtypes")
    try:
        elements = str(sum(math.prod(int(side) for side in shape) for shape in shapes or ()))
    except (TypeError, ValueError, OverflowError):
        return ""
    return f"{elements} {_flight_recorder_word(str(kinds[0]))}" if isinstance(kinds, list) and kinds else ""


def flight_recorder_text(recording: Recording) -> str:
    """The latest operations, one per line, the latest at the end."""
    shown = recording.entries[-MAX_SHOWN_ENTRIES:]
    more = len(recording.entries) - len(shown)
    return "\n".join([*([f"… {more} before"] if more else []), *map(str, shown)]) or "nothing is recorded"


# one rank -------------------------------------------------------------------------------------------------------------


def flight_recorder_progress(recording: Recording) -> tuple[CollectiveProgress, ...]:
    """The progress of a rank in each of its groups; the default group and groups with pending operations first."""
    operations: dict[tuple[str, bool], dict[int, tuple[int, Collective]]] = {}
    for when, entry in enumerate(recording.entries):  # the last entry of a number represents a batch of operations
        operations.setdefault((entry.group, entry.p2p), {})[entry.number] = (when, entry)
    found: list[tuple[int, CollectiveProgress]] = []
    for (group, p2p), numbered in operations.items():
        pending = _pending_in_flight_recorder([entry for _, entry in numbered.values()])
        if p2p and not pending:
            continue
        when, latest = numbered[max(numbered)]
        shown = numbered[pending][1] if pending else latest
        found.append((when, CollectiveProgress(group, latest.label, latest.number, pending, shown.op, shown.size, p2p)))
    used = {progress.group for _, progress in found}
    found += [(-1, CollectiveProgress(group, label)) for group, label in recording.groups.items() if group not in used]
    found.sort(key=lambda one: (one[1].label != "", not one[1].pending, -one[0]))
    return tuple(progress for _, progress in found[:MAX_COLLECTIVES])


def _pending_in_flight_recorder(operations: Sequence[Collective]) -> int:
    """The number of the oldest operation that has not ended; 0 if all have.

    Collectives of one NCCL group end in order.  So all before one that has ended are over, too, even if they are parts
    of a batch and not marked.
    """
    ordered = not any(entry.p2p or entry.group.startswith("gloo:") for entry in operations)
    over = max((entry.number for entry in operations if entry.done), default=0) if ordered else 0
    return min((entry.number for entry in operations if not entry.done and entry.number > over), default=0)
