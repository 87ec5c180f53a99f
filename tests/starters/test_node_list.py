"""Slurm's node lists."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ripstop.model.errors import UsageError
from ripstop.starters.node_list import expand_node_list


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1 n2"),
        ("n[1-3]", "n1 n2 n3"),
        ("n[1,3]", "n1 n3"),
        ("n[8-11]", "n8 n9 n10 n11"),
        ("n[08-11]", "n08 n09 n10 n11"),
        ("n[1-3,07-09],gpu-a[01-02]", "n1 n2 n3 n07 n08 n09 gpu-a01 gpu-a02"),
        ("login,n[1-2],big.example.org", "login n1 n2 big.example.org"),
        ("n[1-2]-ib", "n1-ib n2-ib"),
        ("rack[1-2]n[1-2]", "rack1n1 rack1n2 rack2n1 rack2n2"),
        ("[1-2]", "1 2"),
        ("n[2-2]", "n2"),
    ],
)
def test_a_node_list_is_expanded_in_its_order(text: str, nodes: str) -> None:
    assert expand_node_list("LIST", text) == tuple(nodes.split())


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("", "not a node list"),
        (" ", "not a node list"),
        ("n[1-3", "not a node list"),
        ("n1-3]", "not a node list"),
        ("n[[1-3]]", "not a node list"),
        ("n[]", "not a node list"),
        ("n[1-]", "at '1-'"),
        ("n[3-1]", "at '3-1'"),
        ("n[a-b]", "at 'a-b'"),
        ("n[1-2-3]", "at '1-2-3'"),
        ("n1,,n2", "not a node list"),
        ("n1, n2", "not a node list"),
        (",n1", "not a node list"),
        ("n[1-2],n2", "names n2 twice"),
        ("n[1-999999999]", "more than 100000 nodes"),
        ("(null)", "not a node list"),
        ("n1;n2", "not a node list"),
    ],
)
def test_a_list_that_cannot_be_read_is_an_error_that_quotes_it(text: str, seen: str) -> None:
    with pytest.raises(UsageError) as caught:
        expand_node_list("SLURM_STEP_NODELIST", text)
    assert str(caught.value).startswith(f"SLURM_STEP_NODELIST={text}: ")
    assert seen in str(caught.value)


@given(st.text("n1-[],a 0", max_size=12))
def test_any_text_is_a_list_of_names_or_a_usage_error(text: str) -> None:
    try:
        nodes = expand_node_list("LIST", text)
    except UsageError:
        return
    assert nodes
    assert not any(set("[], ") & set(node) for node in nodes)
