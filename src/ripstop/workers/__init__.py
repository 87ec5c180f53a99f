"""A node's worker processes: what they are given, how they start, how they end, what they say."""
