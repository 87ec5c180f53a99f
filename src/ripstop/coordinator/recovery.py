"""How a new coordinator recovers a round from the nodes that rejoin.  Pure.

Rules: (1) the highest round wins; (2) the round continues when all its nodes are back within a lease; (3) a round that
failed meanwhile waits only as long as a live node needs to reconnect, a third of a lease; (4) a failed round with ranks
by node number (`RankBy.SLOT`) does not wait for a missing node if a new node with the same number has joined; (5) a
round in which only the former coordinator's node is missing waits `RECONNECT_TIMEOUT_S` for it, and not at all if that
node is lost; (6) in a large job, whose nodes spread their reconnects, all these times begin again with each node that
returns.
"""

from typing import TYPE_CHECKING

from ripstop.coordinator.liveness import RECONNECT_TIMEOUT_S
from ripstop.model.events import RoundEndCause, RoundFound, RoundResumed
from ripstop.model.round import Place, RankBy
from ripstop.model.status import Phase
from ripstop.protocol.pacing import LARGE_JOB_NODES

if TYPE_CHECKING:
    from ripstop.coordinator.job import Job


def recover_newer_round(job: "Job", held: Place, now: float) -> None:
    """A node has a newer round than this coordinator."""
    job.stand_by(f"round {held.round} is newer")
    is_recovery = not job.round or job.phase is Phase.RECOVERING
    job.round, job.recovered_place = held.round, held
    if is_recovery:
        job.formation.adopt_size(held.group_size)
    job.start_round({}, now)
    if is_recovery:
        job.enter(Phase.RECOVERING, now)
        job.last_return = now
        job.events.append(RoundFound(held.round, held.group_size))
    else:
        job.end_round(RoundEndCause.COORDINATOR, f"another coordinator formed round {held.round}", now)


def is_in_recovery_round(job: "Job", held: Place) -> bool:
    """Whether the place is in the round to recover: another coordinator may have used the same round number."""
    place = job.recovered_place
    return place is not None and (held.round, held.store) == (place.round, place.store)


def coordinator_recovery_deadline(job: "Job") -> float:
    """When the round ends if not all its nodes are back."""
    assert job.recovered_place is not None
    since = job.last_return if job.recovered_place.group_size > LARGE_JOB_NODES else job.phase_since  # rule 6
    if _recovery_lacks_only_former_coordinator(job):
        assert job.predecessor is not None
        return since + (0.0 if job.predecessor.is_lost else RECONNECT_TIMEOUT_S)
    lease = job.settings.timing.lease
    timeout = min(lease, lease / 3 + RECONNECT_TIMEOUT_S) if job.failure_policy.has_failure else lease
    return since + timeout


def recover_or_end_round(job: "Job", now: float) -> bool:
    """Let the round go on if all its nodes are back; end it if they do not return.  Whether either happened."""
    assert job.recovered_place is not None
    returned, size = len(job.places), job.recovered_place.group_size
    if returned >= size:
        job.enter(Phase.RUNNING, now)
        job.why = "the coordinator was restarted"
        job.events.append(RoundResumed(job.round, returned))
        return True
    if now < coordinator_recovery_deadline(job) and not _recovery_has_replacements(job, size):
        return False
    job.end_round(RoundEndCause.COORDINATOR, f"{returned} of {size} nodes returned", now)
    return True


def _recovery_lacks_only_former_coordinator(job: "Job") -> bool:
    """Whether the former coordinator's node is the only one that is not back (rule 5)."""
    former, place = job.predecessor, job.recovered_place
    if former is None or place is None or not former.node or former.node in job.members:
        return False
    return place.round == former.round and len(job.places) == place.group_size - 1


def _recovery_has_replacements(job: "Job", size: int) -> bool:
    """Whether every missing node of a failed round has a replacement with its number (rule 4).

    This is known only if the rank of every node that is back equals its number.
    """
    if job.settings.rank_by is not RankBy.SLOT or not job.failure_policy.has_failure or len(job.members) < size:
        return False
    numbers = {name: member.node.number for name, member in job.members.items()}
    if any(numbers[name] != place.group_rank for name, place in job.places.items()):
        return False
    new_numbers = {number for name, number in numbers.items() if name not in job.places}
    return new_numbers >= set(range(size)) - {place.group_rank for place in job.places.values()}
