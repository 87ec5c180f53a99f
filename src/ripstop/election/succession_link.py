"""The link to a coordinator that the nodes elect themselves: executes `voter.py` and `search.py`; rules of `link.py`.

Every agent of a job with several addresses in `--rdzv-endpoint` has one.  It connects to one address at a time with a
`WebSocketLink`, and joins the job there when the peer is the coordinator.  An agent that listens at one of them also
has a `CandidateHost`.  Every peer has proven the job's secret before its messages are read (`websocket_link.py`), so
nobody else can ask for a promise, redirect an agent, or become the coordinator.
"""

import asyncio
import random
from collections.abc import Callable, Coroutine, Iterable

from ripstop.coordinator.driver import Coordinator
from ripstop.coordinator.job_end import FINAL_REPORT_TIMEOUT_S
from ripstop.coordinator.job_types import JobSettings
from ripstop.election.candidate_host import CandidateHost
from ripstop.election.search import Search
from ripstop.election.voter import Accept, Reply, Voter, VoterCommand
from ripstop.model.config import Tls
from ripstop.model.electorate import first_electorate
from ripstop.model.events import Sink
from ripstop.model.round import Address
from ripstop.protocol.messages import (
    Closed,
    FromAgent,
    FromCoordinator,
    LeaderElected,
    Promise,
    Redirect,
    Renew,
    RequestPromise,
)
from ripstop.protocol.pacing import reconnect_spread_s
from ripstop.system.linux import boot_time
from ripstop.transport.endpoint import Bound
from ripstop.transport.link import Listener
from ripstop.transport.server import Server
from ripstop.transport.tls import client_context, server_context
from ripstop.transport.websocket_link import ConnectFailure, WebSocketLink

MIN_HANDSHAKE_TIMEOUT_S = 1.0  # a frozen process accepts connections and does not answer
CLOSE_TIMEOUT_S = 3.0  # for connections at the end


