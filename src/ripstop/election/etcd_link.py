"""The link to a coordinator that etcd elects: carries out what `election.py` decides, and keeps the rules of `link.py`.

Every agent has one.  It follows the coordinator in office with a `WebSocketLink`, and when its own agent is elected,
the coordinator runs in here, on a port of its own that is bound before it is announced.  No node of the job is special:
when the coordinator's node is lost, its key goes with its lease, and the next to be elected learns the job from agents.

In etcd a job has two keys below `PREFIX/RUN_ID/`: `coordinator`, while somebody is in office, and `outcome`, which
takes its place when the job is over and goes by itself after `MEMORY` seconds.  Whoever can write to etcd could pose as
either, so both prove the job's secret: a coordinator when it is linked to, the outcome by its signature.
"""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Coroutine, Iterable

from msgspec import Struct

from ripstop.coordinator.closing import FINAL_REPORT_TIMEOUT_S
from ripstop.coordinator.service import Coordinator
from ripstop.coordinator.settings import JobSettings
from ripstop.election.election import (
    Campaign,
    Command,
    Elected,
    Election,
    Event,
    Expired,
    Follow,
    Lead,
    Leader,
    LeaderKnown,
    NoLeader,
    Renewed,
    StepDown,
    Tick,
    read_leader,
    write_leader,
)
from ripstop.election.etcd_client import Denied, EtcdClient, KeyValue, Unavailable, below
from ripstop.model.config import Etcd, Tls
from ripstop.model.errors import ProtocolError, RipstopError
from ripstop.model.events import Sink
from ripstop.model.failure import JobReport
from ripstop.model.round import Address
from ripstop.protocol import secret
from ripstop.protocol.codec import decode, fit
from ripstop.protocol.messages import Closed, FromAgent, FromCoordinator
from ripstop.transport.client import WebSocketLink
from ripstop.transport.endpoint import Bound, bind
from ripstop.transport.link import Listener
from ripstop.transport.server import Server
from ripstop.transport.tls import for_agent, for_coordinator

log = logging.getLogger("ripstop.coordinator")

MORE = 1  # seconds an office lasts beyond the job's lease: etcd may need them to elect a leader of its own
MEMORY = 15  # seconds etcd remembers how a job ended, for members that were away
PARTING = 3.0  # seconds to give back to etcd what was had from it, at the end
FIRST_PAUSE = 0.1  # seconds before etcd is asked again; doubled up to a third of the lease


class _Candidacy(Struct, frozen=True):
    """What it takes to be elected: a lease, asked for at a time, and a socket that listens."""

    lease: int
    ttl: float
    asked: float
    bound: Bound
    address: Address


class _Office(Struct, frozen=True):
    """The coordinator in this process."""

    seat: Leader
    lease: int
    coordinator: Coordinator
    server: Server
    renewing: asyncio.Task[None]


