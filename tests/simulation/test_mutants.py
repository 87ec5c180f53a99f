"""The simulation can fail: each mutant of the machines violates a rule within a few thousand schedules."""

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from ripstop.agent.machine import Agent
from ripstop.coordinator import failure_policy, job, ranks, recovery
from ripstop.coordinator.degraded_nodes import DegradedNodes
from ripstop.coordinator.formation import Formation
from ripstop.coordinator.job import Job
from ripstop.coordinator.membership import Membership
from ripstop.coordinator.quarantine import Quarantine
from ripstop.coordinator.restart_budget import Cause, RestartBudget, RestartDecision
from ripstop.model.operator_commands import DrainNode, RestartRound
from tests.simulation.rules import Violation
from tests.simulation.world import World

MAX_SCHEDULES = 6_000

Patch = Callable[[pytest.MonkeyPatch], None]


def an_old_port_is_used_again(patch: pytest.MonkeyPatch) -> None:
    original = Membership.set_ready

    def set_ready(membership: Membership, node: str, ready: Any, now: float) -> None:
        membership.members[node].served = 0
        original(membership, node, ready, now)

    patch.setattr(Membership, "set_ready", set_ready)


def an_offered_port_outlives_its_connection(patch: pytest.MonkeyPatch) -> None:
    original = Agent._on_disconnected

    def unlink(agent: Agent, why: str) -> Any:
        offer = agent._ready
        out = original(agent, why)
        if offer:
            agent._ready, agent._is_opening_port = offer, False
            out = out[:1]
        return out

    patch.setattr(Agent, "_on_disconnected", unlink)


def a_worker_that_is_stuck_in_its_last_round_stays(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Agent, "_replace", lambda agent, ranks, why: agent._reforming.clear() or [])


def a_worker_that_failed_goes_on_in_place(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Agent, "_failed_ranks", lambda agent: set())


def a_heartbeat_renews_no_lease(patch: pytest.MonkeyPatch) -> None:
    for name in ("_on_message", "renew"):
        original = getattr(Job, name)

        def without_renewal(job: Job, node: str, *rest: Any, original: Any = original) -> Any:
            before = dict(job.liveness._last_received)
            out = original(job, node, *rest)
            if node in before and node in job.liveness._last_received:
                job.liveness._last_received = {n: before.get(n, t) for n, t in job.liveness._last_received.items()}
            return out

        patch.setattr(Job, name, without_renewal)


def the_first_round_waits_for_no_node(patch: pytest.MonkeyPatch) -> None:
    original = Membership.is_complete
    patch.setattr(
        Membership, "is_complete", lambda membership, target, *, first: original(membership, target, first=False)
    )


def a_silent_node_is_never_lost(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Job, "_remove_expired", lambda job, now: [])


def a_suspended_coordinator_extends_no_lease(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Job, "_extend_deadlines", lambda job, now, late: None)


def a_stale_failure_counts(patch: pytest.MonkeyPatch) -> None:
    original = Job._on_failed
    patch.setattr(
        Job, "_on_failed", lambda job, node, round, failures, now: original(job, node, job.round, failures, now)
    )


def a_stale_success_counts(patch: pytest.MonkeyPatch) -> None:
    original = Job._on_succeeded
    patch.setattr(Job, "_on_succeeded", lambda job, node, round: original(job, node, job.round))


def survivors_are_not_stopped(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Job, "_wait_for_nodes", lambda job, why: [])


def a_rejoining_node_is_not_synchronized(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Job, "_synchronize", lambda job, node, join, now: [])


