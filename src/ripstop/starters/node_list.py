"""Slurm's node lists: `n[1-3,07-09],gpu-a[01-02]` is n1, n2, n3, n07, n08, n09, gpu-a01 and gpu-a02.  Pure.

A name may have several brackets; the last one changes fastest, as in Slurm.  A number keeps its leading zeros.
"""

import re
from collections.abc import Iterator

from ripstop.model.config import MAX_NODES
from ripstop.model.errors import UsageError

ITEM = re.compile(r"(?:[\w.-]|\[[^][\s]*\])+", re.ASCII)  # a name and its brackets; commas outside these separate names
RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")


def expand_node_list(name: str, text: str) -> tuple[str, ...]:
    """The nodes in their order; `name` is the variable, for error messages."""
    items = ITEM.findall(text)
    if not items or ",".join(items) != text.strip():
        raise _unreadable_node_list(name, text, text)
    nodes: list[str] = []
    for item in items:
        for node in _expand_item(name, text, item):
            nodes.append(node)
            if len(nodes) > MAX_NODES:
                raise UsageError(f"{name}={text}: more than {MAX_NODES} nodes; start a job with fewer nodes")
    if len(set(nodes)) < len(nodes):
        twice = next(node for node in nodes if nodes.count(node) > 1)
        raise UsageError(f"{name}={text}: names {twice} twice; a job has one task a node: leave one of them out")
    return tuple(nodes)


def _expand_item(name: str, text: str, item: str) -> Iterator[str]:
    prefix, bracket, rest = item.partition("[")
    if not bracket:
        yield item
        return
    numbers, _, suffix = rest.partition("]")
    for part in numbers.split(","):
        found = RANGE.fullmatch(part)
        if found is None:
            raise _unreadable_node_list(name, text, part or item)
        first, last = found[1], found[2] or found[1]
        if int(last) < int(first):
            raise _unreadable_node_list(name, text, part)
        for number in range(int(first), int(last) + 1):
            yield from (f"{prefix}{number:0{len(first)}d}{end}" for end in _expand_item(name, text, suffix))


def _unreadable_node_list(name: str, text: str, part: str) -> UsageError:
    where = f" at {part!r}" if part != text else ""
    return UsageError(f"{name}={text}: not a node list{where}; Slurm writes it like n[1-3,07-09],gpu-a[01-02]")