class SuccessionLink:
    """A `Link` to the elected coordinator; create it inside a running event loop.

    `bound` is the socket of the address at which this agent listens; None: it is no candidate.
    """

    def __init__(
        self,
        addresses: Iterable[Address],
        settings: JobSettings,
        *,
        node: str,
        token: str,
        bound: Bound | None = None,
        tls: Tls | None = None,
        sinks: Iterable[Sink] = (),
        on_leader: Callable[[Address | None, Coordinator | None], None] = lambda _address, _own: None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._addresses = tuple(addresses)
        self._settings = settings
        self._node = node
        self._token = token
        self._on_leader = on_leader
        self._tls = client_context(tls) if tls else None
        lease = settings.timing.lease
        listed_address = bound.listed_address if bound is not None else None
        self._voter = Voter(
            first_electorate(map(str, self._addresses)), lease, str(listed_address) if listed_address else ""
        )
        self._search = Search(len(self._addresses), lease)
        self.failed: asyncio.Future[None] = self._loop.create_future()
        self._host: CandidateHost | None = None
        self._server: Server | None = None
        self._listed_address = listed_address
        if bound is not None and listed_address is not None:
            self._host = CandidateHost(
                settings,
                node=node,
                listed_address=listed_address,
                voter=self._voter,
                sinks=sinks,
                on_leader=on_leader,
                failed=self.failed,
            )
            self._server = Server(
                bound.listening,
                self._host,
                token=token,
                tls=server_context(tls) if tls else None,
                endpoint_host=listed_address.host,
                listed_address=str(listed_address),
            )
        self._listener: Listener | None = None
        self._link: WebSocketLink | None = None
        self._leader: tuple[int, str] | None = None  # the last coordinator: the number of its address, and its node
        self._is_accepted = False
        self._was_accepted = False
        self._received_outcome = False
        self._voter_timer: asyncio.TimerHandle | None = None
        self._next_timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def local_host(self) -> str | None:
        return self._link.local_host if self._link else None

    @property
    def skew(self) -> float | None:
        return self._link.skew if self._link else None

    @property
    def disconnect_reason(self) -> str:
        if self._is_accepted:
            return ""
        address = self._addresses[self._search.target]
        reason = self._link.disconnect_reason if self._link else ""
        return reason or f"no coordinator is elected yet; waiting at {address}"

    def open(self, listener: Listener) -> None:
        self._listener = listener
        self._start_task(self._open())

    async def _open(self) -> None:
        try:
            if self._server is not None:
                await self._server.start()
            self._connect()
        except Exception as defect:
            if not self.failed.done():
                self.failed.set_exception(defect)

    def send(self, message: FromAgent) -> None:
        if self._link is not None and self._is_accepted:
            self._link.send(message)

    def drop(self) -> None:
        if self._link is not None:
            self._link.drop()

    async def close(self) -> None:
        """Disconnect.  A coordinator in this process ends with its job, or leaves the job to a successor."""
        self._listener = None
        self._cancel_timers()
        if self._link is not None:
            await self._link.close()
        if self._host is not None and self._server is not None:
            if self._host.coordinator is not None and (self._received_outcome or self._host.ended.done()):
                await asyncio.wait([self._host.ended], timeout=FINAL_REPORT_TIMEOUT_S + 1)
            await self._host.close()
            await self._server.close()
        if self._tasks:
            _, unfinished = await asyncio.wait(self._tasks, timeout=CLOSE_TIMEOUT_S)
            for task in unfinished:
                task.cancel()

    # the search for the coordinator -----------------------------------------------------------------------------------

    def _connect(self) -> None:
        """Connect to the search's address instead of any other."""
        if self._listener is None:
            return
        self._cancel_timers()
        self._link = link = WebSocketLink(
            self._addresses[self._search.target],
            run_id=self._settings.run_id,
            node=self._node,
            token=self._token,
            lease=self._settings.timing.lease,
            max_nodes=self._settings.max_nodes,
            tls=self._tls,
            handshake_timeout=max(self._settings.timing.lease, MIN_HANDSHAKE_TIMEOUT_S),
            listed_address=str(self._addresses[self._search.target]),
            is_elected=True,
            on_failed=lambda failure: self._on_failed(link, failure),
        )
        link.open(_SuccessionListener(self, link))

    def _connect_later(self, delay: float) -> None:
        old, self._link = self._link, None
        self._voter.on_disconnected()
        self._cancel_timers()
        if old is not None:
            self._start_task(old.close())
        self._next_timer = self._loop.call_later(delay, self._connect)

    def _on_failed(self, link: WebSocketLink, failure: ConnectFailure) -> None:
        """The address cannot be reached.  Nobody listens at the address that refuses: its agent has ended.

        In a large job, all who lost the coordinator spread their tries, as with one address (`websocket_link.py`).
        """
        if link is not self._link:
            return
        is_refused = failure is ConnectFailure.REFUSED
        if is_refused and self._leader is not None and self._leader[0] == self._search.target:
            self._voter.on_gone(self._leader[1])
        delay = self._search.on_failed(is_closed=failure is ConnectFailure.CLOSED)
        self._connect_later(delay + random.uniform(0.0, reconnect_spread_s(self._settings.max_nodes)))

    def _on_waited(self) -> None:
        if self._is_accepted:
            return
        if wait := self._search.extra_wait():
            self._next_timer = self._loop.call_later(wait, self._on_waited)
        else:
            self._connect_later(self._search.on_failed())

    def on_connected(self, link: WebSocketLink) -> None:
        if link is not self._link:
            return
        link.send(self._voter.follow())
        wait = self._search.waiting_time(is_first_election=self._voter.electorate.is_first) * random.uniform(0.8, 1.2)
        self._next_timer = self._loop.call_later(wait, self._on_waited)

    def on_disconnected(self, link: WebSocketLink, why: str) -> None:
        if link is not self._link:
            return
        if not self._is_accepted:
            self._connect_later(self._search.on_failed())
            return
        self._is_accepted = False
        if link.is_lost_by_silence and self._leader is not None:
            self._voter.on_silent(self._leader[1])
        self._search.on_lost(is_silent=link.is_lost_by_silence)
        self._connect_later(0.0)
        if self._host is not None:
            self._host.follow(None)
        if self._listener is not None:
            self._listener.on_disconnected(why)

    def on_rejected(self, link: WebSocketLink, why: str) -> None:
        """An agent that was in the job once tries another address: a stranger may have this one now."""
        if link is not self._link:
            return
        if self._was_accepted and not self._is_accepted:
            self._connect_later(self._search.on_failed())
        elif self._listener is not None:
            self._listener.on_rejected(why)

    # messages ---------------------------------------------------------------------------------------------------------

    def on_message(self, link: WebSocketLink, message: FromCoordinator) -> None:
        if link is not self._link or self._listener is None:
            return
        match message:
            case RequestPromise(node=node) | LeaderElected(node=node):
                target = self._search.target
                if self._leader is not None and self._leader[0] == target and self._leader[1] != node:
                    self._voter.on_gone(self._leader[1])  # another process listens at its address
                if isinstance(message, LeaderElected):
                    self._leader = (target, node)
                self._execute(link, self._voter.on(message, boot_time()))
            case Renew():
                self._execute(link, self._voter.on(message, boot_time()))
            case Redirect(address):
                if not self._is_accepted and address in self._addresses:
                    self._redirect(self._search.on_redirected(self._addresses.index(address)))
            case _ if self._is_accepted:
                self._received_outcome |= isinstance(message, Closed)
                self._listener.on_message(message)

    def _redirect(self, delay: float) -> None:
        """Stay connected until then: the peer may become a candidate itself."""
        if self._next_timer is not None:
            self._next_timer.cancel()
        self._next_timer = self._loop.call_later(delay, self._connect_later, 0.0)

    def _execute(self, link: WebSocketLink, commands: list[VoterCommand]) -> None:
        for command in commands:
            match command:
                case Reply(message):
                    link.send(message)
                    if isinstance(message, Promise):
                        self._search.on_promised()
                case Accept() if not self._is_accepted:
                    self._accept()
        if self._voter_timer is not None:
            self._voter_timer.cancel()
            self._voter_timer = None
        if (deadline := self._voter.deadline()) is not None:
            self._voter_timer = self._loop.call_later(max(0.0, deadline - boot_time()), self._on_voter_timer, link)

    def _on_voter_timer(self, link: WebSocketLink) -> None:
        if link is self._link:
            self._execute(link, self._voter.on_tick(boot_time()))

    def _accept(self) -> None:
        """The peer is the coordinator: join the job."""
        address = self._addresses[self._search.target]
        self._is_accepted = self._was_accepted = True
        self._search.on_accepted()
        if self._next_timer is not None:
            self._next_timer.cancel()
        is_own = address == self._listed_address
        if self._host is not None:
            self._host.follow(None if is_own else address)
        if not is_own:
            self._on_leader(address, None)
        if self._listener is not None:
            self._listener.on_connected()

    def _cancel_timers(self) -> None:
        for timer in (self._voter_timer, self._next_timer):
            if timer is not None:
                timer.cancel()

    def _start_task(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


class _SuccessionListener:
    """The listener of one connection: a call from a connection that was left is ignored."""

    def __init__(self, owner: SuccessionLink, link: WebSocketLink) -> None:
        self._owner = owner
        self._link = link

    def on_connected(self) -> None:
        self._owner.on_connected(self._link)

    def on_message(self, message: FromCoordinator) -> None:
        self._owner.on_message(self._link, message)

    def on_disconnected(self, why: str) -> None:
        self._owner.on_disconnected(self._link, why)

    def on_rejected(self, why: str) -> None:
        self._owner.on_rejected(self._link, why)
