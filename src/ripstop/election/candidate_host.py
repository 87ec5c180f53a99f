"""The port of a candidate: executes the decisions of `candidate.py`, and runs the coordinator while it is elected.

An agent that connects here first sends `Follow`.  Its other messages go to the coordinator after `LeaderElected` was
sent to it.  The same server serves candidates and the coordinator, so an elected agent needs no new port or connection.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable

from ripstop.coordinator.driver import Coordinator, CoordinatorDriverSession
from ripstop.coordinator.job_types import JobSettings, Predecessor
from ripstop.election.candidate import Announce, Candidate, CandidateCommand, Lead, SendTo, StepDown
from ripstop.election.voter import Voter
from ripstop.model.electorate import MAX_VOTERS, Electorate
from ripstop.model.errors import ProtocolError
from ripstop.model.events import Sink
from ripstop.model.failure import JobEnd
from ripstop.model.round import Address
from ripstop.protocol.limits import is_name_within_limits, max_round_within_limits
from ripstop.protocol.messages import Follow, FromAgent, FromCoordinator, LeaderElected, Left, Promise, Renewed
from ripstop.system.linux import boot_time

log = logging.getLogger("ripstop.coordinator")

MISSING_LOG_DELAY_S = 5.0  # a shorter wait for the first election is not logged
SETTLE_TIMEOUT_S = 1.0  # for a coordinator that leaves to tell its voters
MAX_STEP = 1 << 20  # a peer cannot exhaust the numbers of epochs and electorates


class CandidateHostPeer:
    """One agent's connection; the server calls `receive`, `renew` and `detach`."""

    def __init__(
        self,
        host: "CandidateHost",
        node: str,
        send: Callable[[FromCoordinator], object],
        close: Callable[[], object],
    ) -> None:
        self.node = node
        self.send = send
        self.close = close
        self.session: CoordinatorDriverSession | None = None  # with the coordinator
        self._host = host

    def receive(self, message: FromAgent) -> None:
        self._host.receive(self, message)

    def renew(self) -> None:
        self._host.renew(self)

    def detach(self, *, returning: bool = False, closed_by_node: bool = False) -> None:
        self._host.detach(self, returning=returning, closed_by_node=closed_by_node)


