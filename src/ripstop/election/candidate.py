"""An agent as a candidate: when it asks for promises, when it is the coordinator, and when a round is committed.  Pure.

Every agent that listens at an address of `--rdzv-endpoint` is a candidate.  It is also a voter (`voter.py`) that votes
over a connection, like all others.  The two share what they know of the electorate, and the candidate reads what its
voter has promised.  Rules:

1.  A candidate asks for promises while its own agent has no coordinator, and the agents connected here could elect it.
    Otherwise it would bind agents that another candidate needs.
2.  It is the coordinator with promises of the newest electorate that it knows: a majority of the voters, and of the
    outgoing voters if a change is pending.  Before the first round it needs all addresses.  Its own agent must not be
    bound to another candidate, even if its agent is not a voter: before the first round, the other candidate may count
    this address.
3.  The leadership ends, by its own clock, before voters may promise to another: the majorities of rule 2 must have
    renewed it.  The time counts from the moment a renewal was requested, and is shorter than the lease by
    `LEASE_MARGIN`.
4.  A new coordinator first makes the electorate that it inherited its own: a majority confirms it in the new epoch.  It
    changes nothing before that.
5.  A round is committed, and only then announced, when a majority of its voters and a majority of the voters before it
    have confirmed it.  One change is pending at a time.  It begins when a majority of the new voters has renewed the
    leadership, so that the leadership does not end with it.  A round that ends before that is withdrawn.
6.  A node that has left is no voter any more, without a vote: it followed this coordinator, so it has promised nobody a
    higher epoch, and it never promises again.  So all majorities still overlap.
7.  A coordinator that meets a higher epoch asks its voters for one above it.  It steps down if that epoch has a
    coordinator.
"""

from collections.abc import Collection, Iterable, Sequence

from msgspec import Struct
from msgspec.structs import replace

from ripstop.election.voter import Voter
from ripstop.model.electorate import MAX_VOTERS, Electorate
from ripstop.model.round import Address
from ripstop.protocol.messages import (
    Follow,
    FromCoordinator,
    LeaderElected,
    Promise,
    Redirect,
    Renew,
    Renewed,
    RequestPromise,
)

LEASE_MARGIN = 0.1  # fraction of a lease: for clocks of different speed
RENEWALS_A_LEASE = 4
MAX_REQUESTS = 4096  # for renewals, that are remembered


# commands -------------------------------------------------------------------------------------------------------------


class SendTo(Struct, frozen=True):
    node: str
    message: FromCoordinator


class Lead(Struct, frozen=True):
    """Start the coordinator.

    `round` is the newest round of the job.  `former` is the former coordinator if it was in that round; `is_lost`: for
    all who promised, its process has ended or was silent for a lease.
    """

    epoch: int
    round: int
    former: str = ""
    is_lost: bool = False


class StepDown(Struct, frozen=True):
    """Stop the coordinator at once, and close all connections."""

    why: str


class Announce(Struct, frozen=True):
    """The round is committed: announce it."""

    round: int


CandidateCommand = SendTo | Lead | StepDown | Announce


