"""A coordinator that changes hands forgets nothing that matters: what one job sends, another one takes over."""

from collections.abc import Iterable

import pytest

from ripstop.coordinator.job import Job
from ripstop.coordinator.job_memory import KEEPERS
from ripstop.coordinator.job_types import JobCommand, JobSettings, NodeDisconnected, NodeMessage, Send, Tick
from ripstop.coordinator.restart_budget import Cause
from ripstop.model.config import Budget, QuarantineLimits, Timing
from ripstop.model.failure import Failure, Hang
from ripstop.model.job_memory import MAX_CHARGES, MAX_FAULTS, MAX_RECORDS, MAX_WHY, FaultMemory, Memory
from ripstop.model.operator_commands import ScaleJob
from ripstop.model.round import Node
from ripstop.protocol.codec import MAX_FRAME_BYTES, encode
from ripstop.protocol.messages import Failed, Inspected, Join, Ready, Remember, Status

HOUR = 3600.0


def settings(**more: object) -> JobSettings:
    values: dict[str, object] = {
        "budget": Budget(3, window=HOUR, backoff=0.0, max_infra_restarts=2, infra_window=HOUR),
        "timing": Timing(last_call=1.0, lease=1000.0),
        "quarantine": QuarantineLimits(1, window=HOUR, cooldown=600.0),
        **more,
    }
    return JobSettings("job", 1, 4, **values)  # type: ignore[arg-type]


def join(name: str) -> Join:
    return Join(Node(name, f"host-{name}", 1), 1, 4, ready=Ready(4000 + ord(name[0]), 0))


def crash(job: Job, rank: int) -> Failed:
    return Failed(job.round, (Failure(rank, 0, job.round, "h", 1.0, exitcode=1, message="ValueError: no"),))


def sent(commands: Iterable[JobCommand]) -> dict[str, Remember]:
    return {c.node: c.message for c in commands if isinstance(c, Send) and isinstance(c.message, Remember)}


class First:
    """A coordinator with the nodes a, b and c, and the newest memory that it sent."""

    def __init__(self, given: JobSettings) -> None:
        self.job = Job(given)
        self.kept: Remember | None = None
        for name in "abc":
            self.on(NodeMessage(name, join(name)), 0.0)
        self.on(Tick(), 2.0)

    def on(self, event: object, now: float) -> None:
        for message in sent(self.job.on(event, now)).values():  # type: ignore[arg-type]
            self.kept = message

    def again(self, now: float) -> None:
        """All offer a port again, for the next round."""
        for name in "abc":
            self.on(NodeMessage(name, Ready(5000 + self.job.round, self.job.round)), now)


def successor(kept: Remember | None, age: float, given: JobSettings) -> Job:
    assert kept is not None
    job = Job(given, 50_000.0)  # another clock
    job.on(NodeMessage("a", Remember(kept.memory, age)), 50_000.0)
    return job


def test_a_job_without_anything_to_remember_sends_nothing() -> None:
    assert First(settings()).kept is None


def test_budgets_keep_their_cause_and_their_window() -> None:
    first = First(settings(quarantine=QuarantineLimits(0)))
    first.on(NodeMessage("a", crash(first.job, 0)), 100.0)
    first.again(101.0)
    hang = Failure(1, 0, first.job.round, "h", 1.0, hang=Hang(1.0, "no heartbeat", "", "", False, "S"))
    first.on(NodeMessage("b", Failed(first.job.round, (hang,))), 200.0)
    for name in "ac":
        first.on(NodeMessage(name, Inspected(first.job.round)), 201.0)
    job = successor(first.kept, 99.0, settings())
    assert job.restarts.used == 2
    now = 50_000.0
    assert [job.restarts.spent(cause, now) for cause in Cause] == [1, 1]
    assert job.restarts.spent(Cause.APPLICATION, now + HOUR - 150.0) == 0, "it was charged 200 s ago"
    assert job.restarts.spent(Cause.INFRASTRUCTURE, now + HOUR - 150.0) == 1, "and this one 99 s ago"


def test_a_join_with_the_number_of_restarts_does_not_charge_them_twice() -> None:
    first = First(settings(quarantine=QuarantineLimits(0)))
    first.on(NodeMessage("a", crash(first.job, 0)), 100.0)
    given = settings()
    late = Job(given, 50_000.0)
    late.on(NodeMessage("b", Join(Node("b", "host-b", 1), 1, 4, restarts=1)), 50_000.0)
    assert first.kept is not None
    late.on(NodeMessage("a", Remember(first.kept.memory, 5.0)), 50_000.1)
    late.on(NodeMessage("a", Join(Node("a", "host-a", 1), 1, 4, restarts=1)), 50_000.2)
    assert late.restarts.used == 1
    assert late.restarts.spent(Cause.APPLICATION, 50_001.0) == 1


