"""The status of a job and of its nodes, as operators see it.  Changes nothing.  Pure."""

from typing import TYPE_CHECKING

from ripstop.coordinator.restart_budget import Cause
from ripstop.model.round import Node
from ripstop.model.status import JobStatus, NodeState, NodeStatus, Phase

if TYPE_CHECKING:
    from ripstop.coordinator.job import Job


def current_job_status(job: "Job", now: float) -> JobStatus:
    return JobStatus(
        run_id=job.settings.run_id,
        phase=job.phase,
        why=job.why,
        seconds=max(0.0, now - job.phase_since),
        round=job.round,
        world_size=sum(place.slots for place in job.places.values()) if job.phase is Phase.RUNNING else 0,
        restarts=job.restarts.used,
        max_restarts=job.settings.budget.max_restarts,
        min_nodes=job.settings.min_nodes,
        max_nodes=job.settings.max_nodes,
        target=job.formation.target,
        nodes=tuple(_node_status(job, name, member.node) for name, member in job.members.items()),
        last_failure=job.last_failure,
        charged=job.restarts.spent(Cause.APPLICATION, now),
        replication=job.replication.status(now),
    )


def _node_status(job: "Job", name: str, node: Node) -> NodeStatus:
    place = job.places.get(name) if job.phase in (Phase.RUNNING, Phase.CLOSING) else None
    state = (
        NodeState.ABSENT if name in job.liveness.disconnected
        else NodeState.LEAVING if name in job.liveness.leaving
        else NodeState.DONE if name in job.succeeded
        else NodeState.RUNNING if place
        else NodeState.UNHEALTHY if job.members[name].problems
        else NodeState.QUARANTINED if name in job.membership.degraded
        else NodeState.WARMING if name not in job.membership.eligible
        else NodeState.SPARE if job.phase is Phase.RUNNING
        else NodeState.READY
    )  # fmt: skip
    ranks = (place.group_rank, place.first_rank) if place else (-1, -1)
    return NodeStatus(name, node.host, node.slots, node.role, state, *ranks, job.membership.unfit_reason(name))
