"""Builds the report of a job from its event records.  Pure.

`facts.py` takes the records in; this module and `incidents.py` make the report of the facts.  Durations come from one
clock each: the coordinator's, or a node's own measurements.
"""

from collections import Counter
from collections.abc import Iterable
from itertools import pairwise

from msgspec.structs import replace

from ripstop.model.events import EventRecord
from ripstop.report.facts import Facts, RoundFacts, add_loss_fact, collect_facts
from ripstop.report.incidents import departure_incident_text, find_incidents
from ripstop.report.model import (
    Incident,
    JobResult,
    Loss,
    NodeReport,
    Phases,
    Report,
    RoundReport,
    Setting,
    Summary,
    TimeSpent,
)
from ripstop.telemetry.goodput import RoundSteps

STARTUP = "start-up"


class NoEvents(Exception):
    """There is no record to make a report of."""


def build_report(records: Iterable[EventRecord], notes: Iterable[str] = ()) -> Report:
    """The report of a job; raises `NoEvents`.  `notes` are remarks about the source."""
    facts = collect_facts(records)
    if not facts.count:
        raise NoEvents("there are no events")
    return _build_report_from_facts(facts, tuple(notes))


def _build_report_from_facts(facts: Facts, notes: tuple[str, ...]) -> Report:
    began = facts.coordinator_times[0] if facts.coordinator_times else facts.first_at
    result, why = _build_job_result(facts)
    ended = _report_end_time(facts, result)
    steps = facts.goodput.rounds()
    rounds = _round_reports(facts, steps)
    incidents = find_incidents(facts, result, rounds, steps)
    time = _time_spent(facts, began, ended, rounds, steps)
    cause = incidents[-1].title if incidents and incidents[-1].is_end else ""
    if not cause and result not in (JobResult.SUCCEEDED, JobResult.UNFINISHED):
        cause = why
    spent = facts.goodput.spent(ended)
    done = {number: one for number, one in steps.items() if one.last > one.first}
    duration, count = sum(s.seconds for s in done.values()), sum(s.last - s.first for s in done.values())
    latest = facts.rounds.get(facts.highest_round)
    summary = Summary(
        run_id=facts.run_id,
        result=result,
        why=why,
        cause=cause,
        began=began,
        ended=ended,
        seconds=max(0.0, ended - began),
        rounds=facts.round_count,
        restarts=facts.restarts,
        charged=facts.charged,
        max_restarts=facts.job_started.max_restarts if facts.job_started else None,
        worker_failures=facts.worker_failures,
        nodes=facts.node_count,
        nodes_lost=facts.lost_nodes,
        world_size=latest.world_size if latest else 0,
        goodput=spent.ratio if facts.goodput.has_steps and facts.coordinator_times else None,
        last_step=max((one.last for one in steps.values()), default=None),
        seconds_per_step=duration / count if count else None,
        checkpoints=facts.checkpoints,
        checkpoint_step=facts.checkpoint[0] if facts.checkpoint else None,
        checkpoint_at=facts.checkpoint[1] if facts.checkpoint else None,
    )
    return Report(
        summary=summary,
        time=time,
        incidents=incidents,
        rounds=rounds,
        nodes=_node_reports(facts, incidents),
        actions=tuple(facts.actions),
        programs=tuple(facts.programs)[:8],
        settings=_build_report_settings((*text.partition("=")[::2], count) for text, count in facts.settings.items()),
        versions=_build_report_settings((*version, count) for version, count in facts.versions.items()),
        notes=(*notes, *_build_report_notes(facts)),
        omitted=_build_omitted_counts(facts),
        events=facts.count,
        stragglers=tuple(facts.stragglers),
    )


def _build_job_result(facts: Facts) -> tuple[JobResult, str]:
    if facts.closed is not None:
        return _build_result_from_outcome(facts.closed.outcome), facts.closed.why
    if facts.closing is not None:
        return _build_result_from_outcome(facts.closing[0]), facts.closing[1]
    started = facts.job_started
    host = started.coordinator_node if started and not started.is_elected else ""
    if host and (host in facts.departed or host in facts.ended_agents):
        ended = facts.ended_agents.get(host)
        why = facts.departed.get(host) or (ended.why if ended else "")
        return JobResult.INTERRUPTED, f"node {host}, which ran the coordinator, {departure_incident_text(why)}"
    if facts.coordinator_times is None and facts.ended_agents and facts.ended_agents.keys() >= facts.nodes.keys():
        worst = max(facts.ended_agents.values(), key=lambda end: end.code)
        results = JobResult.FAILED if worst.code < 128 else JobResult.INTERRUPTED
        return results if worst.code else JobResult.SUCCEEDED, worst.why
    orphan = next((node for node in facts.ended_agents if node not in facts.departed), "")
    if facts.coordinator_times and orphan:
        why = f"the process of the coordinator was killed, and node {orphan} ended without it"
        return JobResult.UNFINISHED, f"{why}: {facts.ended_agents[orphan].why}"
    return JobResult.UNFINISHED, (
        "the events have no end of the job: it still runs, or the process of its coordinator was killed "
        "(SIGKILL, out of memory, or a lost machine)"
    )


