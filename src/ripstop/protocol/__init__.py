"""What agents and the coordinator send each other: messages, their JSON encoding, size limits, proofs of the secret."""