class Candidate:
    """The candidacy and the leadership of one agent; see the rules above."""

    def __init__(self, node: str, voter: Voter, lease: float) -> None:
        self.epoch = 0  # of the leadership, or of the last one
        self.is_leader = False
        self.electorate = voter.electorate  # the newest known; of a leader, its own
        self._node = node
        self._voter = voter  # of this agent
        self._lease = lease
        self._leader: Address | None = None  # of another coordinator, which this agent follows
        self._contacts: dict[str, Follow] = {}  # agents that are connected here
        self._requested_epoch = 0  # the epoch that is asked for; 0: none
        self._promises: dict[str, Promise] = {}
        self._renewed_at: dict[str, float] = {}  # of a voter: when the renewal that it confirmed was requested
        self._leadership_end = float("-inf")  # unless it is renewed
        self._listed_addresses: dict[str, str] = {}  # of voters that have renewed
        self._confirmed: set[str] = set()  # voters that have this version of the electorate
        self._is_settled = False  # a majority has it (rule 4)
        self._proposal: tuple[int, tuple[str, ...]] | None = None  # a round that waits for the pending change
        self._asked: set[str] = set()  # nodes of that round that were asked to renew the leadership
        self._announced = 0
        self._number = 0
        self._requests: dict[int, tuple[float, tuple[int, int]]] = {}  # by number: time, and version
        self._next_request = float("-inf")

    # input ------------------------------------------------------------------------------------------------------------

    def on_message(self, node: str, message: Follow | Promise | Renewed, now: float) -> list[CandidateCommand]:
        out = self.on_tick(now)
        match message:
            case Follow():
                return out + self._on_follow(node, message, now)
            case Promise(epoch, number) if epoch == self._requested_epoch and node in self._contacts:
                if number in self._requests:
                    self._promises[node] = message
                    return out + self._count_promises(now)
            case Renewed(epoch, number) if self.is_leader and epoch == self.epoch and number in self._requests:
                requested_at, version = self._requests[number]
                self._renewed_at[node] = max(requested_at, self._renewed_at.get(node, requested_at))
                self._extend_leadership()
                if version == self.electorate.version:
                    self._confirmed.add(node)
                return out + self._commit(now) + self._settle(now)
        return out

    def on_disconnected(self, node: str) -> None:
        self._contacts.pop(node, None)
        self._promises.pop(node, None)
        self._confirmed.discard(node)  # it confirms again over its next connection, if it has not forgotten
        if node not in (*self.electorate.voters, *self.electorate.outgoing) and not self.electorate.is_first:
            self._listed_addresses.pop(node, None)
            self._renewed_at.pop(node, None)

    def on_leader(self, address: Address | None, now: float) -> list[CandidateCommand]:
        """This agent follows another coordinator at this address, or none."""
        self._leader = address
        if address is None or self.is_leader:
            return self._consider(now)
        self._stop_requests()
        return [SendTo(node, Redirect(address)) for node in self._contacts]

    def propose(self, round: int, nodes: Iterable[str], now: float) -> list[CandidateCommand]:
        """The coordinator has formed a round; `Announce` follows when it is committed."""
        self._proposal = (round, tuple(nodes)[:MAX_VOTERS])
        self._asked = set()
        return self._settle(now) if self.is_leader else []

    def withdraw(self) -> int:
        """The coordinator has ended the round that it proposed: it is not committed, unless its change has begun.

        Returns the newest round that is or may be committed.
        """
        self._proposal = None
        return self.electorate.round

    def on_left(self, node: str, now: float) -> list[CandidateCommand]:
        """A node has left for good (rule 6)."""
        voters = tuple(n for n in self.electorate.voters if n != node)
        outgoing = tuple(n for n in self.electorate.outgoing if n != node)
        is_voter = (voters, outgoing) != (self.electorate.voters, self.electorate.outgoing)
        if not self.is_leader or not is_voter or not voters:
            return []
        return self._change(replace(self.electorate, voters=voters, outgoing=outgoing), now)

    def on_tick(self, now: float) -> list[CandidateCommand]:
        if self.is_leader and now >= self._leadership_end:
            return self._step_down("most voters did not renew their promises in time")
        if self._requested_epoch and not self.is_leader and not self._is_electable():
            self._stop_requests()  # rule 1
        if now < self._next_request:
            return []
        if self.is_leader:
            return self._request_renewals(now)
        if self._requested_epoch:
            self._next_request = now + self._lease / RENEWALS_A_LEASE
            return [command for node in self._contacts for command in self._ask(node, now)]
        return []

    # output -----------------------------------------------------------------------------------------------------------

    @property
    def highest_epoch(self) -> int:
        """The highest epoch that this agent knows."""
        return max(self.epoch, self.electorate.epoch, self._requested_epoch, self._voter.promised)

    def holds_leadership(self, now: float) -> bool:
        """Whether the coordinator may decide."""
        return self.is_leader and now < self._leadership_end

    @property
    def is_settled(self) -> bool:
        """A majority has confirmed the electorate, and no change is pending."""
        return self._is_settled and self._proposal is None

    def deadline(self) -> float | None:
        """The time of the next `on_tick`, if one is needed."""
        if self.is_leader:
            return min(self._next_request, self._leadership_end)
        return self._next_request if self._requested_epoch else None

    def missing(self) -> list[str]:
        """The addresses without an agent, before the first round."""
        return [voter for voter in self.electorate.voters if voter not in self._names(self._contacts)]

    # candidacy --------------------------------------------------------------------------------------------------------

    def _on_follow(self, node: str, follow: Follow, now: float) -> list[CandidateCommand]:
        self._contacts[node] = follow
        if follow.listed_address:
            self._listed_addresses[node] = follow.listed_address
        if follow.electorate.version > self.electorate.version:
            self._learn(follow.electorate)
            if self.is_leader:
                return self._step_down(f"node {node} knows a newer coordinator")  # rule 7
        if self.is_leader and self._least_epoch(follow) > self.epoch:
            return self._request_promises(max(self._least_epoch(follow), self._requested_epoch), now)  # rule 7
        if self.is_leader:
            self._confirmed.discard(node)
            return [SendTo(node, LeaderElected(self.epoch, self._node)), *self._request_renewal(node, now)]
        if self._leader is not None:
            return [SendTo(node, Redirect(self._leader))]
        was_asked = self._requested_epoch
        out = self._consider(now)
        if self._requested_epoch != was_asked:
            return out
        return self._ask(node, now)

    def _least_epoch(self, follow: Follow) -> int:
        """The lowest epoch that this agent may promise."""
        return follow.epoch if follow.candidate == self._node else follow.epoch + 1

    def _consider(self, now: float) -> list[CandidateCommand]:
        """Ask for promises if that may succeed (rule 1)."""
        if self.is_leader or self._leader is not None:
            return []
        if not self._is_electable():
            self._stop_requests()
            return []
        least = max(self.epoch + 1, self.electorate.epoch + 1, *map(self._least_epoch, self._contacts.values()))
        return [] if self._requested_epoch >= least else self._request_promises(least, now)

    def _is_electable(self) -> bool:
        return self.electorate.can_elect(self._names(self._contacts))

    def _request_promises(self, epoch: int, now: float) -> list[CandidateCommand]:
        if epoch != self._requested_epoch:
            self._promises = {}
        self._requested_epoch = epoch
        if not self.is_leader:
            self._next_request = now + self._lease / RENEWALS_A_LEASE
        return [command for node in self._contacts for command in self._ask(node, now)]

    def _ask(self, node: str, now: float) -> list[CandidateCommand]:
        if not self._requested_epoch or node not in self._contacts:
            return []
        return [SendTo(node, RequestPromise(self._requested_epoch, self._request(now), self._node))]

    def _stop_requests(self) -> None:
        self._requested_epoch = 0
        self._promises = {}

    def _count_promises(self, now: float) -> list[CandidateCommand]:
        newest = max((promise.electorate for promise in self._promises.values()), key=lambda e: e.version)
        if newest.version > self.electorate.version:
            if self.is_leader:
                return self._step_down("a voter knows a newer coordinator")
            self._learn(newest)
        known, names = self.electorate, self._names(self._promises)
        if not (known.has_majority(names) if self.is_leader else known.can_elect(names)):
            return []
        if not self.is_leader and self._voter.is_bound_to_another(self._node, now):
            return []  # rule 2; it asks again
        return self._become_leader(now)

    def _become_leader(self, now: float) -> list[CandidateCommand]:
        was_leader, promises = self.is_leader, self._promises
        renewed_at = {node: self._requests[p.number][0] for node, p in promises.items() if p.number in self._requests}
        self._renewed_at = self._renewed_at | renewed_at if was_leader else renewed_at
        self.epoch = self._requested_epoch
        self._stop_requests()
        self.is_leader = True
        self._extend_leadership()
        if now >= self._leadership_end:
            return self._step_down("it was elected too late")  # rule 3
        out: list[CandidateCommand] = []
        if not was_leader:
            self._announced, self._proposal = self.electorate.round, None
            former = next((p.former for p in promises.values() if p.former in self.electorate.voters), "")
            is_lost = bool(former) and all(p.is_lost for p in promises.values() if p.former == former)
            out.append(Lead(self.epoch, self.electorate.round, former, is_lost))
        out += [SendTo(node, LeaderElected(self.epoch, self._node)) for node in self._contacts]
        return out + self._change(self.electorate, now)  # rule 4

    # leadership -------------------------------------------------------------------------------------------------------

    def _change(self, electorate: Electorate, now: float) -> list[CandidateCommand]:
        """Begin a new version of the electorate; voters confirm it with their next renewal."""
        self._learn(replace(electorate, epoch=self.epoch, serial=electorate.serial + 1))
        self._confirmed = set()
        self._is_settled = False
        return self._request_renewals(now)

    def _commit(self, now: float) -> list[CandidateCommand]:
        if self._is_settled or not self.electorate.has_majority(self._names(self._confirmed)):
            return []
        out: list[CandidateCommand] = []
        if self.electorate.round > self._announced:
            self._announced = self.electorate.round
            out.append(Announce(self.electorate.round))  # rule 5
        if self.electorate.outgoing:
            return out + self._change(replace(self.electorate, outgoing=()), now)
        self._is_settled = True
        return out

    def _settle(self, now: float) -> list[CandidateCommand]:
        """Begin the change to a round that waits, if no other change is pending (rules 4 and 5)."""
        if self._proposal is None or not self._is_settled:
            return []
        round, nodes = self._proposal
        if self._bound_until(nodes) < now + self._lease / RENEWALS_A_LEASE:
            strangers = [node for node in nodes if node not in self._asked and node in self._contacts]
            self._asked.update(strangers)
            return [command for node in strangers for command in self._request_renewal(node, now)]
        self._proposal = None
        before = self.electorate.voters
        outgoing = () if set(nodes) == set(before) else before
        return self._change(replace(self.electorate, round=round, voters=nodes, outgoing=outgoing, is_first=False), now)

    def _request_renewals(self, now: float) -> list[CandidateCommand]:
        self._next_request = now + self._lease / RENEWALS_A_LEASE
        return [command for node in self._contacts for command in self._request_renewal(node, now)]

    def _request_renewal(self, node: str, now: float) -> list[CandidateCommand]:
        proposed = self._proposal[1] if self._proposal else ()
        voters = (*self.electorate.voters, *self.electorate.outgoing, *proposed)
        if node not in voters and self._listed_addresses.get(node) not in voters:
            return []
        electorate = None if node in self._confirmed else self.electorate
        return [SendTo(node, Renew(self.epoch, self._request(now), electorate))]

    def _request(self, now: float) -> int:
        self._number += 1
        self._requests[self._number] = (now, self.electorate.version)
        if len(self._requests) > MAX_REQUESTS:
            del self._requests[next(iter(self._requests))]
        return self._number

    def _extend_leadership(self) -> None:
        """The leadership ends when no majority of voters is bound any more (rule 3)."""
        both = (self.electorate.voters, self.electorate.outgoing)
        self._leadership_end = min(self._bound_until(voters) for voters in both if voters)

    def _bound_until(self, voters: Sequence[str]) -> float:
        """The time until which a majority of these is bound to this coordinator."""
        times, never = dict(self._renewed_at), float("-inf")
        for node, at in self._renewed_at.items():
            if listed_address := self._listed_addresses.get(node):
                times[listed_address] = max(at, times.get(listed_address, never))
        renewed = sorted((times.get(voter, never) for voter in voters), reverse=True)
        return renewed[len(voters) // 2] + self._lease * (1 - LEASE_MARGIN)

    def _step_down(self, why: str) -> list[CandidateCommand]:
        self._stop_requests()
        self._contacts = {}
        self._proposal = None
        if not self.is_leader:
            return []
        self.is_leader = False
        return [StepDown(why)]

    def _learn(self, electorate: Electorate) -> None:
        """The agent's voter learns it too: no other candidate may be elected without it."""
        self.electorate = electorate
        self._voter.learn(electorate)
        if self.is_leader:
            self._extend_leadership()

    def _names(self, nodes: Collection[str]) -> set[str]:
        """The names under which these nodes vote: their own, and the addresses at which they listen."""
        listed_addresses = self._listed_addresses
        return {*nodes, *(listed_addresses[node] for node in nodes if node in listed_addresses)}
