"""Every move of a job from one phase to another, and what makes it.  Pure data.

The machine makes no other (`Job._enter`), every one of them is made in its tests, and the diagram on the page about
rendezvous is drawn from here.
"""

from ripstop.model.status import Phase

TRANSITIONS = {
    Phase.GATHERING: {
        Phase.RUNNING: "enough nodes are ready",
        Phase.RECOVERING: "a new coordinator hears of a round",
        Phase.GATHERING: "a node comes from a newer round",
        Phase.CLOSING: "too few nodes for join_timeout, an end is asked for, or a node was told of one",
    },
    Phase.RECOVERING: {
        Phase.RUNNING: "all its nodes are back",
        Phase.GATHERING: "some are not back within a lease",
        Phase.RECOVERING: "a node comes from a newer round",
        Phase.CLOSING: "an end is asked for, or a node was told of one",
    },
    Phase.RUNNING: {
        Phase.GATHERING: "a failure is healed, nodes come or go, one is from a newer round, or a restart is asked for",
        Phase.CLOSING: "all workers exited 0, the budget is spent, an end is asked for, or a node was told of one",
    },
    Phase.CLOSING: {Phase.CLOSED: "all workers exited 0, everybody's evidence is in, or the time for it is over"},
    Phase.CLOSED: {},
}