class CandidateHost:
    """A candidate and, while it is elected, the coordinator.  `on_leader` is called when that begins and ends.

    `failed` gets the exception if the coordinator has a defect.
    """

    def __init__(
        self,
        settings: JobSettings,
        *,
        node: str,
        listed_address: Address,
        voter: Voter,
        sinks: Iterable[Sink],
        on_leader: Callable[[Address | None, Coordinator | None], None],
        failed: asyncio.Future[None],
    ) -> None:
        self.settings = settings
        self.coordinator: Coordinator | None = None
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[JobEnd] = self._loop.create_future()
        self._candidate = Candidate(node, voter, settings.timing.lease)
        self._listed_address = listed_address
        self._listed_addresses = frozenset(voter.electorate.voters)  # the addresses of --rdzv-endpoint
        self._sinks = tuple(sinks)
        self._on_leader = on_leader
        self._failed = failed
        self._peers: dict[str, CandidateHostPeer] = {}
        self._settled = asyncio.Event()  # all voters that matter know the electorate
        self._timer: asyncio.TimerHandle | None = None
        self._missing_timer: asyncio.TimerHandle | None = None

    @property
    def job(self) -> Coordinator | None:
        return self.coordinator

    # connections ------------------------------------------------------------------------------------------------------

    def attach(
        self, node: str, send: Callable[[FromCoordinator], object], close: Callable[[], object]
    ) -> CandidateHostPeer:
        """An agent has connected; a second connection replaces the first."""
        old = self._peers.get(node)
        peer = self._peers[node] = CandidateHostPeer(self, node, send, close)
        if old is not None:
            self._candidate.on_disconnected(node)
            old.close()
        return peer

    def receive(self, peer: CandidateHostPeer, message: FromAgent) -> None:
        if self._peers.get(peer.node) is not peer:
            return
        match message:
            case Follow(epoch=epoch, electorate=electorate) | Promise(epoch=epoch, electorate=electorate):
                _check_electorate_for_candidate_host(electorate, epoch, self._candidate)
                if (
                    isinstance(message, Follow)
                    and message.listed_address
                    and message.listed_address not in self._listed_addresses
                ):
                    raise ProtocolError("the address of a voter must be one of --rdzv-endpoint, this one is not")
                self._execute(self._candidate.on_message(peer.node, message, boot_time()))
                self._log_missing_later()
            case Renewed():
                self._execute(self._candidate.on_message(peer.node, message, boot_time()))
            case _ if peer.session is not None:
                peer.session.receive(message)
                if isinstance(message, Left):
                    self._execute(self._candidate.on_left(peer.node, boot_time()))

    def renew(self, peer: CandidateHostPeer) -> None:
        """A heartbeat: it renews the node's lease in the job.  What a candidate must know, it asks for (`Renew`)."""
        if self._peers.get(peer.node) is peer and peer.session is not None:
            peer.session.renew()

    def detach(self, peer: CandidateHostPeer, *, returning: bool, closed_by_node: bool) -> None:
        if peer.session is not None:
            peer.session.detach(returning=returning, closed_by_node=closed_by_node)
        if self._peers.get(peer.node) is peer:
            del self._peers[peer.node]
            self._candidate.on_disconnected(peer.node)

    def follow(self, address: Address | None) -> None:
        """This agent follows another coordinator at this address, or none."""
        self._execute(self._candidate.on_leader(address, boot_time()))

    async def close(self) -> None:
        """Stop.  A coordinator that leaves a running job first tells its voters that its own node is none any more."""
        if self.coordinator is not None and not self.ended.done():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SETTLE_TIMEOUT_S):
                    await self._settled.wait()
        if self._missing_timer is not None:
            self._missing_timer.cancel()
        self._stop_leading()
        if self._timer is not None:
            self._timer.cancel()

    # commands ---------------------------------------------------------------------------------------------------------

    def _execute(self, commands: list[CandidateCommand]) -> None:
        for command in commands:
            match command:
                case SendTo(node, message):
                    if (peer := self._peers.get(node)) is not None:
                        peer.send(message)
                        if isinstance(message, LeaderElected):
                            self._admit(peer)
                case Lead():
                    self._lead(command)
                case Announce(round):
                    if self.coordinator is not None:
                        self.coordinator.announce(round)
                case StepDown(why):
                    log.warning("the coordinator in this agent steps down: %s", why)
                    self._stop_leading()
        self._arm()
        if self._candidate.is_settled or not self._candidate.is_leader:
            self._settled.set()
        else:
            self._settled.clear()

    def _admit(self, peer: CandidateHostPeer) -> None:
        if self.coordinator is not None and peer.session is None:
            peer.session = self.coordinator.attach(peer.node, peer.send, peer.close)

    def _lead(self, lead: Lead) -> None:
        coordinator = Coordinator(
            self.settings,
            lambda: self._candidate.holds_leadership(boot_time()),
            self._sinks,
            predecessor=Predecessor(lead.round, lead.former, lead.is_lost),
            propose=self._propose,
            withdraw=self._candidate.withdraw,
        )
        self.coordinator = coordinator
        coordinator.ended.add_done_callback(self._on_ended)
        log.info(
            "elected: the coordinator of job=%s is at %s epoch=%d",
            self.settings.run_id,
            self._listed_address,
            lead.epoch,
        )
        self._on_leader(self._listed_address, coordinator)

    def _propose(self, round: int, nodes: tuple[str, ...]) -> None:
        self._execute(self._candidate.propose(round, nodes, boot_time()))

    def _stop_leading(self) -> None:
        coordinator, self.coordinator = self.coordinator, None
        if coordinator is not None:
            self._on_leader(None, None)
            coordinator.stop()
        peers, self._peers = self._peers, {}
        for peer in peers.values():
            peer.close()

    def _on_ended(self, ended: asyncio.Future[JobEnd]) -> None:
        if ended.cancelled():
            return
        if (defect := ended.exception()) is not None:
            if not self._failed.done():
                self._failed.set_exception(defect)
        elif not self.ended.done():
            self.ended.set_result(ended.result())

    # time -------------------------------------------------------------------------------------------------------------

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if (deadline := self._candidate.deadline()) is not None:
            self._timer = self._loop.call_later(max(0.0, deadline - boot_time()), self._tick)

    def _tick(self) -> None:
        self._execute(self._candidate.on_tick(boot_time()))

    def _log_missing_later(self) -> None:
        if self._missing_timer is None:
            self._missing_timer = self._loop.call_later(MISSING_LOG_DELAY_S, self._log_missing)

    def _log_missing(self) -> None:
        if self._candidate.electorate.is_first and not self._candidate.is_leader and self._peers:
            missing = ", ".join(self._candidate.missing())
            log.info("the first election needs a reply from every address of --rdzv-endpoint; missing: %s", missing)


def _check_electorate_for_candidate_host(electorate: Electorate, epoch: int, candidate: Candidate) -> None:
    """What a candidate keeps and sends to all voters is bounded."""
    known, newest = candidate.electorate, candidate.highest_epoch
    counts = (epoch, newest), (electorate.epoch, newest), (electorate.serial, known.serial)
    if not all(0 <= number <= highest + MAX_STEP for number, highest in counts):
        raise ProtocolError(f"an epoch or a serial is at most {MAX_STEP} above the highest known one")
    if not electorate.voters or not 0 <= electorate.round <= max_round_within_limits(known.round):
        raise ProtocolError("an electorate has voters, and a round near the highest known one; this one has not")
    names = (*electorate.voters, *electorate.outgoing)
    if max(len(electorate.voters), len(electorate.outgoing)) > MAX_VOTERS or not all(map(is_name_within_limits, names)):
        raise ProtocolError(f"an electorate has at most {MAX_VOTERS} voters with valid names, this one has not")
