"""How often nodes send heartbeats, and how they spread their reconnects, by the size of the job.  Pure.

Both sides know these times: agents keep them, and the coordinator counts on them.  Small jobs have the shortest ones,
so that nothing is detected or healed later than it could be.  In a large job they bound the coordinator's load.
"""

LARGE_JOB_NODES = 256
RECONNECT_SPREAD_S = 0.0005  # for each node of a large job: about what a handshake costs the coordinator


def heartbeat_interval_s(lease: float, nodes: int) -> float:
    """Three heartbeats a lease, two in a large job: one of them may be late by more than a second."""
    return lease / (2 if nodes > LARGE_JOB_NODES else 3)


def reconnect_spread_s(nodes: int) -> float:
    """The time over which nodes spread their reconnects after the first one has failed."""
    return RECONNECT_SPREAD_S * nodes if nodes > LARGE_JOB_NODES else 0.0
