"""Tables of the documentation that are generated from the code.  `python -m tests.docs.tables` updates them.

A table stands between `<!-- table: NAME -->` and `<!-- end -->`.
"""

import ast
import inspect
import json
import re
from pathlib import Path
from typing import Any, get_args, get_type_hints

from ripstop.model import events
from ripstop.model.events import RoundEndCause
from ripstop.telemetry.prometheus import METRICS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
ARCHITECTURE = ROOT / "ARCHITECTURE.md"
SOURCE = ROOT / "src" / "ripstop"
TYPES = {int: "integer", float: "number", str: "text", bool: "true or false"}


def of_events(*, agents: bool) -> str:
    """One row for each kind of event."""
    rows = [
        (f"`{cls.__struct_config__.tag}`", _fields(cls), inspect.cleandoc(cls.__doc__ or ""))
        for cls in get_args(events.Event)
        if (cls.__module__ == events.__name__) == agents
    ]
    return _table(("kind", "fields", "meaning"), rows)


def _fields(cls: type[Any]) -> str:
    return ", ".join(
        f"`{name}` {TYPES.get(hint) or 'list of ' + TYPES[get_args(hint)[0]]}"
        for name, hint in get_type_hints(cls).items()
    )


def of_metrics() -> str:
    """One row for each metric."""
    rows = [
        (f"`{metric.name}`", metric.type, ", ".join(f"`{label}`" for label in metric.labels), metric.help)
        for metric in METRICS.values()
    ]
    return _table(("name", "type", "labels", "meaning"), rows)


def of_causes() -> str:
    """One row for each cause of a round's end; its comment is the meaning."""
    rows = re.findall(r'= "(\w+)"  # (.*)', inspect.getsource(RoundEndCause))
    assert [name for name, _ in rows] == list(RoundEndCause), "every cause has a comment"
    return _table(("cause", "meaning"), [(f"`{name}`", f"{text[0].upper()}{text[1:]}.") for name, text in rows])


def of_source_tree() -> str:
    """One row for each package: the first sentence of its docstring, and its modules."""
    packages = sorted(path.parent for path in SOURCE.rglob("__init__.py") if path.parent != SOURCE)
    rows = [
        (f"`{package.relative_to(SOURCE)}/`", _first_sentence(package / "__init__.py"), _modules(package))
        for package in packages
    ]
    top = ("`ripstop/`", _first_sentence(SOURCE / "__init__.py"), _modules(SOURCE))
    return _table(("package", "purpose", "modules"), [top, *rows])


def _first_sentence(path: Path) -> str:
    doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(doc.split("\n\n")[0].split())


def _modules(package: Path) -> str:
    return ", ".join(sorted(path.stem for path in package.glob("*.py") if not path.name.startswith("__")))


def of_fault_matrix() -> str:
    """One row for each fault and number of nodes, as `tests/hosts/test_fault_matrix.py` measured it."""
    rows = json.loads((ROOT / "bench" / "results" / "fault_matrix.json").read_text(encoding="utf-8"))
    return _table(("fault", "nodes", "detected", "training", "lost steps"), [_matrix_row(row) for row in rows])


def _matrix_row(row: dict[str, Any]) -> tuple[str, ...]:
    seconds = f"{row['seconds'] or 0:.1f} s"
    training = {
        "restart": f"again after {seconds}",
        "goes on": f"goes on; longest pause {seconds}",
        "ends": "ends: the only agent is gone, and its workers with it",
        "fails": f"ends with this error and exit code 1, after {seconds}",
    }[row["outcome"]]
    lost = "-" if row["lost_steps"] is None else str(row["lost_steps"])
    return row["fault"], str(row["nodes"]), row["detected"] or "-", training, lost


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(' '.join(cell.split()) for cell in line)} |" for line in lines)


TABLES = {
    "events of the coordinator": lambda: of_events(agents=False),
    "events of an agent": lambda: of_events(agents=True),
    "metrics": of_metrics,
    "source tree": of_source_tree,
    "causes": of_causes,
    "fault matrix": of_fault_matrix,
}


def renewed(text: str) -> str:
    """The page with current tables."""
    return re.sub(
        r"<!-- table: ([^>]*?) -->\n.*?<!-- end -->",
        lambda found: f"<!-- table: {found[1]} -->\n\n{TABLES[found[1]]()}\n\n<!-- end -->",
        text,
        flags=re.DOTALL,
    )


if __name__ == "__main__":
    for page in (*DOCS.glob("*.md"), ARCHITECTURE):
        page.write_text(renewed(page.read_text(encoding="utf-8")), encoding="utf-8")
