"""Training state and nodes that leave: what the schedules reach, and mutants of the rules.

`test_schedules.py` runs the schedules.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from ripstop.agent.machine import Agent
from ripstop.agent.machine_io import AgentCommand, SendToCoordinator
from ripstop.coordinator import departure
from ripstop.coordinator.job import Job
from ripstop.coordinator.restart_budget import Cause
from ripstop.model.events import RoundEndCause
from ripstop.protocol.messages import StateLost
from tests.simulation.rules import Violation
from tests.simulation.state_world import StateWorld

REACHED = (
    "a final commit is made",
    "a spare replaces a slow node",
    "a worker cannot be killed",
    "state is lost",
)
MAX_SCHEDULES = 1_500  # in which a mutant is caught

Patch = Callable[[pytest.MonkeyPatch], None]


def test_schedules_reach_every_kind_of_departure() -> None:
    reached = Counter[str]()
    for seed in range(100):
        world = StateWorld(seed)
        world.run()
        reached += world.reached
    assert [what for what in REACHED if reached[what] < 3] == []


def a_node_that_leaves_has_no_deadline(patch: pytest.MonkeyPatch) -> None:
    original = Agent.deadline

    def deadline(agent: Agent) -> float | None:
        leave_at, agent._leave_at = agent._leave_at, None
        due = original(agent)
        agent._leave_at = leave_at
        return due

    patch.setattr(Agent, "deadline", deadline)


def a_node_with_a_worker_that_cannot_be_killed_stays(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Agent, "_on_workers_unkillable", lambda agent, why: agent._on_workers_stopped())


def a_lost_state_is_charged(patch: pytest.MonkeyPatch) -> None:
    original = Job.end_round

    def end_round(job: Job, cause: Any, why: str, now: float, delay: float = 0.0) -> None:
        if cause is RoundEndCause.STATE_LOST:
            job.restarts.charge(now, Cause.APPLICATION, early=False)
        original(job, cause, why, now, delay)

    patch.setattr(Job, "end_round", end_round)


def a_round_goes_on_without_its_state(patch: pytest.MonkeyPatch) -> None:
    original = Job.end_round

    def end_round(job: Job, cause: Any, why: str, now: float, delay: float = 0.0) -> None:
        if cause is not RoundEndCause.STATE_LOST:
            original(job, cause, why, now, delay)

    patch.setattr(Job, "end_round", end_round)


def workers_go_on_in_place_without_their_state(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Job, "stand_by", lambda job, why: None)


def a_lost_state_is_reported_once(patch: pytest.MonkeyPatch) -> None:
    original = Agent._on_connected

    def on_connected(agent: Agent, host: str) -> Any:
        return [command for command in original(agent, host) if not _is_state_lost(command)]

    patch.setattr(Agent, "_on_connected", on_connected)


def _is_state_lost(command: AgentCommand) -> bool:
    return isinstance(command, SendToCoordinator) and isinstance(command.message, StateLost)


def a_slow_node_stays(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(departure, "begin_straggler_departure", lambda job, slow, now: None)


def a_departure_is_charged(patch: pytest.MonkeyPatch) -> None:
    original = departure.begin_departure

    def begin_departure(job: Job, node: str, leaving: Any) -> None:
        job.restarts.charge(job._now, Cause.APPLICATION, early=False)
        original(job, node, leaving)

    patch.setattr(departure, "begin_departure", begin_departure)


MUTANTS: dict[Patch, int] = {  # a schedule that catches it, tried first
    a_node_that_leaves_has_no_deadline: 122,
    a_node_with_a_worker_that_cannot_be_killed_stays: 3,
    a_lost_state_is_charged: 1,
    a_round_goes_on_without_its_state: 1,
    workers_go_on_in_place_without_their_state: 1,
    a_lost_state_is_reported_once: 79,
    a_slow_node_stays: 46,
    a_departure_is_charged: 0,
}


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.__name__ for mutant in MUTANTS])
def test_a_rule_is_violated_when(mutant: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    with pytest.raises(Violation):
        for seed in (MUTANTS[mutant], *range(MAX_SCHEDULES)):
            StateWorld(seed).run()
