"""The simulation can fail: each rule of the machines, broken on purpose, is noticed within a few thousand schedules."""

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from ripstop.agent.machine import Agent
from ripstop.coordinator import ranks
from ripstop.coordinator.budget import Cause, RestartBudget, RestartDecision
from ripstop.coordinator.eligibility import DegradedNodes
from ripstop.coordinator.job import Job
from ripstop.coordinator.membership import Membership
from ripstop.coordinator.quarantine import Quarantine
from tests.simulation.rules import Violation
from tests.simulation.world import World

MOST = 4_000  # schedules

Patch = Callable[[pytest.MonkeyPatch], None]


def an_old_offer_is_used_again(patch: pytest.MonkeyPatch) -> None:
    right = Membership.offer

    def offer(roster: Membership, node: str, ready: Any, now: float) -> None:
        roster.members[node].served = 0
        right(roster, node, ready, now)

    patch.setattr(Membership, "offer", offer)


def an_offer_outlives_its_connection(patch: pytest.MonkeyPatch) -> None:
    right = Agent._on_disconnected

    def unlink(agent: Agent, why: str) -> Any:
        offer = agent._ready
        out = right(agent, why)
        if offer:
            agent._ready, agent._is_opening_port = offer, False
            out = out[:1]
        return out

    patch.setattr(Agent, "_on_disconnected", unlink)


def a_beat_renews_no_lease(patch: pytest.MonkeyPatch) -> None:
    right = Job._hear

    def hear(job: Job, node: str, message: Any, now: float) -> Any:
        before = dict(job._presence._heard)
        out = right(job, node, message, now)
        if node in before and node in job._presence._heard:
            job._presence._heard = {n: before.get(n, t) for n, t in job._presence._heard.items()}
        return out

    patch.setattr(Job, "_hear", hear)


def a_first_round_waits_for_nobody(patch: pytest.MonkeyPatch) -> None:
    right = Membership.is_complete
    patch.setattr(Membership, "is_complete", lambda roster, target, *, first: right(roster, target, first=False))


def silence_is_never_a_loss(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Job, "_expire", lambda job, now: [])


def a_coordinator_that_was_away_blames_the_others(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Job, "_forgive", lambda job, now, late: None)


def a_stale_failure_counts(patch: pytest.MonkeyPatch) -> None:
    right = Job._failed
    patch.setattr(Job, "_failed", lambda job, node, round, failures, now: right(job, node, job.round, failures, now))


def a_stale_success_counts(patch: pytest.MonkeyPatch) -> None:
    right = Job._succeeded
    patch.setattr(Job, "_succeeded", lambda job, node, round: right(job, node, job.round))


def survivors_are_not_held(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Job, "_hold", lambda job, why: [])


def who_rejoins_is_told_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Job, "_sync", lambda job, node, join, now: [])


def the_highest_round_does_not_win(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Job, "_adopt", lambda job, held, now: [])


def rounds_of_the_same_number_are_mixed_up(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Job, "_is_recovered", lambda job, held: held.round == job.round)


def the_budget_is_endless(patch: pytest.MonkeyPatch) -> None:
    def charge(
        restarts: RestartBudget, now: float, cause: Cause = Cause.APPLICATION, *, young: bool
    ) -> RestartDecision:
        restarts._charges[cause].append(now)
        restarts.used += 1
        return RestartDecision(True, 0.0, "why not")

    patch.setattr(RestartBudget, "charge", charge)


def progress_does_not_count(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Job, "_dies_young", lambda _job, _now: True)


def an_inspection_waits_for_ever(patch: pytest.MonkeyPatch) -> None:
    right = Job._inspect

    def inspect(job: Job, now: float) -> Any:
        out = right(job, now)
        job._inquest.inspection = 1e9
        return out

    patch.setattr(Job, "_inspect", inspect)


def restarts_are_forgotten_with_the_coordinator(patch: pytest.MonkeyPatch) -> None:
    right = Job._join
    patch.setattr(Job, "_join", lambda job, node, join, now: right(job, node, replace(join, restarts=0), now))


def a_lost_assignment_is_not_told_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Job, "_missed", lambda job, node, join, now: [])


def an_agent_starts_any_round(patch: pytest.MonkeyPatch) -> None:
    right = Agent._on_assign

    def assigned(agent: Agent, place: Any, why: str) -> Any:
        agent._newest_round = min(agent._newest_round, place.round - 1)
        return right(agent, place, why)

    patch.setattr(Agent, "_on_assign", assigned)


def an_agent_ignores_holds(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Agent, "_on_stand_by", lambda agent, round, why: [])


def an_agent_forgets_that_the_job_is_closing(patch: pytest.MonkeyPatch) -> None:
    right = Agent._on_connected

    def link(agent: Agent, host: str) -> Any:
        closing, agent._closing = agent._closing, None
        out = right(agent, host)
        agent._closing = closing
        return out

    patch.setattr(Agent, "_on_connected", link)


def an_unhealthy_node_keeps_its_place(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DegradedNodes, "replaceable", lambda troubled, now: None)


def an_unhealthy_node_is_given_a_place(patch: pytest.MonkeyPatch) -> None:
    right = Job._join
    patch.setattr(Job, "_join", lambda job, node, join, now: right(job, node, replace(join, problems=()), now))


def a_quarantine_has_no_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Quarantine, "release", lambda quarantine, now: [])


def ranks_are_given_anew_in_every_round(patch: pytest.MonkeyPatch) -> None:
    right = ranks.order
    patch.setattr(ranks, "order", lambda candidates, by: right([(node, None) for node, _ in candidates], by))


MUTANTS: list[Patch] = [
    progress_does_not_count,
    an_old_offer_is_used_again,
    an_offer_outlives_its_connection,
    a_beat_renews_no_lease,
    a_first_round_waits_for_nobody,
    silence_is_never_a_loss,
    a_coordinator_that_was_away_blames_the_others,
    a_stale_failure_counts,
    a_stale_success_counts,
    survivors_are_not_held,
    who_rejoins_is_told_nothing,
    the_highest_round_does_not_win,
    rounds_of_the_same_number_are_mixed_up,
    the_budget_is_endless,
    an_inspection_waits_for_ever,
    restarts_are_forgotten_with_the_coordinator,
    a_lost_assignment_is_not_told_again,
    an_agent_starts_any_round,
    an_agent_ignores_holds,
    an_agent_forgets_that_the_job_is_closing,
    an_unhealthy_node_keeps_its_place,
    an_unhealthy_node_is_given_a_place,
    a_quarantine_has_no_end,
    ranks_are_given_anew_in_every_round,
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.__name__ for mutant in MUTANTS])
def test_the_simulation_notices_when(mutant: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    with pytest.raises((Violation, AssertionError, KeyError)):
        for seed in range(MOST):
            World(seed).run()
