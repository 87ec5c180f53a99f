"""Tables and dashboard match the code."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from ripstop.telemetry.prometheus import METRICS
from tests.docs.tables import ARCHITECTURE, DOCS, TABLES, renewed

PAGES = [*sorted(DOCS.glob("*.md")), ARCHITECTURE]
DASHBOARD = json.loads((DOCS / "grafana" / "ripstop.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_pages_tables_match_the_code(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text == renewed(text), "run: python -m tests.docs.tables"


def test_every_table_is_on_a_page() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert [name for name in TABLES if f"<!-- table: {name} -->" not in text] == []


def samples() -> set[str]:
    """The names of all samples."""
    histograms = {f"{m.name}_{part}" for m in METRICS.values() for part in ("bucket", "sum", "count")}
    return set(METRICS) | histograms


def queries(part: Any) -> list[str]:
    """All expressions of a dashboard."""
    if isinstance(part, dict):
        own = [text for name in ("expr", "query") if isinstance(text := part.get(name), str)]
        return own + [text for value in part.values() for text in queries(value)]
    return [text for value in part for text in queries(value)] if isinstance(part, list) else []


def test_the_dashboard_queries_existing_metrics() -> None:
    asked = {name for text in queries(DASHBOARD) for name in re.findall(r"\bripstop_[a-z_]+", text)}
    assert len(asked) > 20
    assert asked - samples() == set()


def test_the_dashboard_shows_every_metric_of_training_state() -> None:
    text = " ".join(queries(DASHBOARD))
    ours = [name for name in METRICS if name.startswith(("ripstop_state_", "ripstop_replication_"))]
    assert len(ours) > 5 and [name for name in ours if name not in text] == []


def test_the_dashboard_can_be_imported() -> None:
    panels = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
    assert DASHBOARD["uid"] and DASHBOARD["title"]
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    assert all(panel["datasource"]["uid"] == "${datasource}" for panel in panels)
    assert all(panel["targets"] and panel["title"] for panel in panels)
    boxes = [tuple(panel["gridPos"][key] for key in "xywh") for panel in DASHBOARD["panels"]]
    assert all(x + w <= 24 for x, _, w, _ in boxes)
