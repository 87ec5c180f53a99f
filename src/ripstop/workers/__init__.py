"""A node's worker processes: their environment, how they start and end, and what they report."""
