"""Quarantine: when it starts and ends, and which node inherits it."""

from ripstop.coordinator.quarantine import Quarantine
from ripstop.model import config
from ripstop.model.round import Node

LIMITS = config.QuarantineLimits(failures=2, window=100.0, cooldown=50.0)


def node(name: str, host: str = "") -> Node:
    return Node(name, host or f"host-{name}", 1)


def in_quarantine() -> Quarantine:
    """Node a is in quarantine since time 10."""
    quarantine = Quarantine(LIMITS)
    assert quarantine.record_fault(node("a"), "crash", 5.0) == ""
    assert quarantine.record_fault(node("a"), "crash", 10.0) == "at fault 2 times in 5 s, last: crash"
    return quarantine


def test_faults_outside_the_window_do_not_count() -> None:
    quarantine = Quarantine(LIMITS)
    for now in (0.0, 101.0, 202.0, 303.0):
        assert quarantine.record_fault(node("a"), "crash", now) == ""
    assert quarantine.reason("a") == ""


def test_a_release_deletes_the_fault_record() -> None:
    quarantine = in_quarantine()
    assert quarantine.next_release() == 60.0
    assert quarantine.release(59.9) == []
    assert quarantine.release(60.0) == ["a"]
    assert (quarantine.reason("a"), quarantine.next_release()) == ("", None)
    assert quarantine.record_fault(node("a"), "crash", 61.0) == ""


def test_a_fault_in_quarantine_does_not_prolong_it() -> None:
    quarantine = in_quarantine()
    assert quarantine.record_fault(node("a"), "crash", 20.0) == ""
    assert quarantine.next_release() == 60.0


def test_a_restarted_agent_inherits_the_quarantine_of_its_host() -> None:
    quarantine = in_quarantine()
    quarantine.inherit_record(node("a2", "host-a"), [node("b")], 20.0)
    assert quarantine.reason("a2")
    assert quarantine.release(60.0) == ["a2"]


def test_no_agent_inherits_a_quarantine_on_a_shared_host() -> None:
    quarantine = in_quarantine()
    quarantine.inherit_record(node("a2", "host-a"), [node("a3", "host-a")], 20.0)
    quarantine.inherit_record(node("c"), [], 20.0)
    assert (quarantine.reason("a2"), quarantine.reason("c")) == ("", "")
    assert quarantine.reason("a")


def test_a_limit_of_zero_failures_disables_quarantine() -> None:
    quarantine = Quarantine(config.QuarantineLimits(failures=0))
    assert all(quarantine.record_fault(node("a"), "crash", float(now)) == "" for now in range(50))
    assert quarantine.next_release() is None
