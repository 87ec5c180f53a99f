"""Where an agent looks for a coordinator: the addresses of `--rdzv-endpoint`, in an order that all agents share.  Pure.

Rules: (1) A lost coordinator's address comes last in the next turn through the list, so that all who lost it meet at
the same successor; one that closed the connection is tried again first, to learn whether its process has ended.  (2) An
agent waits long at the first candidate that it reaches and short at the others, so that agents at different candidates
meet.  Once a majority suffices, the short wait doubles with every full turn without a coordinator, up to the long wait,
and then starts again at the short one: a majority may be able to reach only a later candidate, and to meet there, its
agents must stay longer.  An agent that has promised its vote stays a short wait longer, once: the candidate may be
elected at this moment, and needs the agent then.  (3) A redirect goes to an address of the list only, and more
redirects in a row than the list is long are delayed.
"""

RETRY_DELAY_S = 0.2  # after all addresses have failed
RECHECK_DELAY_S = 0.05  # before a coordinator that closed the connection twice is tried again
LONG_WAIT = 2.0  # leases, at the first candidate that is reached
SHORT_WAIT = 0.2  # leases, at any other in the first turn
GROWING_TURNS = 5  # in which the short wait grows to the long one
# Leases, before a coordinator that was silent is tried again: the candidate that redirected here may notice the loss up
# to a lease later.
REDIRECT_WAIT = 1.0


class Search:
    """The address that is tried, as its number in the list."""

    def __init__(self, addresses: int, lease: float) -> None:
        self._lease = lease
        self._leader: int | None = None  # the last coordinator
        self._order = list(range(addresses))
        self._at = 0  # in the order
        self._redirected: int | None = None
        self._redirects = 0
        self._turns = 0  # through the list, without a coordinator
        self._has_waited = False  # in this turn, at a candidate
        self._has_promised = False  # at this candidate
        self._has_extended = False  # the wait at this candidate
        self._rechecks = 0  # how often a coordinator that closed the connection is tried again
        self._is_silent = False  # the last coordinator was lost because it was silent

    @property
    def target(self) -> int:
        return self._order[self._at] if self._redirected is None else self._redirected

    def on_accepted(self) -> None:
        """The peer is the coordinator."""
        self._leader = self.target
        self._redirects = 0

    def on_lost(self, *, is_silent: bool) -> None:
        """The connection to the coordinator is lost."""
        self._start()
        self._turns = 0
        self._is_silent = is_silent
        if not is_silent:
            self._redirected, self._rechecks = self._leader, 1  # rule 1

    def on_promised(self) -> None:
        """This agent has promised its vote to the candidate."""
        self._has_promised = True

    def extra_wait(self) -> float:
        """The wait at this candidate is over: how much longer to wait there."""
        if not self._has_promised or self._has_extended:
            return 0.0
        self._has_extended = True
        return SHORT_WAIT * self._lease

    def on_failed(self, *, is_closed: bool = False) -> float:
        """The address cannot be reached, or its candidate was not elected: the delay before the next one.

        `is_closed`: the peer closed the connection at once, as a process does that is being killed.
        """
        if self._rechecks and is_closed:
            self._rechecks -= 1
            return RECHECK_DELAY_S
        self._rechecks = 0
        if self._redirected is not None:
            self._redirected = None
            return 0.0 if self._redirects == 0 else RETRY_DELAY_S
        self._at += 1
        if self._at < len(self._order):
            return 0.0
        self._leader = None
        self._start()
        self._turns += 1
        return RETRY_DELAY_S

    def on_redirected(self, target: int) -> float:
        """A candidate follows a coordinator at this address: the delay before it is tried.

        If this agent has just lost that one, the candidate may soon lose it, too: it stays for a while.
        """
        self._redirects += 1
        if self._is_silent and target == self._leader:
            self._is_silent, self._redirected = False, target
            return self._lease * REDIRECT_WAIT
        if self._redirects % (len(self._order) + 1) == 0:  # rule 3
            return self.on_failed()
        self._redirected = target
        return 0.0 if self._redirects <= len(self._order) else RETRY_DELAY_S

    def waiting_time(self, *, is_first_election: bool) -> float:
        """How long to wait at the candidate that has been reached.

        `is_first_election`: before the first round all voters must be there, so the short wait does not grow.
        """
        self._has_promised = self._has_extended = False
        if not self._has_waited:
            self._has_waited = True
            return LONG_WAIT * self._lease
        turns = 0 if is_first_election else self._turns % GROWING_TURNS
        return min(LONG_WAIT, SHORT_WAIT * 2.0**turns) * self._lease

    def _start(self) -> None:
        addresses = range(len(self._order))
        self._order = sorted(addresses, key=lambda address: (address == self._leader, address))
        self._at, self._redirected, self._has_waited = 0, None, False
