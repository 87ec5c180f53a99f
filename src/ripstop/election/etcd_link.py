"""The link to a coordinator that etcd elects: executes the decisions of `election.py`, keeps the rules of `link.py`.

Every agent has one.  It follows the leader's coordinator with a `WebSocketLink`.  If its own agent is elected, the
coordinator runs in this process, on a port that is bound before it is announced.  No node is special: if the leader's
node is lost, its key ends with its lease, and the next leader learns the state of the job from the agents.

In etcd, a job has two keys below `PREFIX/RUN_ID/`: `coordinator` names the leader; `outcome` replaces it when the job
has ended, and expires after `OUTCOME_TTL_S` seconds.  Anyone who can write to etcd could forge either.  So both prove
the job's secret: a coordinator when an agent connects, the outcome by its signature.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Iterable

from ripstop.coordinator.driver import Coordinator
from ripstop.coordinator.job_end import FINAL_REPORT_TIMEOUT_S
from ripstop.coordinator.job_types import JobSettings
from ripstop.election import election, records
from ripstop.election.etcd_client import Denied, EtcdClient, KeyValue, Unavailable, prefix_range
from ripstop.election.leadership import (
    OUTCOME_TTL_S,
    Candidacy,
    Leadership,
    give_up_leadership_lease,
    prepare_for_leadership,
)
from ripstop.model.config import Etcd, Tls
from ripstop.model.errors import ProtocolError
from ripstop.model.events import Sink
from ripstop.model.failure import JobEnd
from ripstop.model.round import Address
from ripstop.protocol import secret
from ripstop.protocol.codec import decode, encode
from ripstop.protocol.messages import Closed, FromAgent, FromCoordinator
from ripstop.system.linux import boot_time
from ripstop.transport.link import Listener
from ripstop.transport.server import Server
from ripstop.transport.tls import client_context, server_context
from ripstop.transport.websocket_link import WebSocketLink

log = logging.getLogger("ripstop.coordinator")

CLOSE_TIMEOUT_S = 3.0  # to revoke leases and close connections at the end
FIRST_RETRY_DELAY_S = 0.1  # doubled up to a third of the lease


class EtcdLink:
    """A `Link` to the elected leader; create it inside a running event loop.

    `failed` and `on_leader` are those of `elected_link.py`.
    """

    def __init__(
        self,
        etcd: Etcd,
        settings: JobSettings,
        *,
        node: str,
        token: str,
        local_addr: str | None,
        tls: Tls | None = None,
        sinks: Iterable[Sink] = (),
        on_leader: Callable[[Address | None, Coordinator | None], None] = lambda _address, _own: None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._client = EtcdClient(etcd)
        self._port = etcd.port
        self._run_id = settings.run_id
        self._prefix = f"{etcd.prefix.rstrip('/')}/{settings.run_id}/"
        self._leader_key, self._outcome_key = f"{self._prefix}coordinator", f"{self._prefix}outcome"
        self._settings = settings
        self._node = node
        self._token = token
        self._local_addr = local_addr
        self._sinks = tuple(sinks)
        self._on_leader = on_leader
        self._server_tls = server_context(tls) if tls else None
        self._client_tls = client_context(tls) if tls else None
        self._election = election.Election()
        self._candidacy: Candidacy | None = None
        self._leadership: Leadership | None = None
        self._ended_lease = -1  # of this agent's last leadership
        self._publishing: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._listener: Listener | None = None
        self._link: WebSocketLink | None = None  # to the leader
        self._is_connected = False
        self._was_connected = False
        self._received_outcome = False
        self._reread = asyncio.Event()  # the keys must be read again
        self._etcd_error = "etcd was not tried yet"
        self._is_unavailable = False  # the error is that no member of etcd replied
        self._watching: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.failed: asyncio.Future[None] = self._loop.create_future()

    @property
    def local_host(self) -> str | None:
        return self._link.local_host if self._link else None

    @property
    def skew(self) -> float | None:
        return self._link.skew if self._link else None

    @property
    def disconnect_reason(self) -> str:
        if self._is_connected:
            return ""
        reason = self._link.disconnect_reason if self._link else "no leader is elected"
        return f"{self._etcd_error}; coordinator: {reason}" if self._etcd_error else reason

    def open(self, listener: Listener) -> None:
        self._listener = listener
        self._watching = asyncio.create_task(self._watch(), name="ripstop-election")

    def send(self, message: FromAgent) -> None:
        if self._link is not None:
            self._link.send(message)

    def drop(self) -> None:
        if self._link is not None:
            self._link.drop()

    async def close(self) -> None:
        """Disconnect.  A coordinator in this process stops; if the job has ended, it first publishes the outcome."""
        self._listener = None
        if self._link is not None:
            await self._link.close()
        if self._leadership is not None:
            ended = self._leadership.coordinator.ended
            if self._received_outcome or ended.done():
                await asyncio.wait([ended], timeout=FINAL_REPORT_TIMEOUT_S + 1)
                await asyncio.sleep(0)  # lets `_on_job_ended` start the task
                if self._publishing is not None:
                    await asyncio.wait([self._publishing])
        if self._watching is not None:
            self._watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watching
        self._stop_leading()
        self._withdraw()
        if self._tasks:
            _, unfinished = await asyncio.wait(self._tasks, timeout=CLOSE_TIMEOUT_S)
            for task in unfinished:
                task.cancel()
        await self._client.close()

    # the keys in etcd -------------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Act on every change of the keys, until cancelled."""
        delay = FIRST_RETRY_DELAY_S
        while True:
            try:
                await self._read_and_wait()
                delay = FIRST_RETRY_DELAY_S
                continue
            except Unavailable as error:
                why = str(error)
                if members := await self._client.members_without_leader():
                    why += f" ({', '.join(map(str, members))} without a leader; check that most members of etcd run)"
                if not self._is_unavailable:
                    log.warning("etcd cannot be reached, trying again: %s", why)
                self._etcd_error = f"etcd cannot be reached: {why}"
                self._is_unavailable = True
            except (ProtocolError, Denied) as error:
                self._etcd_error, self._is_unavailable = str(error), False
                if not self._was_connected:
                    self.on_rejected(str(error))
                    return
            except Exception as defect:  # the agent would wait for ever
                if not self.failed.done():
                    self.failed.set_exception(defect)
                return
            await asyncio.sleep(delay)
            delay = min(2 * delay, max(self._settings.timing.lease / 3, FIRST_RETRY_DELAY_S))

    async def _read_and_wait(self) -> None:
        """Read the keys, act on them, and wait for a change or another reason to read them again."""
        self._reread.clear()
        revision, (leader, outcome) = await self._client.read(self._leader_key, self._outcome_key)
        if self._is_unavailable:
            log.info("etcd can be reached again")
        self._etcd_error, self._is_unavailable = "", False
        if outcome is not None:
            self._on_outcome(outcome)
        elif leader is not None:
            await self._on_leader_key(leader)
        else:
            await self._handle(election.NoLeader())
        if not self._reread.is_set():
            await self._wait_for_change(revision + 1)

    async def _wait_for_change(self, revision: int) -> None:
        # A watch may hang with its member.  A connected agent notices the loss of its leader without the watch; any
        # other reads the keys again after a lease.
        timeout = None if self._is_connected else self._settings.timing.lease
        watch = asyncio.create_task(self._client.wait_for_change(prefix_range(self._prefix), revision))
        reread = asyncio.create_task(self._reread.wait())
        try:
            await asyncio.wait([watch, reread], timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if watch.done() and not watch.result():
                await asyncio.sleep(FIRST_RETRY_DELAY_S)
        finally:
            for task in (watch, reread):
                task.cancel()
            await asyncio.wait([watch, reread])

    async def _on_leader_key(self, entry: KeyValue) -> None:
        """The key names a leader.  It may be this agent, without a reply to its campaign, if the reply was lost."""
        try:
            leader = records.read_leader_record(entry.value.decode(errors="replace"), self._run_id, entry.created)
        except ProtocolError as error:
            raise ProtocolError(
                f"etcd's key {self._leader_key} cannot be used: {error}; "
                "choose another --rdzv-id or etcd_prefix, or delete it"
            ) from None
        candidacy = self._candidacy
        if entry.lease == self._ended_lease:  # etcd was not reachable when this agent stepped down
            await self._client.revoke(entry.lease)
            self._reread.set()
        elif candidacy is not None and candidacy.lease == entry.lease:
            await self._handle(election.Elected(leader, candidacy.requested_at, candidacy.ttl))
        else:
            self._withdraw()
            await self._handle(election.LeaderKnown(leader))

    def _on_outcome(self, entry: KeyValue) -> None:
        signature, _, text = entry.value.decode(errors="replace").partition("\n")
        try:
            if not secret.proofs_match(signature, secret.sign(self._token, self._run_id, text)):
                raise ProtocolError("it does not prove the job's secret")
            closed = decode(text, (Closed,))
        except ProtocolError as error:
            raise ProtocolError(
                f"etcd's key {self._outcome_key} cannot be used: {error}; choose another --rdzv-id or etcd_prefix"
            ) from None
        if not self._was_connected:
            self.on_rejected(
                f"job {self._run_id!r} has ended: {closed.report.outcome}; choose another --rdzv-id, "
                f"or start it again in {OUTCOME_TTL_S} s"
            )
        elif self._listener is not None and not self._received_outcome:
            if not self._is_connected:
                self._listener.on_connected()
            self._received_outcome = True
            self._listener.on_message(closed)

    # the election -----------------------------------------------------------------------------------------------------

    async def _handle(self, event: election.Event) -> None:
        for command in self._election.on(event, boot_time()):
            match command:
                case election.Campaign():
                    await self._campaign()
                case election.Lead(leader):
                    await self._lead(leader)
                case _:
                    self._execute(command)
        self._set_timer()

    def _handle_now(self, event: election.Renewed | election.Expired | election.Tick) -> None:
        """An event outside `_watch`; its only possible command is to step down."""
        for command in self._election.on(event, boot_time()):
            self._execute(command)
        self._set_timer()

    def _execute(self, command: election.Command) -> None:
        match command:
            case election.Follow(leader):
                self._follow(leader)
            case election.StepDown(why):
                log.warning("the coordinator in this agent steps down: %s", why)
                self._stop_leading()
                self._withdraw()
                self._reread.set()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if (deadline := self._election.deadline()) is not None:
            self._timer = self._loop.call_later(max(0.0, deadline - boot_time()), self._handle_now, election.Tick())

    async def _campaign(self) -> None:
        candidacy = self._candidacy
        if candidacy is None or boot_time() > candidacy.requested_at + candidacy.ttl / 2:
            self._withdraw()
            lease = self._settings.timing.lease
            candidacy = self._candidacy = await prepare_for_leadership(
                self._client, lease, self._local_addr, self._port
            )
        value = records.write_leader_record(self._run_id, candidacy.address, self._node)
        try:
            entry = await self._client.create(self._leader_key, value, candidacy.lease, unless=self._outcome_key)
        except Denied:
            self._withdraw()
            raise
        if entry is None:
            self._reread.set()  # the job has ended in the meantime
        else:
            await self._on_leader_key(entry)

    def _withdraw(self) -> None:
        """Close the socket and revoke the lease of a candidacy."""
        if self._candidacy is not None:
            self._candidacy.bound.listening.close()
            self._start_task(give_up_leadership_lease(self._client, self._candidacy.lease))
            self._candidacy = None

    # leading ----------------------------------------------------------------------------------------------------------

    async def _lead(self, leader: election.Leader) -> None:
        candidacy, self._candidacy = self._candidacy, None
        assert candidacy is not None, "only a candidate is elected"
        coordinator = Coordinator(self._settings, lambda: self._election.is_leader(boot_time()), self._sinks)
        server = Server(
            candidacy.bound.listening,
            coordinator,
            token=self._token,
            tls=self._server_tls,
            endpoint_host=candidacy.address.host,
        )
        coordinator.ended.add_done_callback(self._on_job_ended)
        self._leadership = Leadership(self._client, leader, candidacy, coordinator, server, self._handle_now)
        await server.start()
        log.info("elected: the coordinator of job=%s is at %s", self._run_id, leader.address)

    def _stop_leading(self) -> None:
        leadership, self._leadership = self._leadership, None
        if leadership is None:
            return
        self._ended_lease = leadership.lease
        self._on_leader(None, None)
        leadership.stop()
        if self._timer is not None:
            self._timer.cancel()
        self._start_task(leadership.close())

    def _on_job_ended(self, ended: asyncio.Future[JobEnd]) -> None:
        if ended.cancelled():
            return
        if (defect := ended.exception()) is not None:
            if not self.failed.done():
                self.failed.set_exception(defect)
        elif self._leadership is not None:
            text = encode(Closed(ended.result()))
            signed = f"{secret.sign(self._token, self._run_id, text)}\n{text}"
            publish = self._leadership.publish_outcome(self._leader_key, self._outcome_key, signed)
            self._publishing = self._start_task(publish)

    # following --------------------------------------------------------------------------------------------------------

    def _follow(self, leader: election.Leader) -> None:
        leadership = self._leadership
        is_own = leadership is not None and leadership.leader.revision == leader.revision
        self._on_leader(leader.address, leadership.coordinator if leadership and is_own else None)
        old = self._link
        self._link = new = WebSocketLink(
            leader.address,
            run_id=self._run_id,
            node=self._node,
            token=self._token,
            lease=self._settings.timing.lease,
            max_nodes=self._settings.max_nodes,
            tls=self._client_tls,
            is_elected=True,
        )
        if old is not None:
            self._start_task(old.close())
        if self._is_connected:
            self.on_disconnected(f"the coordinator is at {leader.address} now")
        if self._listener is not None:
            new.open(self)

    def on_connected(self) -> None:
        self._is_connected = self._was_connected = True
        if self._listener is not None:
            self._listener.on_connected()

    def on_message(self, message: FromCoordinator) -> None:
        if isinstance(message, Closed):
            self._received_outcome = True
        if self._listener is not None:
            self._listener.on_message(message)

    def on_disconnected(self, why: str) -> None:
        self._is_connected = False
        self._reread.set()
        if self._listener is not None:
            self._listener.on_disconnected(why)

    def on_rejected(self, why: str) -> None:
        if self._listener is not None:
            self._listener.on_rejected(why)

    def _start_task(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
