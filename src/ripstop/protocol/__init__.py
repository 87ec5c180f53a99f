"""The messages between agents and the coordinator: their types, JSON encoding, size limits, proofs of the secret."""
