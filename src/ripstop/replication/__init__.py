"""Copies of a node's commits in the memory of another node: the agent's side, the process that copies, and its wire."""
