"""A node's worker processes: their environment, how they start and end, their reports, their standbys, their memory."""
