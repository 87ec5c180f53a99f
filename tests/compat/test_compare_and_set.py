"""One participant of a compare-and-set rendezvous, as transcripts: its steps, and the values that it rejects."""

import json

import pytest
from msgspec.structs import replace

from ripstop.compat.rendezvous.compare_and_set import (
    CompareAndSetParticipant,
    CompareAndSetState,
    Done,
    Formed,
    ParticipantSettings,
    RendezvousClosed,
    Step,
    StoreAddress,
    Wait,
    Write,
    decode_compare_and_set_state,
    encode_compare_and_set_state,
)
from ripstop.model.errors import ProtocolError

SETTINGS = ParticipantSettings(min_nodes=2, max_nodes=3, last_call=30.0, heartbeat_interval=5.0, heartbeat_timeout=15.0)


def at(node: str) -> StoreAddress:
    return StoreAddress(node, 4000)


class Group:
    """Participants that take steps one after the other, on one state."""

    def __init__(self, *nodes: str) -> None:
        self.state = CompareAndSetState("job")
        self.members = {node: CompareAndSetParticipant(node, SETTINGS) for node in nodes}

    def join(self, node: str, now: float = 0.0) -> Step:
        """Step until there is nothing more to write."""
        while isinstance(step := self.members[node].join(self.state, at(node), now), Write):
            self.state = step.state
        return step

    def heartbeat(self, node: str, now: float) -> Step:
        if isinstance(step := self.members[node].heartbeat(self.state, now), Write):
            self.state = step.state
        return step


def rendezvous(group: Group, round: int) -> None:
    """Three nodes join, and the last one forms the round."""
    assert group.join("a") == group.join("b") == Wait()
    assert [group.join(node) for node in "cab"] == [Formed(round, rank, 3, at("a"), "a") for rank in (2, 0, 1)]


def three_in_a_round() -> Group:
    group = Group("a", "b", "c", "d")
    rendezvous(group, 1)
    return group


def test_max_nodes_form_a_round_at_once() -> None:
    assert three_in_a_round().state.members == ("a", "b", "c")


def test_min_nodes_wait_for_the_last_call() -> None:
    group = Group("a", "b")
    group.join("a")
    assert group.join("b") == Wait()
    for now in (5.0, 10.0, 15.0, 20.0, 25.0):
        assert group.join("a", now) == Wait() == group.join("b", now)
    assert group.join("b", 30.0) == Formed(1, 1, 2, at("a"), "a")


def test_enough_survivors_need_no_last_call_and_keep_their_ranks() -> None:
    group = three_in_a_round()
    group.join("c")
    group.state = replace(group.state, departed=group.state.departed | {"a"}, heartbeats={"b": 1, "c": 2})
    assert group.join("b") == Formed(2, 1, 2, at("c"), "c")
    assert group.join("c") == Formed(2, 0, 2, at("c"), "c")  # its earlier rank is above the new size


def test_the_others_see_that_a_node_has_left_the_round_and_waits() -> None:
    group = three_in_a_round()
    assert group.join("b") == Wait()
    assert [group.members[node].waiting(group.state) for node in "ac"] == [1, 1]


def test_a_spare_does_not_count_as_waiting_until_there_is_room() -> None:
    group = three_in_a_round()
    assert group.join("d") == Wait(spare=True)
    assert group.members["a"].waiting(group.state) == 0
    group.join("b")
    assert group.members["a"].waiting(group.state) == 2


def test_closing_is_a_graceful_exit_for_a_spare_and_an_error_for_others() -> None:
    group = three_in_a_round()
    group.join("d")
    step = group.members["a"].close(group.state)
    assert isinstance(step, Write)
    group.state = step.state
    assert group.join("d") == RendezvousClosed(spare=True)
    assert group.join("b") == RendezvousClosed(spare=False)
    assert group.members["b"].close(group.state) == group.heartbeat("b", 100.0) == Done()


def test_a_node_whose_heartbeat_does_not_change_is_removed() -> None:
    group = three_in_a_round()
    for now in range(0, 15, 4):
        group.heartbeat("a", float(now))
        group.heartbeat("b", float(now))
    assert group.state.active() == ["a", "b", "c"]
    group.heartbeat("a", 15.0)
    assert group.state.active() == ["a", "b"]
    assert group.members["c"].waiting(group.state) == 1  # its round is over


@pytest.mark.parametrize("jump", [1e6, -1e6])
def test_a_clock_that_jumps_removes_no_node(jump: float) -> None:
    group = three_in_a_round()
    group.heartbeat("a", 0.0)
    group.heartbeat("a", jump)
    assert group.state.active() == ["a", "b", "c"]


def test_a_store_that_has_lost_the_state_gets_it_back() -> None:
    group = three_in_a_round()
    group.state = CompareAndSetState("job")
    group.join("d")
    assert group.members["b"].waiting(group.state) == 0  # healthy workers continue
    group.heartbeat("b", 0.0)
    assert (group.state.round, group.state.members) == (1, ("a", "b", "c"))
    group.join("a")
    assert group.members["b"].waiting(group.state) == 2


def test_round_numbers_continue_after_a_lost_state() -> None:
    group = three_in_a_round()
    group.state = CompareAndSetState("job")
    rendezvous(group, 2)


def test_a_round_with_an_outdated_store_address_is_left() -> None:
    group = Group("a", "b", "c")
    for node in "abc":
        group.join(node)
    step = group.members["a"].join(group.state, StoreAddress("a", 4001), 0.0)
    assert isinstance(step, Write) and step.state.departed == {"a"}
    assert step.state.candidates[0].store == StoreAddress("a", 4001)


def test_a_node_that_leaves_is_removed() -> None:
    group = Group("a", "b")
    group.join("a")
    step = group.members["a"].leave(group.state)
    assert isinstance(step, Write) and step.state.candidates == () and step.state.heartbeats == {}
    assert group.members["a"].leave(step.state) == Done()


def test_an_encoded_state_decodes_to_itself() -> None:
    group = three_in_a_round()
    group.join("d")
    group.join("b")
    assert decode_compare_and_set_state(encode_compare_and_set_state(group.state), "job") == group.state


GOOD = json.loads(encode_compare_and_set_state(three_in_a_round().state))


def test_a_state_without_one_of_its_fields_is_rejected() -> None:
    for name in GOOD.keys() - {"ripstop", "run_id"}:
        value = {key: each for key, each in GOOD.items() if key != name}
        with pytest.raises(ProtocolError, match="damaged"):
            decode_compare_and_set_state(json.dumps(value).encode(), "job")


def test_the_stored_format_is_that_of_version_1() -> None:
    assert GOOD == {
        "ripstop": 1,
        "run_id": "job",
        "revision": 3,
        "writer": "c",
        "round": 1,
        "seats": ["a", "b", "c"],
        "store": ["a", 4000],
        "gone": [],
        "coming": [],
        "beats": {"a": 1, "b": 2, "c": 3},
        "closed": False,
    }


@pytest.mark.parametrize(
    ("value", "message"),
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
                {"closed": 1},
                {"gone": None},
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
def test_a_value_that_is_no_state_of_this_job_is_rejected(value: bytes, message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        decode_compare_and_set_state(value, "job")