class EtcdLink:
    """A `Link` to whoever is elected; to be made inside a running event loop.

    `broken` has the defect, should the coordinator in this process break.  `seated` is told where the coordinator is,
    whenever it is another, and which it is if it is in this process; nothing of either when that one steps down.
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
        seated: Callable[[Address | None, Coordinator | None], None] = lambda _address, _own: None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._client = EtcdClient(etcd)
        self._port = etcd.port
        self._prefix = f"{etcd.prefix.rstrip('/')}/{settings.run_id}/"
        self._settings = settings
        self._node = node
        self._token = token
        self._local_addr = local_addr
        self._sinks = tuple(sinks)
        self._seated = seated
        self._served_tls = for_coordinator(tls) if tls else None
        self._linked_tls = for_agent(tls) if tls else None
        self._election = Election()
        self._candidacy: _Candidacy | None = None
        self._office: _Office | None = None
        self._given_up = -1  # the lease of the office that was left last
        self._conclusion: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._listener: Listener | None = None
        self._followed: WebSocketLink | None = None
        self._linked = False
        self._member = False  # has been linked at least once
        self._told_the_end = False
        self._look = asyncio.Event()  # what is known of etcd's keys is in doubt
        self._trouble = "etcd was not asked yet"
        self._unavailable = False  # the trouble is that etcd cannot be reached, and that was said
        self._seeking: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.broken: asyncio.Future[None] = self._loop.create_future()

    @property
    def local_host(self) -> str | None:
        return self._followed.local_host if self._followed else None

    @property
    def skew(self) -> float | None:
        return self._followed.skew if self._followed else None

    @property
    def trouble(self) -> str:
        if self._linked:
            return ""
        link = self._followed.trouble if self._followed else "nobody is elected"
        return f"{self._trouble}; coordinator: {link}" if self._trouble else link

    def open(self, listener: Listener) -> None:
        self._listener = listener
        self._seeking = asyncio.create_task(self._seek(), name="ripstop-election")

    def send(self, message: FromAgent) -> None:
        if self._followed is not None:
            self._followed.send(message)

    async def close(self) -> None:
        """End the link; a coordinator in here first tells everybody the end of the job, or leaves its office."""
        self._listener = None
        if self._followed is not None:
            await self._followed.close()
        if self._office is not None and (self._told_the_end or self._office.coordinator.ended.done()):
            await asyncio.wait([self._office.coordinator.ended], timeout=FINAL_REPORT_TIMEOUT_S + 1)
            await asyncio.sleep(0)  # for `_conclude` to have begun
            if self._conclusion is not None:
                await asyncio.wait([self._conclusion])
        if self._seeking is not None:
            self._seeking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._seeking
        self._leave_office()
        self._withdraw()
        if self._tasks:
            _, slow = await asyncio.wait(self._tasks, timeout=PARTING)
            for task in slow:
                task.cancel()
        await self._client.close()

    # seeking ----------------------------------------------------------------------------------------------------------

    async def _seek(self) -> None:
        """Know who is in office, for ever."""
        pause = FIRST_PAUSE
        while True:
            try:
                await self._look_and_watch()
                pause = FIRST_PAUSE
                continue
            except Unavailable as error:
                why = str(error)
                if lost := await self._client.leaderless():
                    why += f" (no leader is known to {', '.join(map(str, lost))}; see that most of etcd's members run)"
                if not self._unavailable:
                    log.warning("etcd cannot be reached, trying again: %s", why)
                self._trouble = f"etcd cannot be reached: {why}"
                self._unavailable = True
            except (ProtocolError, Denied) as error:
                self._trouble, self._unavailable = str(error), False
                if not self._member:
                    self._refuse(str(error))
                    return
            except Exception as defect:  # nobody may wait for a link that seeks nothing any more
                if not self.broken.done():
                    self.broken.set_exception(defect)
                return
            await asyncio.sleep(pause)
            pause = min(2 * pause, max(self._settings.timing.lease / 3, FIRST_PAUSE))

    async def _look_and_watch(self) -> None:
        """Look at the keys, act on them, and wait until they change or there is a reason to look again."""
        self._look.clear()
        view = await self._client.read(self._prefix)
        if self._unavailable:
            log.info("etcd answers again")
        self._trouble, self._unavailable = "", False
        if "outcome" in view.entries:
            self._is_over(view.entries["outcome"])
        elif "coordinator" in view.entries:
            await self._meet(view.entries["coordinator"])
        else:
            await self._feed(NoLeader())
        if not self._look.is_set():
            await self._until_changed(view.revision + 1)

    async def _until_changed(self, revision: int) -> None:
        # A watch may hang with its member.  Whoever has a coordinator can wait for that to break; who has none, looks.
        patience = None if self._linked else self._settings.timing.lease
        watching = asyncio.create_task(self._client.until_changed(below(self._prefix), revision))
        nudged = asyncio.create_task(self._look.wait())
        try:
            await asyncio.wait([watching, nudged], timeout=patience, return_when=asyncio.FIRST_COMPLETED)
            if watching.done() and not watching.result():
                await asyncio.sleep(FIRST_PAUSE)
        finally:
            for task in (watching, nudged):
                task.cancel()
            await asyncio.wait([watching, nudged])

    async def _meet(self, entry: KeyValue) -> None:
        """Somebody is in office; this agent too may be, without having heard it, when the answer was lost."""
        key = f"{self._prefix}coordinator"
        try:
            seat = read_leader(entry.value, self._settings.run_id, entry.created)
        except ProtocolError as error:
            raise ProtocolError(
                f"etcd's key {key} cannot be used: {error}; choose another --rdzv-id or etcd_prefix, or delete it"
            ) from None
        mine = self._candidacy
        if entry.lease == self._given_up:  # etcd was away when it was to hear of it
            await self._client.revoke(entry.lease)
            self._look.set()
        elif mine is not None and mine.lease == entry.lease:
            await self._feed(Elected(seat, mine.asked, mine.ttl))
        else:
            self._withdraw()
            await self._feed(LeaderKnown(seat))

    def _is_over(self, entry: KeyValue) -> None:
        signature, _, text = entry.value.partition("\n")
        try:
            if not secret.same(signature, secret.sign(self._token, self._settings.run_id, text)):
                raise ProtocolError("it does not prove the job's secret")
            closed = decode(text, (Closed,))
        except ProtocolError as error:
            raise ProtocolError(
                f"etcd's key {self._prefix}outcome cannot be used: {error}; choose another --rdzv-id or etcd_prefix"
            ) from None
        if not self._member:
            self._refuse(
                f"job {self._settings.run_id!r} is over: {closed.report.outcome}; choose another --rdzv-id, "
                f"or start it again in {MEMORY} s"
            )
        elif self._listener is not None and not self._told_the_end:
            if not self._linked:
                self._listener.on_linked()
            self._told_the_end = True
            self._listener.on_message(closed)

    def _refuse(self, why: str) -> None:
        if self._listener is not None:
            self._listener.on_refused(why)

    # the election -----------------------------------------------------------------------------------------------------

    async def _feed(self, event: Event) -> None:
        for command in self._election.on(event, _now()):
            match command:
                case Campaign():
                    await self._campaign()
                case Lead(seat):
                    await self._take_office(seat)
                case _:
                    self._execute(command)
        self._arm()

    def _tell(self, event: Renewed | Expired | Tick) -> None:
        """What comes beside the seeking; it never calls for more than stepping down."""
        for command in self._election.on(event, _now()):
            self._execute(command)
        self._arm()

    def _execute(self, command: Command) -> None:
        match command:
            case Follow(seat):
                self._follow(seat)
            case StepDown(why):
                log.warning("the coordinator in this agent stops deciding: %s", why)
                self._leave_office()
                self._withdraw()
                self._look.set()

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if (deadline := self._election.deadline()) is not None:
            self._timer = self._loop.call_later(max(0.0, deadline - _now()), self._tell, Tick())

    async def _campaign(self) -> None:
        mine = self._candidacy
        if mine is None or _now() > mine.asked + mine.ttl / 2:
            self._withdraw()
            mine = self._candidacy = await self._stand()
        value = write_leader(self._settings.run_id, mine.address, self._node)
        try:
            entry = await self._client.create(
                f"{self._prefix}coordinator", value, mine.lease, unless=f"{self._prefix}outcome"
            )
        except Denied:
            self._withdraw()
            raise
        if entry is None:
            self._look.set()  # the job has ended meanwhile
        else:
            await self._meet(entry)

    async def _stand(self) -> _Candidacy:
        try:
            host = self._local_addr or await self._client.local_host()
        except OSError as error:
            raise Unavailable(f"no way to etcd: {error.strerror or error}") from error
        asked = _now()
        lease, ttl = await self._client.grant(math.ceil(self._settings.timing.lease) + MORE)
        try:
            bound = self._bind(host)
        except RipstopError as error:
            raise Denied(f"{host}: this node cannot listen there; give one of its addresses as --local-addr") from error
        return _Candidacy(lease, ttl, asked, bound, Address(host, bound.address.port))

    def _bind(self, host: str) -> Bound:
        """At the port that was asked for; an election does not fail for one that is taken."""
        try:
            bound = bind(Address(host, self._port), demanded=True)
        except RipstopError as error:
            if not self._port:
                raise
            log.warning("%s; any other will do for the nodes, who learn it from etcd", error)
            bound = bind(Address(host, 0), demanded=True)
        assert bound is not None, "a demanded address is bound, or an error"
        return bound

    def _withdraw(self) -> None:
        """Give back what a candidacy that came to nothing had."""
        if self._candidacy is not None:
            self._candidacy.bound.listening.close()
            self._task(self._revoke(self._candidacy.lease))
            self._candidacy = None

    # in office --------------------------------------------------------------------------------------------------------

    async def _take_office(self, seat: Leader) -> None:
        mine, self._candidacy = self._candidacy, None
        assert mine is not None, "only who stood is elected"
        coordinator = Coordinator(self._settings, lambda: self._election.in_office(_now()), self._sinks)
        server = Server(
            mine.bound.listening,
            coordinator,
            run_id=self._settings.run_id,
            token=self._token,
            lease=self._settings.timing.lease,
            nodes=self._settings.max_nodes,
            tls=self._served_tls,
            name=mine.address.host,
        )
        coordinator.ended.add_done_callback(self._ended)
        renewing = asyncio.create_task(self._renew(mine.lease, mine.ttl), name="ripstop-lease")
        self._office = _Office(seat, mine.lease, coordinator, server, renewing)
        await server.start()
        log.info("elected: the coordinator of job=%s is at %s", self._settings.run_id, seat.address)

    async def _renew(self, lease: int, ttl: float) -> None:
        pause = ttl / 4
        while True:
            await asyncio.sleep(pause)
            asked = _now()
            try:
                given = await self._client.keep_alive(lease, timeout=ttl / 8)
            except (Unavailable, Denied):
                pause = FIRST_PAUSE  # who is right about it, the clock knows
                continue
            pause = ttl / 4
            self._tell(Renewed(asked, given) if given > 0 else Expired())

    def _leave_office(self) -> None:
        """Nothing is decided after this call, and nobody is told more than was."""
        office, self._office = self._office, None
        if office is None:
            return
        self._given_up = office.lease
        self._seated(None, None)
        office.coordinator.stop()
        office.renewing.cancel()
        if self._timer is not None:
            self._timer.cancel()
        self._task(self._close_office(office))

    async def _close_office(self, office: _Office) -> None:
        await asyncio.gather(self._revoke(office.lease), office.server.close())

    async def _revoke(self, lease: int) -> None:
        with contextlib.suppress(Unavailable, Denied):  # then it ends by itself
            await self._client.revoke(lease)

    def _ended(self, ended: asyncio.Future[JobReport]) -> None:
        if ended.cancelled():
            return
        if (defect := ended.exception()) is not None:
            if not self.broken.done():
                self.broken.set_exception(defect)
        elif self._office is not None:
            self._conclusion = self._task(self._conclude(self._office, ended.result()))

    async def _conclude(self, office: _Office, report: JobReport) -> None:
        """Leave word of the end where the coordinator's key was."""
        text = fit(Closed(report))
        signature = secret.sign(self._token, self._settings.run_id, text)
        try:
            lease, _ = await self._client.grant(MEMORY)
            await self._client.replace(
                f"{self._prefix}coordinator",
                office.seat.revision,
                f"{self._prefix}outcome",
                f"{signature}\n{text}",
                lease,
            )
        except (Unavailable, Denied) as error:
            log.warning("the job's end could not be noted in etcd: %s", error)

    # following --------------------------------------------------------------------------------------------------------

    def _follow(self, seat: Leader) -> None:
        own = self._office is not None and self._office.seat.revision == seat.revision
        self._seated(seat.address, self._office.coordinator if self._office and own else None)
        old = self._followed
        self._followed = new = WebSocketLink(
            seat.address,
            run_id=self._settings.run_id,
            node=self._node,
            token=self._token,
            lease=self._settings.timing.lease,
            tls=self._linked_tls,
        )
        if old is not None:
            self._task(old.close())
        if self._linked:
            self.on_unlinked(f"the coordinator is at {seat.address} now")
        if self._listener is not None:
            new.open(self)

    def on_linked(self) -> None:
        self._linked = self._member = True
        if self._listener is not None:
            self._listener.on_linked()

    def on_message(self, message: FromCoordinator) -> None:
        if isinstance(message, Closed):
            self._told_the_end = True
        if self._listener is not None:
            self._listener.on_message(message)

    def on_unlinked(self, why: str) -> None:
        self._linked = False
        self._look.set()
        if self._listener is not None:
            self._listener.on_unlinked(why)

    def on_refused(self, why: str) -> None:
        self._refuse(why)

    def _task(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _now() -> float:
    """Seconds that go on while the machine sleeps, as etcd's do."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()
