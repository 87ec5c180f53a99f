"""How often nodes send heartbeats and ask for answers, and how they spread reconnects, by the size of the job.  Pure.

Agents keep these times, and the coordinator counts on them.  Small jobs have the shortest ones, so that nothing is
detected or healed later than it could be.  In a large job they bound the coordinator's load.
"""

LARGE_JOB_NODES = 256
LARGE_JOB_QUIET_INTERVALS = 6  # of heartbeats without an answer: it costs the coordinator more than the heartbeat
RECONNECT_SPREAD_S = 0.0005  # for each node of a large job: about what a handshake costs the coordinator


def heartbeat_interval_s(lease: float, nodes: int) -> float:
    """Three heartbeats a lease, two in a large job: one of them may be late by more than a second."""
    return lease / (2 if nodes > LARGE_JOB_NODES else 3)


def ask_after_s(lease: float, nodes: int, *, is_elected: bool) -> float:
    """A node asks for an answer to its heartbeat if the coordinator has sent nothing for this time.

    A missing answer shows that the coordinator is suspended.  Only an elected coordinator can be replaced then, so only
    its nodes must know soon.  The kernel detects that the coordinator's machine is lost: it does not acknowledge the
    heartbeats.
    """
    if is_elected or nodes <= LARGE_JOB_NODES:
        return 0.0
    return LARGE_JOB_QUIET_INTERVALS * heartbeat_interval_s(lease, nodes)


def silence_timeout_s(lease: float, nodes: int, *, is_elected: bool) -> float:
    """A node reconnects if the coordinator sends nothing for this time; in a large job, a lease after it has asked."""
    ask_after = ask_after_s(lease, nodes, is_elected=is_elected)
    return ask_after + heartbeat_interval_s(lease, nodes) + lease if ask_after else lease


def reconnect_spread_s(nodes: int) -> float:
    """The time over which nodes spread their reconnects after the first one has failed."""
    return RECONNECT_SPREAD_S * nodes if nodes > LARGE_JOB_NODES else 0.0
