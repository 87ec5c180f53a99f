"""Whether a node may join a job.  Pure."""

from collections.abc import Iterable

from ripstop.coordinator.settings import JobSettings
from ripstop.model.config import MAX_SLOTS
from ripstop.model.round import Node
from ripstop.protocol.limits import MAX_NAME, invalid_name
from ripstop.protocol.messages import Join


def rejection_reason(node: str, join: Join, settings: JobSettings, staying: Iterable[Node]) -> str:
    """Why the node cannot join the nodes that stay in the job; empty when it can."""
    low, high = settings.min_nodes, settings.max_nodes
    if (low, high) != (join.min_nodes, join.max_nodes):
        return (
            f"--nnodes must be the same on every node: this job has {low}:{high}, "
            f"node {node} has {join.min_nodes}:{join.max_nodes}; start it with --nnodes={low}:{high}"
        )
    if join.rank_by is not settings.rank_by:
        return (
            f"--rdzv-conf rank_by must be the same on every node: this job has {settings.rank_by}, "
            f"node {node} has {join.rank_by}; start it with --rdzv-conf=rank_by={settings.rank_by}"
        )
    if join.node.id != node:
        return f"a node must join under its own name: {node} joined as {join.node.id[:80]!r}; restart the agent"
    if not 1 <= join.node.slots <= MAX_SLOTS:
        return f"a node has 1 to {MAX_SLOTS} workers, node {node} has {join.node.slots}; change --nproc-per-node"
    if what := invalid_name(join.node, join.held):
        return f"a name is text of at most {MAX_NAME} characters, the {what} of node {node} is not; change it"
    return _rank_rejection_reason(join.node, high, staying) if settings.fixed_ranks else ""


def _rank_rejection_reason(node: Node, nodes: int, staying: Iterable[Node]) -> str:
    """In a static job every node requests a different rank."""
    rank = node.requested_rank
    if rank is None or not 0 <= rank < nodes:
        return f"a static job needs --node-rank from 0 to {nodes - 1} on every node, node {node.id} has {rank}"
    taken = next((other.id for other in staying if other.requested_rank == rank and other.id != node.id), None)
    return f"--node-rank={rank} is taken by node {taken}; use each rank once" if taken is not None else ""
