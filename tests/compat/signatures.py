"""Compares what can be passed to torch's functions and classes with what can be passed to ours."""

import inspect
from typing import Any


def taken_by_both(theirs: Any, ours: Any) -> None:
    """Every call of theirs is one of ours: the same names in the same order, and a default wherever they have one."""
    for name in _entries(theirs):
        torchs = list(inspect.signature(getattr(theirs, name) if name else theirs).parameters.values())
        mine = list(inspect.signature(getattr(ours, name) if name else ours).parameters.values())
        where = f"{theirs.__name__}.{name}"
        assert [p.name for p in mine[: len(torchs)]] == [p.name for p in torchs], where
        for one, other in zip(torchs, mine, strict=False):
            if one.default is inspect.Parameter.empty:
                continue
            made = callable(one.default) or repr(one.default) == "<factory>"  # which cannot be compared
            same = other.default is not inspect.Parameter.empty if made else other.default == one.default
            assert same, f"{where}: {one.name} is {other.default!r} and not {one.default!r}"
        assert all(p.default is not inspect.Parameter.empty for p in mine[len(torchs) :]), where


def _entries(thing: Any) -> list[str]:
    """Itself, and the public methods of a class."""
    if not inspect.isclass(thing):
        return [""]
    methods = [name for name, value in vars(thing).items() if inspect.isfunction(value) and not name.startswith("_")]
    return ["", *methods] if not issubclass(thing, int) else methods
