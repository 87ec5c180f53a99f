"""Plain data as YAML, for people to read and for kubectl to take.  Pure.

A subset of YAML is written, in block style; whatever could be taken for something else than a text is in quotes.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*(:[A-Za-z0-9_./-]+)*( [A-Za-z0-9_./()-]+)*")
WORDS = frozenset({"true", "false", "yes", "no", "on", "off", "y", "n", "null"})  # that some reader takes for values


def to_yaml(objects: Sequence[Mapping[str, Any]]) -> str:
    """One document each."""
    return "---\n".join("".join(f"{line}\n" for line in _lines(each)) for each in objects)


def _lines(value: Any) -> Iterator[str]:
    match value:
        case Mapping() if value:
            for key, inner in value.items():
                yield from _entry(f"{_scalar(str(key))}:", inner)
        case list() | tuple() if value:
            for inner in value:
                first, *rest = _lines(inner)
                yield f"- {first}"
                yield from (f"  {line}" for line in rest)
        case _:
            yield _scalar(value)


def _entry(key: str, value: Any) -> Iterator[str]:
    if isinstance(value, Mapping | list | tuple) and value:
        yield key
        indent = "  " if isinstance(value, Mapping) else ""
        yield from (f"{indent}{line}" for line in _lines(value))
    else:
        yield f"{key} {_scalar(value)}"


def _scalar(value: Any) -> str:
    match value:
        case str():
            plain = PLAIN.fullmatch(value) and value.lower() not in WORDS
            return value if plain else _quoted(value)
        case Mapping():
            return "{}"
        case list() | tuple():
            return "[]"
        case _:
            return json.dumps(value)  # a number, true, false, null: the same in both


def _quoted(text: str) -> str:
    """As in JSON, but that YAML knows no pairs of surrogates."""
    return "".join(c if c.isprintable() else _escaped(c) for c in json.dumps(text, ensure_ascii=False))


def _escaped(character: str) -> str:
    return f"\\U{ord(character):08x}"
