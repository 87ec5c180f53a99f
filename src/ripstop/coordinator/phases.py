"""The phases of a job: every transition, and what triggers it.  Pure data.

`Job._enter` makes no other transition.  The state diagram in `docs/rendezvous.md` is drawn from this table.
"""

from ripstop.model.status import Phase

TRANSITIONS = {
    Phase.GATHERING: {
        Phase.RUNNING: "enough nodes are ready",
        Phase.RECOVERING: "a node reports a round to a new coordinator",
        Phase.GATHERING: "a node reports a newer round",
        Phase.CLOSING: "too few nodes for join_timeout, an operator stops the job, or a node reports its end",
    },
    Phase.RECOVERING: {
        Phase.RUNNING: "all nodes of the round returned",
        Phase.GATHERING: "some nodes did not return within a lease",
        Phase.RECOVERING: "a node reports a newer round",
        Phase.CLOSING: "an operator stops the job, or a node reports its end",
    },
    Phase.RUNNING: {
        Phase.GATHERING: "a failure, a node that joins or leaves, a node with a newer round, or an operator's restart",
        Phase.CLOSING: "all workers exited 0, the budget is spent, an operator's stop, or a node reports its end",
    },
    Phase.CLOSING: {Phase.CLOSED: "all workers exited 0, or every node's failures arrived, or the timeout expired"},
    Phase.CLOSED: {},
}
