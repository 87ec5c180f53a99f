"""Copies of a node's training state in another node's memory: `supervisor` runs in the agent, `replicator` copies."""

MAX_CONTROL_BYTES = 65536  # of a message between an agent and its replicator
