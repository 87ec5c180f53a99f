"""The fields of an ElasticJob as tables in `docs/kubernetes.md`, written from its definition.

`python -m tests.docs.crd_reference` updates them.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ripstop.kubernetes.crd import COLUMNS, definition
from ripstop.kubernetes.spec import FIELDS

PAGE = Path(__file__).parents[2] / "docs" / "kubernetes.md"
BEGIN, END = "<!-- fields: begin -->\n", "<!-- fields: end -->\n"
FREE = frozenset(field.name for field in FIELDS if not field.fixed)


def tables() -> str:
    schema = definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]
    spec, status = schema["spec"], schema["status"]
    lines = ["| field of `spec` | type | default | may be changed later | meaning |", "| --- | --- | --- | --- | --- |"]
    lines += [_row(path, field, spec["required"]) for path, field in _fields("", spec["properties"])]
    lines += ["", "| field of `status` | type | meaning |", "| --- | --- | --- |"]
    lines += [f"| `{name}` | {_type(field)} | {field.get('description', '')} |" for name, field in _known(status)]
    shown = [f"`{name}`" + (" (with `-o wide`)" if wide else "") for name, _, _, wide in COLUMNS]
    lines += ["", f"`kubectl get elasticjobs` shows {', '.join(shown)}."]
    return "".join(f"{line}\n" for line in lines)


def _fields(prefix: str, properties: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Plain fields, and those of a group by their path."""
    for name, field in properties.items():
        yield f"{prefix}{name}", field
        if name == "rendezvous":
            yield from _fields(f"{name}.", field["properties"])


def _known(status: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return list(status["properties"].items())


def _row(path: str, field: dict[str, Any], required: list[str]) -> str:
    default = "required" if path in required else f"`{_word(field['default'])}`" if "default" in field else ""
    changes = "yes" if path in FREE else ""
    text = " ".join(field.get("description", "").split())
    return f"| `{path}` | {_type(field)} | {default} | {changes} | {text} |"


def _type(field: dict[str, Any]) -> str:
    if "x-kubernetes-int-or-string" in field:
        return "number or text"
    names = {"string": "text", "boolean": "true or false", "array": "list"}
    name = names.get(field["type"], field["type"])
    if field.get("format") == "date-time":
        return "time"
    if choices := field.get("enum"):
        return " or ".join(f"`{choice}`" for choice in choices)
    if "minimum" in field:
        return f"{field['minimum']} to {field['maximum']}"
    return {"integer": "number", "object": "group"}.get(name, name)


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value) or '""'


def rewritten(page: str) -> str:
    """The page with the current tables between their marks."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    assert begin and end, f"{PAGE.name} has no place for the tables; put {BEGIN.strip()} and {END.strip()} there"
    return f"{before}{begin}\n{tables()}\n{end}{after}"


if __name__ == "__main__":
    PAGE.write_text(rewritten(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
