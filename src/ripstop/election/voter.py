"""An agent as a voter: which coordinator it follows, and to whom it promises an epoch.  Pure.

Every agent of a job with successors has one, also the agent of a candidate.  Rules:

1.  A voter never promises or follows an epoch below its highest promise, and promises an epoch to one candidate only.
2.  A promise and every renewal bind the voter for one lease by its own clock: until then it promises no higher epoch to
    another candidate.  The candidate it is bound to may ask for a higher one at any time.
3.  A coordinator whose process has ended binds nobody.
4.  A voter keeps the newest electorate that it or the candidate in its process has received, and sends it with every
    promise.
"""

from msgspec import Struct

from ripstop.model.electorate import Electorate
from ripstop.protocol.messages import Follow, FromAgent, LeaderElected, Promise, Renew, Renewed, RequestPromise


class Reply(Struct, frozen=True):
    """Send this message to the candidate or coordinator."""

    message: FromAgent


class Accept(Struct, frozen=True):
    """The peer is the coordinator: join the job."""


VoterCommand = Reply | Accept


class Voter:
    """The promises of one agent.

    `listed_address` is the address of `--rdzv-endpoint` at which it listens, or empty.
    """

    def __init__(self, first: Electorate, lease: float, listed_address: str = "") -> None:
        self.electorate = first
        self.promised = 0  # the highest epoch
        self.promised_to = ""  # the candidate of that epoch
        self._former, self._is_lost = "", False  # the coordinator that this agent followed last
        self._bound_until = float("-inf")
        self._lease = lease
        self._listed_address = listed_address
        self._was_asked_while_bound = False  # a candidate asked while this voter was bound

    def follow(self) -> Follow:
        """The first message over a connection, and the reply to a candidate whose epoch is too low."""
        return Follow(self.promised, self.promised_to, self.electorate, self._listed_address)

    def on(self, message: RequestPromise | LeaderElected | Renew, now: float) -> list[VoterCommand]:
        match message:
            case RequestPromise(epoch, number, node):
                return self._on_promise_request(epoch, number, node, now)
            case LeaderElected(epoch, node):
                if epoch < self.promised or (epoch == self.promised and node != self.promised_to):
                    return [Reply(self.follow())]  # rule 1; the coordinator asks for a higher epoch
                self.promised, self.promised_to = epoch, node
                self._former, self._is_lost = node, False
                return [Accept()]
            case Renew(epoch, number, electorate):
                if epoch != self.promised:
                    return []
                self._bound_until = now + self._lease  # rule 2
                if electorate is not None:
                    self.learn(electorate)
                return [Reply(Renewed(epoch, number))]

    def on_gone(self, node: str) -> None:
        """The process of this node has ended (rule 3)."""
        if node == self.promised_to:
            self._bound_until = float("-inf")
        self.on_silent(node)

    def on_silent(self, node: str) -> None:
        """This coordinator sent nothing for a lease.  The promise to it is not affected."""
        if node == self._former:
            self._is_lost = True

    def on_tick(self, now: float) -> list[VoterCommand]:
        """The binding may be over: the candidate may ask again."""
        if not self._was_asked_while_bound or now < self._bound_until:
            return []
        self._was_asked_while_bound = False
        return [Reply(self.follow())]

    def is_bound_to_another(self, node: str, now: float) -> bool:
        """Whether this agent is bound to another candidate than this one."""
        return node != self.promised_to and now < self._bound_until

    def deadline(self) -> float | None:
        """The time of the next `on_tick`, if one is needed."""
        return self._bound_until if self._was_asked_while_bound else None

    def on_disconnected(self) -> None:
        self._was_asked_while_bound = False

    def _on_promise_request(self, epoch: int, number: int, node: str, now: float) -> list[VoterCommand]:
        if epoch < self.promised or (epoch == self.promised and node != self.promised_to):
            return [Reply(self.follow())]  # rule 1
        if self.is_bound_to_another(node, now):
            self._was_asked_while_bound = True
            return []  # rule 2
        self.promised, self.promised_to = epoch, node
        self._bound_until = now + self._lease
        self._was_asked_while_bound = False
        former = self._former if self._former != node else ""
        return [Reply(Promise(epoch, number, self.electorate, former, self._is_lost))]

    def learn(self, electorate: Electorate) -> None:
        """Keep the newest electorate (rule 4)."""
        if electorate.version > self.electorate.version:
            self.electorate = electorate
