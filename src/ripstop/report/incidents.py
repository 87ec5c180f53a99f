"""Finds the incidents of a job: what ended a round that nobody planned to end, and its root cause.  Pure.

The root cause is the one that the coordinator decided on, or else the first one of `diagnostics/failure_ranking.py`.
"""

from itertools import pairwise

from msgspec.structs import replace

from ripstop.diagnostics.failure_ranking import rank_failures
from ripstop.diagnostics.failure_report import failure_report_log_tail
from ripstop.model.events import HangDiagnosed, RoundEndCause
from ripstop.model.failure import how_it_ended
from ripstop.model.text_formatting import rank_list, truncate
from ripstop.report.facts import PLANNED, Facts, FailedWorkerFacts, RoundFacts
from ripstop.report.model import Incident, JobResult, RoundReport, WorkerReport
from ripstop.telemetry.goodput import RoundSteps

MAX_TITLE = 500
MAX_MESSAGE = 4000


def find_incidents(
    facts: Facts, result: JobResult, rounds: tuple[RoundReport, ...], steps: dict[int, RoundSteps]
) -> tuple[Incident, ...]:
    """The incidents, at most one for each round."""
    downtime = {before.number: after.phases.total for before, after in pairwise(rounds)}
    found = []
    for number in sorted(facts.rounds):
        round = facts.rounds[number]
        is_end = number == facts.highest_round and result not in (JobResult.SUCCEEDED, JobResult.UNFINISHED)
        incident = _incident(facts, round, is_end)
        if incident is not None:
            own = steps.get(number)
            repeated = (own.seconds_lost, own.steps_lost) if own else (0.0, 0)
            found.append(
                replace(
                    incident,
                    downtime=downtime.get(number, 0.0),
                    repeated=repeated[0],
                    repeated_steps=repeated[1],
                )
            )
    return tuple(found)


def _incident(facts: Facts, round: RoundFacts, is_end: bool) -> Incident | None:
    """What ended the round, if it was no plan."""
    if round.cause in PLANNED or (not round.workers and not round.departure and not round.hang):
        return None
    at = round.ended_at if round.ended_at is not None else facts.last_at
    by_node = round.cause in (RoundEndCause.NODE_LOST, RoundEndCause.NODE_LEFT, RoundEndCause.NODE_UNFIT)
    is_node_gone = round.departure is not None and (by_node or (is_end and not round.workers))
    if not is_node_gone and not round.workers:
        return None
    ordered = _ordered_incident_workers(round)
    root, victims, node = None, ordered, ""
    if is_node_gone and round.departure is not None:
        node, why = round.departure
        is_lost = node in facts.nodes and facts.nodes[node].is_lost
        title = (
            f"node {node} was lost: {why.removeprefix('lost: ')}"
            if is_lost
            else f"node {node} {departure_incident_text(why)}"
        )
        cause = round.cause or (RoundEndCause.NODE_LOST if is_lost else RoundEndCause.NODE_LEFT)
    else:
        first, *victims = ordered
        root, node = _incident_worker(facts, first, round.number), first.node
        if round.hang and first.rank in round.hang.suspects:
            root = replace(root, how="the other ranks wait for it")
        at, title = root.at, _incident_title(root, round.hang)
        cause = round.cause or (RoundEndCause.INFRASTRUCTURE if root.is_hang else RoundEndCause.APPLICATION)
    shown = tuple(_incident_worker(facts, worker, round.number) for worker in victims)
    count = round.failures - (root is not None)
    decision = round.decision or ("restarted without the node, which costs no restart" if by_node else "")
    title, decision = truncate(title, MAX_TITLE), truncate(decision, MAX_MESSAGE)
    return Incident(round.number, at, cause, title, decision, is_end, node, root, shown, count, 0.0, 0.0, 0)


def _ordered_incident_workers(round: RoundFacts) -> list[FailedWorkerFacts]:
    """The failed workers, the root cause first."""
    if not round.workers:
        return []
    suspects = round.hang.suspects if round.hang else ()
    ranks = [
        failure.rank for failure in rank_failures(worker.failure(round.number) for worker in round.workers.values())
    ]
    ranks.sort(key=lambda rank: rank not in suspects)
    return [round.workers[rank] for rank in ranks]


def _incident_worker(facts: Facts, worker: FailedWorkerFacts, round: int) -> WorkerReport:
    failure = worker.failure(round)
    node = facts.nodes.get(worker.node)
    evidence = worker.evidence
    return WorkerReport(
        rank=worker.rank,
        node=worker.node,
        host=failure.host or (node.host if node else ""),
        at=failure.at,
        how=how_it_ended(failure) if evidence else "failed",
        message=truncate(failure.message, MAX_MESSAGE),
        pid=failure.pid,
        local_rank=failure.local_rank if evidence else None,
        oom=failure.oom,
        collectives=evidence.collectives if evidence else "",
        is_hang=failure.hang is not None,
        traceback=failure.traceback,
        log_tail=failure_report_log_tail(failure),
        files=evidence.files if evidence else (),
    )


def _incident_title(root: WorkerReport, hang: HangDiagnosed | None) -> str:
    who = f"rank {root.rank} on {root.host}" if root.host else f"rank {root.rank}"
    if root.is_hang:
        ranks = who if hang is None or len(hang.suspects) < 2 else rank_list(sorted(hang.suspects))
        did = "hung" if hang and hang.suspects else "made no progress"
        return f"{ranks} {did}: {hang.why if hang else root.message}"
    message = root.message.split("\n", 1)[0]
    return f"{who} {root.how}" if message in ("", root.how) else f"{who}: {message}"


def departure_incident_text(why: str) -> str:
    """What a node did that left for this reason."""
    return f"left: {why}" if why and not why.startswith("left") else why or "left"