def the_highest_round_does_not_win(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(recovery, "recover_newer_round", lambda job, held, now: [])


def rounds_with_the_same_number_are_treated_as_one(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(recovery, "is_in_recovery_round", lambda job, held: held.round == job.round)


def the_budget_is_unlimited(patch: pytest.MonkeyPatch) -> None:
    def charge(
        restarts: RestartBudget, now: float, cause: Cause = Cause.APPLICATION, *, early: bool
    ) -> RestartDecision:
        restarts._charges[cause].append(now)
        restarts.used += 1
        return RestartDecision(True, 0.0, "unlimited")

    patch.setattr(RestartBudget, "charge", charge)


def progress_is_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(job, "is_early_for_restart_budget", lambda run_time, progressed: True)


def a_diagnosis_never_ends(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(failure_policy, "DIAGNOSIS_TIMEOUT_S", 1e9)


def restarts_are_forgotten_with_the_coordinator(patch: pytest.MonkeyPatch) -> None:
    original = Job._on_join
    patch.setattr(Job, "_on_join", lambda job, node, join, now: original(job, node, replace(join, restarts=0), now))


def a_lost_assignment_is_not_sent_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Job, "_assign_again", lambda job, node, join, now: [])


def an_agent_starts_any_round(patch: pytest.MonkeyPatch) -> None:
    original = Agent._on_assign

    def assigned(agent: Agent, place: Any, why: str, now: float) -> Any:
        agent._newest_round = min(agent._newest_round, place.round - 1)
        return original(agent, place, why, now)

    patch.setattr(Agent, "_on_assign", assigned)


def an_agent_ignores_stand_by(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Agent, "_on_stand_by", lambda agent, round, why: [])


def an_agent_forgets_that_the_job_is_closing(patch: pytest.MonkeyPatch) -> None:
    original = Agent._on_connected

    def link(agent: Agent, host: str) -> Any:
        closing, agent._closing = agent._closing, None
        out = original(agent, host)
        agent._closing = closing
        return out

    patch.setattr(Agent, "_on_connected", link)


def an_unhealthy_node_keeps_its_place(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DegradedNodes, "replaceable", lambda nodes, now: None)


def an_unhealthy_node_gets_a_place(patch: pytest.MonkeyPatch) -> None:
    original = Job._on_join
    patch.setattr(Job, "_on_join", lambda job, node, join, now: original(job, node, replace(join, problems=()), now))


def a_quarantine_has_no_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Quarantine, "release", lambda quarantine, now: [])


def survivors_lose_their_ranks(patch: pytest.MonkeyPatch) -> None:
    original = ranks.order
    patch.setattr(ranks, "order", lambda candidates, by: original([(node, None) for node, _ in candidates], by))


def an_operators_restart_is_ignored(patch: pytest.MonkeyPatch) -> None:
    original = Job._on_operator_command

    def on_operator_command(job: Job, command: Any, now: float) -> Any:
        return [] if isinstance(command, RestartRound) else original(job, command, now)

    patch.setattr(Job, "_on_operator_command", on_operator_command)


def a_drain_is_not_sent(patch: pytest.MonkeyPatch) -> None:
    original = Job._on_operator_command

    def on_operator_command(job: Job, command: Any, now: float) -> Any:
        return [] if isinstance(command, DrainNode) else original(job, command, now)

    patch.setattr(Job, "_on_operator_command", on_operator_command)


def a_drained_node_stays(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Agent, "_on_drain", lambda agent, why, now: [])


def an_operators_scale_is_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Formation, "scale", lambda formation, nodes: None)


MUTANTS: dict[Patch, int] = {  # a schedule that catches it, tried first
    an_operators_restart_is_ignored: 14,
    a_drain_is_not_sent: 10,
    a_drained_node_stays: 47,
    an_operators_scale_is_ignored: 34,
    progress_is_ignored: 65,
    an_old_port_is_used_again: 343,
    an_offered_port_outlives_its_connection: 211,
    a_worker_that_is_stuck_in_its_last_round_stays: 0,
    a_worker_that_failed_goes_on_in_place: 1,
    a_heartbeat_renews_no_lease: 0,
    the_first_round_waits_for_no_node: 0,
    a_silent_node_is_never_lost: 2,
    a_suspended_coordinator_extends_no_lease: 95,
    a_stale_failure_counts: 27,
    a_stale_success_counts: 273,
    survivors_are_not_stopped: 10,
    a_rejoining_node_is_not_synchronized: 172,
    the_highest_round_does_not_win: 172,
    rounds_with_the_same_number_are_treated_as_one: 3644,
    the_budget_is_unlimited: 1,
    a_diagnosis_never_ends: 193,
    restarts_are_forgotten_with_the_coordinator: 12,
    a_lost_assignment_is_not_sent_again: 372,
    an_agent_starts_any_round: 287,
    an_agent_ignores_stand_by: 10,
    an_agent_forgets_that_the_job_is_closing: 886,
    an_unhealthy_node_keeps_its_place: 413,
    an_unhealthy_node_gets_a_place: 702,
    a_quarantine_has_no_end: 57,
    survivors_lose_their_ranks: 1,
}


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.__name__ for mutant in MUTANTS])
def test_a_rule_is_violated_when(mutant: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    with pytest.raises(Violation):
        for seed in (MUTANTS[mutant], *range(MAX_SCHEDULES)):
            World(seed).run()
