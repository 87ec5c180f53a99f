"""What is written as YAML is read back as what it was."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ripstop.kubernetes import deploy
from ripstop.kubernetes.manifests import to_yaml

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20) | st.sampled_from(
    ["yes", "Null", "1e3", "0x1f", "-", "- a", "a: b", "a #b", "2026-01-01", "12:30:45", "~", "", " a ", "!x", "1_000"]
)
SCALARS = st.none() | st.booleans() | st.integers() | TEXTS
DATA = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4), max_leaves=9
)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.dictionaries(TEXTS, DATA, min_size=1, max_size=4), min_size=1, max_size=3))
def test_it_comes_back_as_it_was(objects: list[dict[str, Any]]) -> None:
    assert list(yaml.safe_load_all(to_yaml(objects))) == objects


def test_real_objects_come_back_as_they_were() -> None:
    objects = deploy.objects_to_deploy()
    assert list(yaml.safe_load_all(to_yaml(objects))) == objects


def test_it_reads_well() -> None:
    text = to_yaml([{"kind": "Pod", "list": [{"a": 1, "b": ["x", "y z"]}, []], "empty": {}, "word": "no"}, {"a": None}])
    assert text == ("kind: Pod\nlist:\n- a: 1\n  b:\n  - x\n  - y z\n- []\nempty: {}\nword: 'no'\n---\na: null\n")