def test_a_quarantine_goes_on_and_ends_when_it_would_have() -> None:
    first = First(settings())
    first.on(NodeMessage("b", crash(first.job, 1)), 100.0)
    job = successor(first.kept, 400.0, settings())
    for name in "abc":
        job.on(NodeMessage(name, join(name)), 50_000.0)
    assert "at fault once" in job.membership.quarantine.reason("b")
    assert job.membership.unfit_reason("b") and not job.membership.unfit_reason("a")
    job.on(Tick(), 50_000.0 + 201.0)
    assert not job.membership.quarantine.reason("b"), "600 s after the fault"


def test_the_operators_size_and_the_permission_for_chaos_stay() -> None:
    first = First(settings(allow_chaos=True))
    first.on(ScaleJob(2), 100.0)
    job = successor(first.kept, 1.0, settings())
    assert job.formation.target == 2
    assert job.memory.allow_chaos


def test_the_newest_memory_wins_and_an_older_one_changes_nothing() -> None:
    job = Job(settings(), 10.0)
    job.on(NodeMessage("a", Remember(Memory(7, target=3))), 10.0)
    job.on(NodeMessage("b", Remember(Memory(6, target=2, used=9))), 10.0)
    assert job.formation.target == 3 and job.restarts.used == 0


def test_the_memory_is_sent_to_few_nodes_once() -> None:
    job = Job(JobSettings("job", 1, 40, Timing(last_call=1.0), allow_chaos=True))
    messages: list[tuple[str, Remember]] = []
    for i in range(40):
        name = f"n{i}"
        event = NodeMessage(name, Join(Node(name, "h", 1), 1, 40, ready=Ready(i + 1, 0)))
        messages += sent(job.on(event, 0.0)).items()
    assert job.round == 1
    lowest = {node for node, place in job.places.items() if place.group_rank < KEEPERS}
    assert len(messages) == KEEPERS and dict(messages).keys() == lowest
    assert {message.memory.serial for _, message in messages} == {1}
    assert len(sent(job.on(ScaleJob(30), 1.0))) == KEEPERS, "after a change, all of them"


def test_a_node_that_connects_again_gets_the_memory_again() -> None:
    job = First(settings(allow_chaos=True)).job
    held = job.places["a"]
    job.on(NodeDisconnected("a"), 10.0)
    job.on(ScaleJob(3), 11.0)
    back = Join(Node("a", "host-a", 1), 1, 4, held=held, newest=1, status=Status.RUNNING)
    assert sent(job.on(NodeMessage("a", back), 12.0)).keys() == {"a"}, "it was not connected when the memory changed"
    assert sent(job.on(NodeMessage("a", back), 13.0)).keys() == {"a"}, "the old connection may have lost it"
    assert sent(job.on(Tick(), 14.0)) == {}


def test_a_coordinator_sends_what_it_knew_before_a_node_joined() -> None:
    job = Job(settings(allow_chaos=True))
    assert sent(job.on(Tick(), 0.0)) == {}
    assert sent(job.on(NodeMessage("a", join("a")), 1.0)).keys() == {"a"}


def test_restarts_that_a_node_reports_are_remembered() -> None:
    job = Job(settings(allow_chaos=True))
    job.on(NodeMessage("a", join("a")), 0.0)
    late = Join(Node("b", "host-b", 1), 1, 4, restarts=2)
    messages = sent(job.on(NodeMessage("b", late), 0.1))
    assert {node: message.memory.used for node, message in messages.items()} == {"a": 2, "b": 2}


def test_a_newer_memory_that_changes_nothing_is_replaced_by_the_coordinators_own() -> None:
    job = Job(settings(), 10.0)
    job.on(NodeMessage("a", join("a")), 10.0)
    (first,) = sent(job.on(ScaleJob(3), 10.0)).values()
    (second,) = sent(job.on(NodeMessage("b", Remember(Memory(7, target=2))), 11.0)).values()
    assert (first.memory.serial, first.memory.target) == (1, 3)
    assert (second.memory.serial, second.memory.target) == (8, 3)


@pytest.mark.parametrize("text", ["n" * 256, "\N{PILE OF POO}" * 256])
def test_the_largest_memory_fits_into_a_message(text: str) -> None:
    ages = tuple(float(i) + 1 / 3 for i in range(MAX_CHARGES))
    record = FaultMemory(text, text, ages[:MAX_FAULTS], 1 / 3, text[:MAX_WHY])
    memory = Memory(1, 2**40, ages, ages, 7, (record,) * MAX_RECORDS, 3, allow_chaos=True)
    assert len(encode(Remember(memory, 1 / 3))) < MAX_FRAME_BYTES