def _report_end_time(facts: Facts, result: JobResult) -> float:
    if facts.coordinator_times and result is not JobResult.UNFINISHED:
        return facts.coordinator_times[1]
    return facts.last_at


def _build_report_notes(facts: Facts) -> Iterable[str]:
    if facts.earlier_runs:
        yield f"The event file also has {facts.earlier_runs} earlier runs of this id. This is the last one."
    if facts.coordinator_times is None:
        yield "These are the events of single nodes: goodput, rounds and decisions are the coordinator's events."
    if not facts.goodput.has_steps:
        yield "No worker reported a step, so goodput is unknown. Call ripstop.train.heartbeat(step) in the script."


def _build_omitted_counts(facts: Facts) -> dict[str, int]:
    kept = {
        "rounds": (facts.round_count, len(facts.rounds)),
        "nodes": (facts.node_count, len(facts.nodes)),
        "actions": (facts.action_count, len(facts.actions)),
        "stragglers": (facts.straggler_count, len(facts.stragglers)),
    }
    return {name: count - held for name, (count, held) in kept.items() if count > held}


def _round_reports(facts: Facts, steps: dict[int, RoundSteps]) -> tuple[RoundReport, ...]:
    found: list[RoundReport] = []
    previous: RoundFacts | None = None
    for number in sorted(facts.rounds):
        round = facts.rounds[number]
        phases, own = round.phases(previous), steps.get(number)
        count = own.last - own.first if own else 0
        running_at = round.formed_at + phases.start + phases.first_step
        if previous is not None:
            fault_at = (previous.ended_at or round.formed_at) - phases.detect
            running_at = max(round.formed_at, fault_at + phases.total)
            found[-1] = replace(found[-1], trained_until=fault_at)
        found.append(
            RoundReport(
                number=number,
                formed_at=round.formed_at,
                running_at=running_at,
                trained_until=round.ended_at if round.ended_at is not None else facts.last_at,
                ended_at=round.ended_at,
                nodes=round.nodes,
                world_size=round.world_size,
                why=round.why,
                cause=round.cause,
                why_ended=round.why_ended,
                phases=phases,
                first_step=own.first if own else None,
                last_step=own.last if own else None,
                seconds_per_step=own.seconds / count if own and count else None,
                repeated=own.seconds_lost if own else 0.0,
                repeated_steps=own.steps_lost if own else 0,
            )
        )
        previous = round
    return tuple(found)


def _time_spent(
    facts: Facts, began: float, ended: float, rounds: tuple[RoundReport, ...], steps: dict[int, RoundSteps]
) -> TimeSpent:
    losses = dict(facts.losses)
    for before, after in pairwise(rounds):
        add_loss_fact(losses, facts.rounds[before.number], after.phases, steps.get(before.number))
    total = max(0.0, ended - began)
    downtime = min(total, sum(loss.phases.total for loss in losses.values()))
    first = rounds[0] if rounds and not facts.losses else None
    startup = min(total - downtime, max(0.0, first.running_at - began)) if first else 0.0
    if first is not None:
        phases = Phases(
            wait=max(0.0, startup - first.phases.total),
            start=first.phases.start,
            first_step=first.phases.first_step,
        )
        losses[STARTUP] = Loss(STARTUP, 1, phases, 0.0, 0, startup)
    spent = facts.goodput.spent(ended)
    has_steps = facts.goodput.has_steps
    return TimeSpent(
        total=total,
        startup=startup,
        running=max(0.0, total - startup - downtime),
        downtime=downtime,
        in_steps=spent.kept if has_steps else None,
        repeated=spent.lost if has_steps else None,
        repeated_steps=spent.steps_lost,
        losses=tuple(sorted(losses.values(), key=lambda loss: -loss.total)),
    )


def _node_reports(facts: Facts, incidents: tuple[Incident, ...]) -> tuple[NodeReport, ...]:
    roots = Counter(incident.node for incident in incidents)
    return tuple(
        replace(
            node,
            rounds=facts.node_rounds[name],
            worker_failures=facts.node_failures[name],
            root_causes=roots[name],
        )
        for name, node in facts.nodes.items()
    )


def _build_result_from_outcome(outcome: str) -> JobResult:
    """The result; of an outcome that this version does not know, that the job did not succeed."""
    return JobResult(outcome) if outcome in JobResult.__members__.values() else JobResult.FAILED


def _build_report_settings(found: Iterable[tuple[str, str, int]]) -> tuple[Setting, ...]:
    return tuple(Setting(*one) for one in sorted(found))
