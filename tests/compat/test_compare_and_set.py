"""A rendezvous over a blob, as transcripts: what one node makes of a state, and what is refused as one."""

import json

import pytest
from msgspec.structs import replace

from ripstop.compat.rendezvous.compare_and_set import (
    Done,
    Formed,
    MemberSettings,
    Participant,
    RendezvousClosed,
    SharedState,
    Step,
    Wait,
    Write,
    decode,
    encode,
)
from ripstop.model.errors import ProtocolError
from ripstop.model.round import Address

SETTINGS = MemberSettings(min_nodes=2, max_nodes=3, last_call=30.0, beat=5.0, silence=15.0)


def at(node: str) -> Address:
    return Address(node, 4000)


class Table:
    """Nodes that take their steps one after the other, on one state."""

    def __init__(self, *nodes: str) -> None:
        self.state = SharedState("job")
        self.members = {node: Participant(node, SETTINGS) for node in nodes}

    def join(self, node: str, now: float = 0.0) -> Step:
        """Until there is nothing more for it to write."""
        while isinstance(step := self.members[node].join(self.state, at(node), now), Write):
            self.state = step.state
        return step

    def beat(self, node: str, now: float) -> Step:
        if isinstance(step := self.members[node].beat(self.state, now), Write):
            self.state = step.state
        return step


def meet(table: Table, round: int) -> None:
    """Three nodes come, and the last one forms the round."""
    assert table.join("a") == table.join("b") == Wait()
    assert [table.join(node) for node in "cab"] == [Formed(round, rank, 3, at("a"), "a") for rank in (2, 0, 1)]


def three_in_a_round() -> Table:
    table = Table("a", "b", "c", "d")
    meet(table, 1)
    return table


def test_the_largest_number_of_nodes_forms_a_round_at_once() -> None:
    assert three_in_a_round().state.seats == ("a", "b", "c")


def test_the_least_number_waits_for_a_last_call() -> None:
    table = Table("a", "b")
    table.join("a")
    assert table.join("b") == Wait()
    for now in (5.0, 10.0, 15.0, 20.0, 25.0):
        assert table.join("a", now) == Wait() == table.join("b", now)
    assert table.join("b", 30.0) == Formed(1, 1, 2, at("a"), "a")


def test_survivors_that_are_enough_need_no_last_call_and_keep_their_ranks() -> None:
    table = three_in_a_round()
    table.join("c")
    table.state = replace(table.state, gone=table.state.gone | {"a"}, beats={"b": 1, "c": 2})
    assert table.join("b") == Formed(2, 1, 2, at("c"), "c")
    assert table.join("c") == Formed(2, 0, 2, at("c"), "c")  # its rank of before is no longer there


def test_whoever_leaves_a_round_is_waited_for_by_the_others() -> None:
    table = three_in_a_round()
    assert table.join("b") == Wait()
    assert [table.members[node].waiting(table.state) for node in "ac"] == [1, 1]


def test_a_spare_is_not_waited_for_until_there_is_a_place() -> None:
    table = three_in_a_round()
    assert table.join("d") == Wait(spare=True)
    assert table.members["a"].waiting(table.state) == 0
    table.join("b")
    assert table.members["a"].waiting(table.state) == 2


def test_a_spare_ends_well_and_any_other_is_told_that_it_is_over() -> None:
    table = three_in_a_round()
    table.join("d")
    step = table.members["a"].close(table.state)
    assert isinstance(step, Write)
    table.state = step.state
    assert table.join("d") == RendezvousClosed(spare=True)
    assert table.join("b") == RendezvousClosed(spare=False)
    assert table.members["b"].close(table.state) == table.beat("b", 100.0) == Done()


def test_who_reads_the_same_beat_for_too_long_takes_that_node_out() -> None:
    table = three_in_a_round()
    for now in range(0, 15, 4):
        table.beat("a", float(now))
        table.beat("b", float(now))
    assert table.state.inside() == ["a", "b", "c"]
    table.beat("a", 15.0)
    assert table.state.inside() == ["a", "b"]
    assert table.members["c"].waiting(table.state) == 1  # it learns that its round is over


@pytest.mark.parametrize("jump", [1e6, -1e6])
def test_a_clock_that_jumps_takes_nobody_out(jump: float) -> None:
    table = three_in_a_round()
    table.beat("a", 0.0)
    table.beat("a", jump)
    assert table.state.inside() == ["a", "b", "c"]


def test_a_store_that_has_lost_the_state_gets_it_back() -> None:
    table = three_in_a_round()
    table.state = SharedState("job")
    table.join("d")
    assert table.members["b"].waiting(table.state) == 0  # nobody stops healthy workers for it
    table.beat("b", 0.0)
    assert (table.state.round, table.state.seats) == (1, ("a", "b", "c"))
    table.join("a")
    assert table.members["b"].waiting(table.state) == 2


def test_rounds_of_a_lost_state_are_numbered_on() -> None:
    table = three_in_a_round()
    table.state = SharedState("job")
    meet(table, 2)


def test_a_round_with_an_offer_that_was_taken_back_is_left() -> None:
    table = Table("a", "b", "c")
    for node in "abc":
        table.join(node)
    step = table.members["a"].join(table.state, Address("a", 4001), 0.0)
    assert isinstance(step, Write) and step.state.gone == {"a"}
    assert step.state.coming[0].store == Address("a", 4001)


def test_who_gives_up_is_no_longer_there() -> None:
    table = Table("a", "b")
    table.join("a")
    step = table.members["a"].leave(table.state)
    assert isinstance(step, Write) and step.state.coming == () and step.state.beats == {}
    assert table.members["a"].leave(step.state) == Done()


def test_what_is_written_is_read_back() -> None:
    table = three_in_a_round()
    table.join("d")
    table.join("b")
    assert decode(encode(table.state), "job") == table.state


GOOD = json.loads(encode(three_in_a_round().state))


@pytest.mark.parametrize(
    ("blob", "word"),
    [
        (b"", "not written by ripstop"),
        (b"\x80\x04\x95 a pickle", "not written by ripstop"),
        (b"[" * 100_000, "not written by ripstop"),
        (json.dumps({"ripstop": 2}).encode(), "another version of ripstop \\(2, this one writes 1\\)"),
        (json.dumps(GOOD | {"run_id": "other"}).encode(), "for job 'other', not for 'job'"),
        *(
            (json.dumps(GOOD | wrong).encode(), "damaged")
            for wrong in (
                {"beats": []},
                {"round": -1},
                {"round": True},
                {"revision": "1"},
                {"seats": ["a", "a"]},
                {"seats": [1]},
                {"store": None},
                {"store": ["a"]},
                {"coming": [["d"]]},
                {"coming": [["d", 0, None, None]]},
            )
        ),
    ],
)
def test_what_is_no_state_of_this_job_is_refused(blob: bytes, word: str) -> None:
    with pytest.raises(ProtocolError, match=word):
        decode(blob, "job")
