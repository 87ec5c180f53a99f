"""Who may not join a job, and why.  Pure."""

from collections.abc import Iterable

from ripstop.coordinator.settings import JobSettings
from ripstop.model.config import MOST_SLOTS
from ripstop.model.round import Node
from ripstop.protocol.limits import NAME, misnamed
from ripstop.protocol.messages import Join


def objection(node: str, join: Join, settings: JobSettings, staying: Iterable[Node]) -> str:
    """Why this node cannot be part of the job, beside those that stay in it; empty when it can."""
    low, high = settings.min_nodes, settings.max_nodes
    if (low, high) != (join.min_nodes, join.max_nodes):
        return (
            f"--nnodes must be the same on every node: this job has {low}:{high}, "
            f"node {node} came with {join.min_nodes}:{join.max_nodes}; start it with --nnodes={low}:{high}"
        )
    if join.rank_by is not settings.rank_by:
        return (
            f"--rdzv-conf rank_by must be the same on every node: this job has {settings.rank_by}, "
            f"node {node} came with {join.rank_by}; start it with --rdzv-conf=rank_by={settings.rank_by}"
        )
    if join.node.id != node:
        return f"a node joins under its own name: {node} came as {join.node.id[:80]!r}; start the agent again"
    if not 1 <= join.node.slots <= MOST_SLOTS:
        return f"a node has 1 to {MOST_SLOTS} workers, node {node} came with {join.node.slots}; fix --nproc-per-node"
    if what := misnamed(join.node, join.held):
        return f"a name is text of at most {NAME} characters, the {what} of node {node} is not; give it another"
    return _objection_to_rank(join.node, high, staying) if settings.fixed_ranks else ""


def _objection_to_rank(node: Node, nodes: int, staying: Iterable[Node]) -> str:
    """In a static job every node brings a rank of its own."""
    if node.wish is None or not 0 <= node.wish < nodes:
        return f"a static job needs --node-rank from 0 to {nodes - 1} on every node, node {node.id} has {node.wish}"
    taken = next((other.id for other in staying if other.wish == node.wish and other.id != node.id), None)
    return f"--node-rank={node.wish} is taken by node {taken}; give every node its own" if taken is not None else ""
