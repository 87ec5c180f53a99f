"""The electorate of a job: the agents whose promises make a coordinator, and the rule of the majority.  Pure data.

Without etcd, a coordinator stays elected by the promises of the last round's members (`election/candidate.py`).
Every voter keeps the newest electorate that a coordinator sent to it, and gives it to the next one.
"""

from collections.abc import Collection, Iterable

from msgspec import Struct

from ripstop.model.field_types import Int64, Items

MAX_VOTERS = 63  # members of a round that vote, the lowest ranks: messages and their number stay bounded


class Electorate(Struct, frozen=True, forbid_unknown_fields=True):
    """Who votes.  A higher `version` replaces a lower one.

    `epoch` is that of the coordinator that sent it, `serial` counts its changes, `round` is the newest round.
    While the change to the voters of a new round is pending, `outgoing` has the voters before it, and every decision
    needs a majority of both.  Before the first round, the voters are the addresses of `--rdzv-endpoint` (`is_first`).
    """

    epoch: Int64
    serial: Int64
    round: Int64
    voters: Items[str]
    outgoing: Items[str] = ()
    is_first: bool = False

    @property
    def version(self) -> tuple[int, int]:
        return (self.epoch, self.serial)

    def has_majority(self, present: Collection[str]) -> bool:
        """Whether more than half of the voters are present, and of the outgoing voters if there are any."""
        return all(
            2 * count_in_electorate(voters, present) > len(voters) for voters in (self.voters, self.outgoing) if voters
        )

    def can_elect(self, present: Collection[str]) -> bool:
        """Whether these may elect a coordinator.

        An agent that was restarted has forgotten what it promised.  Later voters are agents, so it does not count as
        one.  But the first voters are addresses.  So all of them must be present: then none of them has a coordinator.
        """
        if self.is_first:
            return count_in_electorate(self.voters, present) == len(self.voters)
        return self.has_majority(present)


def count_in_electorate(voters: Iterable[str], present: Collection[str]) -> int:
    return sum(voter in present for voter in voters)


def first_electorate(addresses: Iterable[str]) -> Electorate:
    """The voters before the first round."""
    return Electorate(0, 0, 0, tuple(addresses), is_first=True)
