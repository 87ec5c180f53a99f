"""What operators may want of a job, and why they cannot have it.  Pure.

Whoever takes a wish asks `objection` first: the API, to refuse it with words, and the coordinator's machine, which is
the one to grant it.
"""

from msgspec import Struct

from ripstop.model.status import JobStatus, NodeState, Phase


class RestartRound(Struct, frozen=True):
    """A new round, of whoever is there; nobody is charged."""

    why: str


class DrainNode(Struct, frozen=True):
    """This node leaves the job, as if it had been told to stop."""

    node: str
    why: str


class ScaleJob(Struct, frozen=True):
    """The job uses so many nodes, if it can."""

    nodes: int


class StopJob(Struct, frozen=True):
    """The job ends."""

    why: str


OperatorCommand = RestartRound | DrainNode | ScaleJob | StopJob


def describe(wish: OperatorCommand) -> str:
    match wish:
        case RestartRound():
            return "restart"
        case DrainNode(node):
            return f"drain of node {node}"
        case ScaleJob(nodes):
            return f"scale to {nodes}"
        case StopJob():
            return "stop"


def rejection_reason(wish: OperatorCommand, job: JobStatus) -> str:
    """Why the job will not; empty when it will."""
    match wish:
        case RestartRound() if job.phase is not Phase.RUNNING:
            return f"the job is {job.phase}, and only a running one can be restarted; wait, `status` says more"
        case DrainNode(node) if not is_member(node, job):
            return f"no node {node} is part of the job; `status` lists them"
        case ScaleJob(nodes) if not job.min_nodes <= nodes <= job.max_nodes:
            span = f"{job.min_nodes} to {job.max_nodes} nodes"
            return f"the job runs on {span}, not on {nodes}; choose one of these, or start it with other --nnodes"
    if job.phase in (Phase.CLOSING, Phase.CLOSED):
        return f"the job is {job.phase} ({job.why}), and cannot be steered any more; start it again"
    return _objection_to_drain(wish.node, job) if isinstance(wish, DrainNode) else ""


def is_member(node: str, job: JobStatus) -> bool:
    return any(member.name == node for member in job.nodes)


def _objection_to_drain(node: str, job: JobStatus) -> str:
    staying = sum(member.state is not NodeState.LEAVING and member.name != node for member in job.nodes)
    if staying >= job.min_nodes:
        return ""
    need = f"the job needs {job.min_nodes} nodes, and without {node} it has {staying}"
    return f"{need}; stop the job, or add a node first"
