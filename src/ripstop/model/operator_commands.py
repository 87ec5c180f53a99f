"""Operator commands, and when a job rejects them.  Pure.

Both the API and the coordinator's state machine check `operator_command_rejection`: the API to reply with the reason,
the state machine because the job may have changed since.
"""

from msgspec import Struct

from ripstop.model.status import JobStatus, NodeState, Phase


class RestartRound(Struct, frozen=True):
    """Form a new round of the nodes that are ready.  Nothing is charged to the budget."""

    why: str


class DrainNode(Struct, frozen=True):
    """Stop the node's workers; the node leaves the job."""

    node: str
    why: str


class ScaleJob(Struct, frozen=True):
    """Set the target number of nodes."""

    nodes: int


class StopJob(Struct, frozen=True):
    """End the job."""

    why: str


OperatorCommand = RestartRound | DrainNode | ScaleJob | StopJob


def describe_operator_command(command: OperatorCommand) -> str:
    match command:
        case RestartRound():
            return "restart"
        case DrainNode(node):
            return f"drain of node {node}"
        case ScaleJob(nodes):
            return f"scale to {nodes}"
        case StopJob():
            return "stop"


def operator_command_rejection(command: OperatorCommand, job: JobStatus) -> str:
    """Why the job rejects the command; empty if it accepts it."""
    match command:
        case RestartRound() if job.phase is not Phase.RUNNING:
            return f"the job is {job.phase}, and only a running job can be restarted; wait, and see `status`"
        case DrainNode(node) if not job.has_node(node):
            return f"no node {node} is part of the job; `status` lists them"
        case ScaleJob(nodes) if not job.min_nodes <= nodes <= job.max_nodes:
            span = f"{job.min_nodes} to {job.max_nodes} nodes"
            return f"the job runs on {span}, not on {nodes}; choose one of these, or start it with other --nnodes"
    if job.phase in (Phase.CLOSING, Phase.CLOSED):
        return f"the job is {job.phase} ({job.why}) and accepts no more commands; start it again"
    return _operator_command_drain_rejection(command.node, job) if isinstance(command, DrainNode) else ""


def _operator_command_drain_rejection(node: str, job: JobStatus) -> str:
    staying = sum(member.state is not NodeState.LEAVING and member.name != node for member in job.nodes)
    if staying >= job.min_nodes:
        return ""
    need = f"the job needs {job.min_nodes} nodes, and without {node} it has {staying}"
    return f"{need}; stop the job, or add a node first"
