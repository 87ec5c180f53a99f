"""Decides for the whole job: membership, ranks, restarts and the end.  `job` decides, `driver` executes."""
