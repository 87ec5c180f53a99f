"""What operators may want of a job, and why they cannot have it.  Pure.

Whoever takes a wish asks `objection` first: the API, to refuse it with words, and the coordinator's machine, which is
the one to grant it.
"""

from ripstop.observe.status import JobStatus, NodeState, Phase
from ripstop.values import dataclass


@dataclass(frozen=True, slots=True)
class Restart:
    """A new round, of whoever is there; nobody is charged."""

    why: str


@dataclass(frozen=True, slots=True)
class Drain:
    """This node leaves the job, as if it had been told to stop."""

    node: str
    why: str


@dataclass(frozen=True, slots=True)
class Scale:
    """The job uses so many nodes, if it can."""

    nodes: int


@dataclass(frozen=True, slots=True)
class Close:
    """The job ends."""

    why: str


Wish = Restart | Drain | Scale | Close


def in_words(wish: Wish) -> str:
    match wish:
        case Restart():
            return "restart"
        case Drain(node):
            return f"drain of node {node}"
        case Scale(nodes):
            return f"scale to {nodes}"
        case Close():
            return "stop"


def objection(wish: Wish, job: JobStatus) -> str:
    """Why the job will not; empty when it will."""
    match wish:
        case Restart() if job.phase is not Phase.RUNNING:
            return f"the job is {job.phase}, and only a running one can be restarted; wait, `status` says more"
        case Drain(node) if not is_member(node, job):
            return f"no node {node} is part of the job; `status` lists them"
        case Scale(nodes) if not job.min_nodes <= nodes <= job.max_nodes:
            span = f"{job.min_nodes} to {job.max_nodes} nodes"
            return f"the job runs on {span}, not on {nodes}; choose one of these, or start it with other --nnodes"
    if job.phase in (Phase.CLOSING, Phase.CLOSED):
        return f"the job is {job.phase} ({job.why}), and cannot be steered any more; start it again"
    return _objection_to_drain(wish.node, job) if isinstance(wish, Drain) else ""


def is_member(node: str, job: JobStatus) -> bool:
    return any(member.name == node for member in job.nodes)


def _objection_to_drain(node: str, job: JobStatus) -> str:
    staying = sum(member.state is not NodeState.LEAVING and member.name != node for member in job.nodes)
    if staying >= job.min_nodes:
        return ""
    need = f"the job needs {job.min_nodes} nodes, and without {node} it has {staying}"
    return f"{need}; stop the job, or add a node first"
