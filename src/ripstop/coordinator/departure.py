"""Nodes that leave a running round on purpose: with notice, or because a spare replaces a slow one.  Pure.

A node that leaves with notice stays until the round has a final commit.  Rules
1.  The coordinator tells all nodes of the round to make it, if another node remains and keeps it in memory, or if the
    nodes write it to disk.  Otherwise, or if workers of another node have already exited 0, the node leaves at once.
2.  When all ranks have made it, the parts of all nodes are copied to their partners, unless the state is equal on all
    ranks, or no node remains.  Then the round ends.  Nothing is charged, and the next round, or the next job with this
    directory for checkpoints, continues from this commit.
3.  If a node cannot make it, the leaving node does not wait.  The leaving node has a deadline of its own.  A round that
    ends meanwhile for another reason cancels the final commit.
"""

from typing import TYPE_CHECKING

from msgspec import Struct, field

from ripstop.coordinator.job_types import Send, StragglerFound
from ripstop.coordinator.replication_plan import MAX_NAME_CHARS, MAX_NUMBER, MAX_STATES
from ripstop.model.events import RoundEndCause
from ripstop.model.status import Phase
from ripstop.protocol import messages

if TYPE_CHECKING:
    from ripstop.coordinator.job import Job


NO_NODE_REMAINS = "no final commit: no other node remains, and without --checkpoint-dir it cannot be kept"
FINISHING = "no final commit: workers of another node have already exited 0"


class Departure(Struct):
    """The final commit of a round; `round` 0: none is being made."""

    round: int = 0
    node: str = ""  # the first that leaves
    why: str = ""
    done: dict[str, tuple[messages.FinalCommit, ...]] = field(default_factory=dict)  # by node
    copying: list[messages.FinalCommit] | None = None  # those that partners copy; None: they were not asked yet


def begin_departure(job: "Job", node: str, leaving: messages.Leaving) -> None:
    """A node leaves, perhaps with notice."""
    why = leaving.why
    if not leaving.is_planned:
        return
    why_not = _why_no_departure_commit(job, leaving)
    if job.departure.round == job.round > 0:
        if why_not:  # with one more node that leaves
            _cancel_departure_commit(job, f"{why}; {why_not}")
        return  # all nodes know already
    if job.phase is not Phase.RUNNING or node not in job.places:
        job.send(node, messages.StandBy(job.round, why))
        return
    if why_not:
        job.send(node, messages.StandBy(job.round, f"{why}; {why_not}"))
        return
    job.departure = Departure(job.round, node, why)
    job.commands += [Send(name, messages.MakeFinalCommit(job.round)) for name in job.places]


def _why_no_departure_commit(job: "Job", leaving: messages.Leaving) -> str:
    """Why there is no final commit (rule 1), or ""."""
    if job.succeeded:
        return FINISHING
    return "" if _node_remains_after_departure(job) or leaving.is_saved_to_disk else NO_NODE_REMAINS


def _node_remains_after_departure(job: "Job") -> bool:
    """Whether the memory of another node keeps the final commit, even while the job waits for more nodes."""
    return job.membership.survivor_count() > 0


def on_final_commit_before_departure(job: "Job", node: str, made: messages.FinalCommitMade) -> None:
    """All workers of this node wait after the final commit, or cannot make it."""
    departure = job.departure
    if made.round != job.round or departure.round != job.round or node not in job.places:
        return
    is_valid = len(made.commits) <= MAX_STATES and all(map(_is_valid_departure_commit, made.commits))
    if made.why_not or not is_valid:
        why_not = made.why_not or f"node {node} reported too many States, or a value that is out of range"
        _cancel_departure_commit(job, f"{departure.why}; no common commit: {why_not}")
        return
    departure.done[node] = made.commits


def _cancel_departure_commit(job: "Job", why: str) -> None:
    """There is no final commit: the leaving nodes do not wait."""
    job.departure = Departure()
    for node in job.liveness.leaving:
        if node in job.places:
            job.send(node, messages.StandBy(job.round, why))


def _is_valid_departure_commit(commit: messages.FinalCommit) -> bool:
    return len(commit.state) <= MAX_NAME_CHARS and 0 <= commit.number <= MAX_NUMBER


def end_round_for_departure(job: "Job", now: float) -> bool:
    """End the round if all nodes have made its final commit, and have copies of it where they need them."""
    departure = job.departure
    if departure.round != job.round or not job.places.keys() <= departure.done.keys():
        return False
    last = _departure_commits(departure)
    if _node_remains_after_departure(job) and all(place.partner for place in job.places.values()):
        if departure.copying is None:
            departure.copying = _request_departure_copies(job, last)
        if not all(_departure_commit_has_copies(job, commit) for commit in departure.copying):
            return False
    number = max((commit.number for commit in last), default=0)
    why = f"node {departure.node} leaves: {departure.why}; all ranks have commit {number}"
    job.end_round(RoundEndCause.NODE_LEFT, why, now)
    return True


def _departure_commits(departure: Departure) -> list[messages.FinalCommit]:
    """One for each State; it needs copies if any node says so."""
    last: dict[str, messages.FinalCommit] = {}
    for commit in (commit for commits in departure.done.values() for commit in commits):
        if commit.state not in last or commit.needs_copies:
            last[commit.state] = commit
    return list(last.values())


def _request_departure_copies(job: "Job", last: list[messages.FinalCommit]) -> list[messages.FinalCommit]:
    """Ask for the missing copies; the commits that will have them.  Copies of too many States are not asked for."""
    asked = []
    for commit in last:
        if commit.needs_copies and not _departure_commit_has_copies(job, commit):
            request = job.replication.request(job.round, commit.state, commit.number)
            if request is not None:
                asked.append(commit)
                job.commands += [Send(name, request) for name in job.places]
    return asked


def _departure_commit_has_copies(job: "Job", commit: messages.FinalCommit) -> bool:
    complete = job.replication.complete(commit.state)
    return complete is not None and (complete.round, complete.number) >= (job.round, commit.number)


def begin_straggler_departure(job: "Job", slow: StragglerFound, now: float) -> None:
    """Let a spare take the place of a slow node, if one is ready."""
    if slow.round != job.round or job.phase is not Phase.RUNNING or slow.node not in job.places or job.succeeded:
        return
    if job.membership.waiting and slow.node in job.membership.eligible:
        job.events += job.membership.isolate(slow.node, slow.why, now)
