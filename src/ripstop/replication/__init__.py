"""Copies of a node's commits in the memory of another node: the agent's side, the process that copies, and its wire."""

MAX_CONTROL_BYTES = 65536  # of a message between an agent and its replicator
