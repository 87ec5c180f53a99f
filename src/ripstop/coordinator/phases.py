"""The phases of a job: which can follow which, and why.  Pure data."""

from ripstop.model.status import Phase

TRANSITIONS = {  # between phases, and their causes; docs/rendezvous.md has a diagram of them
    Phase.GATHERING: {
        Phase.RUNNING: "enough nodes are ready",
        Phase.RECOVERING: "a node reports a round, and the coordinator knew none",
        Phase.GATHERING: "a node reports a newer round, and the coordinator knew an older one",
        Phase.CLOSING: "too few nodes are ready within join_timeout, an operator stops the job, or a node reports the "
        "job's end",
    },
    Phase.RECOVERING: {
        Phase.RUNNING: "all nodes of the round returned",
        Phase.GATHERING: "some nodes did not return within a lease",
        Phase.RECOVERING: "a node reports a newer round",
        Phase.CLOSING: "an operator stops the job, or a node reports the job's end",
    },
    Phase.RUNNING: {
        Phase.GATHERING: "a failure, lost training state, an operator's restart, or a node that joins, leaves, is lost "
        "or has a newer round",
        Phase.CLOSING: "all workers exited 0, no restart is left, an operator stops the job, or a node reports the end",
    },
    Phase.CLOSING: {
        Phase.CLOSED: "the job succeeded, all nodes reported their failures, or the time for reports is over"
    },
    Phase.CLOSED: {},
}
