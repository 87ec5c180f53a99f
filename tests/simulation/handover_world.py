"""A coordinator that is cut off but lives: when its leadership ends by its clock, and when the next one begins.

The voters and candidates are those of `succession_world.py`.  First all nodes run a round.  Then the replies to the
coordinator become slow, and a moment later the network between it and all others is blocked for good: to it, from it,
or both.  In some schedules the connections also break, so that its voters look for another coordinator at once.  The
rules are those of `succession_world.py`, above all that only one process is the leader; and another coordinator is
elected within `REST_TIMEOUT_S`.

`python -m tests.simulation.handover_world SEED` prints one schedule as a transcript.
"""

import sys
from typing import Any

from tests.simulation.rules import require
from tests.simulation.succession_world import CLIENT, REST_TIMEOUT_S, Process, SuccessionWorld, check_world

FOREVER = 1e9


class HandoverWorld(SuccessionWorld):
    """One schedule."""

    def __init__(self, seed: int, trace: Any = None) -> None:
        super().__init__(seed, trace)
        self.former: Process | None = None  # the coordinator that is cut off
        self._begin_without_faults(hosts=self.random.randint(3, 5), listed_addresses=self.random.randint(2, 3))

    def _check_rest(self, end: float) -> bool:
        if super()._check_rest(end):
            self.former = self._leader()
            assert self.former
            slow = self.random.choice((0.02, 0.9))
            self.note(f"*** replies to {self.former.name} take up to {slow:g} s")
            for host in range(self.hosts):
                self.latencies[host, self.former.host] = slow
            self.at(self.now + 2.0 + self.random.random(), self._cut_off, self.former)
        return False

    def _cut_off(self, former: Process) -> None:
        direction = self.random.choice(("to it", "from it", "both"))
        self.note(f"*** {former.name} is cut off: {direction}")
        self.calm_at = self.now
        for host in range(self.hosts):
            if direction != "to it":
                self._block(former.host, host, FOREVER)
            if direction != "from it":
                self._block(host, former.host, FOREVER)
        if self.random.random() < 0.5:
            self.note("*** its connections break")
            for process in self._living():
                if process is not former and process.connection:
                    self._close(process.connection, CLIENT)
                    self._lost(process, process.connection, is_silent=False)
        self._check_elected(self.now + REST_TIMEOUT_S)

    def _check_elected(self, end: float) -> bool:
        if any(p is not self.former and p.candidate and p.candidate.is_settled for p in self.leaders.values()):
            return True
        require(self.now <= end, f"no coordinator {REST_TIMEOUT_S:g} s after the loss of one")
        self.at(self.now + 0.1, self._check_elected, end)
        return False


def check(seed: int) -> None:
    """Run one schedule; a violation has the transcript and the command to print all of it."""
    check_world(HandoverWorld, seed, __name__)


if __name__ == "__main__":
    HandoverWorld(int(sys.argv[1]), print).run()
