"""The alert rules are valid, query existing metrics, and fire when they should."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.docs.tables import DOCS
from tests.docs.test_tables import samples

RULES = DOCS / "grafana" / "alerts.yaml"
CASES = Path(__file__).with_name("alerts_test.yaml")
needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool here: apt install prometheus")


def promtool(*argv: str) -> str:
    run = subprocess.run(["promtool", *argv], capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


@needs_promtool
def test_prometheus_accepts_the_rules() -> None:
    assert "13 rules found" in promtool("check", "rules", str(RULES))


@needs_promtool
def test_every_alert_is_silent_first_and_fires_when_it_should() -> None:
    assert "SUCCESS" in promtool("test", "rules", str(CASES))


def test_every_alert_has_a_case_and_queries_existing_metrics() -> None:
    rules, cases = RULES.read_text(encoding="utf-8"), CASES.read_text(encoding="utf-8")
    assert re.findall(r"- alert: (\w+)", rules) == re.findall(r"- name: (\w+)", cases)
    asked = {name for text in (rules, cases) for name in re.findall(r"\bripstop_[a-z_]+", text)}
    assert len(asked) > 10 and asked - samples() == set()
