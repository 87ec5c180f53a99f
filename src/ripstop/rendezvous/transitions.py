"""Every move of a job from one phase to another, and what makes it.  Pure data.

The machine makes no other (`Job._enter`), every one of them is made in its tests, and the diagram on the page about
rendezvous is drawn from here.
"""

from ripstop.observe.status import Phase

TRANSITIONS = {
    Phase.GATHERING: {
        Phase.RUNNING: "enough nodes are ready",
        Phase.RECOVERING: "a new coordinator hears of a round",
        Phase.GATHERING: "a node comes from a newer round",
        Phase.CLOSING: "too few nodes for join_timeout, or an end is asked for",
    },
    Phase.RECOVERING: {
        Phase.RUNNING: "all its nodes are back",
        Phase.GATHERING: "some are not back within a lease",
        Phase.RECOVERING: "a node comes from a newer round",
        Phase.CLOSING: "an end is asked for, or one of its nodes was told of it",
    },
    Phase.RUNNING: {
        Phase.GATHERING: "a failure is healed, nodes come or go, or a restart is asked for",
        Phase.CLOSING: "all workers exited 0, the budget is spent, or an end is asked for",
    },
    Phase.CLOSING: {Phase.CLOSED: "everybody has told how its workers died"},
    Phase.CLOSED: {},
}
