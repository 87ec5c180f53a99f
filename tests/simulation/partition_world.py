"""A partial partition that lasts: the voters of `succession_world.py`, which have just met at a candidate, lose it.

First all nodes run a round.  Then the coordinator is cut off from all others.  When a candidate asks for promises, it
loses a majority of the voters, but not the agent of the third candidate.  All reach the third candidate; in every other
schedule, only a majority without a node to spare does, so that all of these must meet there.  Rule, besides those of
`succession_world.py`: the third candidate is elected within `REST_TIMEOUT_S`, though the partition lasts; if it has no
node to spare, within `TIGHT_TIMEOUT_S`.

`python -m tests.simulation.partition_world SEED` prints one schedule as a transcript.
"""

import sys
from typing import Any

from ripstop.election.candidate import CandidateCommand, SendTo
from ripstop.protocol.messages import RequestPromise
from tests.simulation.rules import require
from tests.simulation.succession_world import LEASE_S, REST_TIMEOUT_S, Process, SuccessionWorld, check_world

FOREVER = 1e9
TIGHT_TIMEOUT_S = 3 * REST_TIMEOUT_S


class PartitionWorld(SuccessionWorld):
    """One schedule."""

    def __init__(self, seed: int, trace: Any = None) -> None:
        super().__init__(seed, trace)
        self.former: Process | None = None  # the coordinator that is cut off
        self.is_parted = False
        self.is_tight = seed % 2 == 1
        self._begin_without_faults(hosts=self.random.randint(7, 9), listed_addresses=3)

    def _check_rest(self, end: float) -> bool:
        if super()._check_rest(end):
            self.former = self._leader()
            assert self.former
            self.note(f"*** {self.former.name} is cut off")
            self.calm_at = self.now
            self._part(self.former, set(range(self.hosts)))
        return False

    def _execute(self, process: Process, commands: list[CandidateCommand]) -> None:
        super()._execute(process, commands)
        asks = any(isinstance(command, SendTo) and isinstance(command.message, RequestPromise) for command in commands)
        if self.former and process is not self.former and asks and not self.is_parted:
            self.is_parted = True
            self.at(self.now + self.random.random() * self.random.choice((0.01, 0.5)), self._strand, process)

    def _strand(self, candidate: Process) -> None:
        others = range(self.listed_addresses, self.hosts)
        lost = set(self.random.sample(others, self.random.randint(self.hosts // 2 + 1, len(others))))
        self.note(f"*** {candidate.name} loses the hosts {sorted(lost)}")
        self.calm_at = self.now
        self._part(candidate, lost)
        if self.is_tight:
            self.calm_at = FOREVER  # a leadership may end: one voter that promises and moves on is enough
            third = next(p for p in self._living() if p.candidate and p not in (candidate, self.former))
            spare = self.hosts - 1 - (self.hosts // 2 + 1)  # of those that reach it, itself included
            lost = set(self.random.sample(others, spare))
            self.note(f"*** {third.name} loses the hosts {sorted(lost)}")
            self._part(third, lost)
        timeout = TIGHT_TIMEOUT_S if self.is_tight else REST_TIMEOUT_S
        self.at(self.now + 2 * LEASE_S, self._check_elected, timeout, self.now + timeout)

    def _part(self, process: Process, hosts: set[int]) -> None:
        for host in hosts:
            self._block(process.host, host, FOREVER)
            self._block(host, process.host, FOREVER)

    def _check_elected(self, timeout: float, end: float) -> bool:
        if any(p is not self.former and p.candidate and p.candidate.is_settled for p in self.leaders.values()):
            return True
        require(self.now <= end, f"no coordinator in {timeout:g} s of a partial partition")
        self.at(self.now + 1.0, self._check_elected, timeout, end)
        return False


def check(seed: int) -> None:
    """Run one schedule; a violation has the transcript and the command to print all of it."""
    check_world(PartitionWorld, seed, __name__)


if __name__ == "__main__":
    PartitionWorld(int(sys.argv[1]), print).run()
