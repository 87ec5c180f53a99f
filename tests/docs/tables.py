"""The tables of the documentation that are copies of the code.  `python -m tests.docs.tables` writes them anew.

A table stands between `<!-- table: NAME -->` and `<!-- end -->`.
"""

import inspect
import re
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

from ripstop.observe import events
from ripstop.observe.events import Ending
from ripstop.observe.exposition import METRICS

DOCS = Path(__file__).parents[2] / "docs"
TYPES = {int: "integer", float: "number", str: "text", bool: "true or false"}


def of_events(*, agents: bool) -> str:
    """One row a kind of event."""
    source = inspect.getsource(events)
    border = source.index("# an agent's")
    rows = [
        (f"`{events._KINDS[cls]}`", ", ".join(map(_field, fields(cls))), inspect.cleandoc(cls.__doc__ or ""))
        for cls in get_args(events.Event)
        if (source.index(f"class {cls.__name__}:") > border) == agents
    ]
    return _table(("kind", "fields", "meaning"), rows)


def _field(field: Any) -> str:
    kind = TYPES.get(field.type)
    return f"`{field.name}` {kind or 'list of ' + TYPES[get_args(field.type)[0]]}"


def of_metrics() -> str:
    """One row a metric."""
    rows = [
        (f"`{metric.name}`", metric.type, ", ".join(f"`{label}`" for label in metric.labels), metric.help)
        for metric in METRICS.values()
    ]
    return _table(("name", "type", "labels", "meaning"), rows)


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(' '.join(cell.split()) for cell in line)} |" for line in lines)


TABLES = {
    "events of the coordinator": lambda: of_events(agents=False),
    "events of an agent": lambda: of_events(agents=True),
    "metrics": of_metrics,
    "causes": lambda: ", ".join(f"`{cause}`" for cause in Ending) + ".",
}


def renewed(text: str) -> str:
    """A page with its tables as they are to be."""
    return re.sub(
        r"<!-- table: ([^>]*?) -->\n.*?<!-- end -->",
        lambda found: f"<!-- table: {found[1]} -->\n\n{TABLES[found[1]]()}\n\n<!-- end -->",
        text,
        flags=re.DOTALL,
    )


if __name__ == "__main__":
    for page in DOCS.glob("*.md"):
        page.write_text(renewed(page.read_text(encoding="utf-8")), encoding="utf-8")
