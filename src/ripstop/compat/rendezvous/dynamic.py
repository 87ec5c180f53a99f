"""`torch.distributed.elastic.rendezvous.dynamic_rendezvous`: a handler over anything that can compare-and-set a blob.

All decisions are in `ripstop.compat.rendezvous.compare_and_set`; here they are read, written, waited for, and put in
torch's
words.  What differs from torch: the state is JSON and carries its job and version; clocks of nodes are not compared;
survivors keep their ranks; when they are enough, a round needs no last call; the workers' store is a new one for every
round, on a socket that was bound before the round was formed; and no two rounds share a key of the agents' store, also
when another job of the same name was there before.
"""

from __future__ import annotations

import logging
import os
import random
import socket
import threading
import time
import uuid
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from msgspec import Struct

from ripstop.compat.rendezvous.compare_and_set import (
    Formed,
    MemberSettings,
    Participant,
    RendezvousClosed,
    SharedState,
    Step,
    Wait,
    Write,
    decode,
    encode,
)
from ripstop.compat.rendezvous.handler import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
    is_a,
)
from ripstop.model.errors import ProtocolError
from ripstop.model.round import Address

__all__ = [
    "DynamicRendezvousHandler",
    "RendezvousBackend",
    "RendezvousSettings",
    "RendezvousTimeout",
    "Token",
    "create_handler",
]

log = logging.getLogger("ripstop.compat")

Token = Any
"""What a backend recognises a state by."""

READS = 50.0  # a second, of all nodes that wait together
LONGEST_PAUSE = 1.0  # seconds between two of a node's


class RendezvousBackend(ABC):
    """Holds one blob; how, is all that a backend has to say."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The backend's name, as in `--rdzv-backend`."""

    @abstractmethod
    def get_state(self) -> tuple[bytes, Token] | None:
        """The blob and its token; None when there is none.  Raises `RendezvousConnectionError`."""

    @abstractmethod
    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        """Replace the blob that has this token, or be the first when `token` is None.

        The blob that is there afterwards, its token, and whether it is this one.  Raises `RendezvousConnectionError`;
        the blob may have been replaced all the same.
        """


class RendezvousTimeout:
    """How long for what: enough nodes; more of them once there are enough; closing; one beat."""

    _DEFAULTS = {"join": 600, "last_call": 30, "close": 30, "heartbeat": 5}  # noqa: RUF012 - never changed

    def __init__(
        self,
        join: timedelta | None = None,
        last_call: timedelta | None = None,
        close: timedelta | None = None,
        heartbeat: timedelta | None = None,
    ) -> None:
        given = {"join": join, "last_call": last_call, "close": close, "heartbeat": heartbeat}
        self._times = {name: timedelta(seconds=seconds) for name, seconds in self._DEFAULTS.items()}
        for name, wanted in given.items():
            if wanted is None:
                continue
            if wanted <= timedelta(0):
                raise ValueError(f"{name}={wanted}: a time is above 0; give more")
            self._times[name] = wanted

    @property
    def join(self) -> timedelta:
        return self._times["join"]

    @property
    def last_call(self) -> timedelta:
        return self._times["last_call"]

    @property
    def close(self) -> timedelta:
        return self._times["close"]

    @property
    def heartbeat(self) -> timedelta:
        return self._times["heartbeat"]


@dataclass(repr=False, eq=False, frozen=True)
class RendezvousSettings:
    """What a handler was made with.  A node that does not beat for so many intervals is lost."""

    run_id: str
    min_nodes: int
    max_nodes: int
    timeout: RendezvousTimeout
    keep_alive_interval: timedelta
    keep_alive_max_attempt: int

    def __post_init__(self) -> None:
        if not self.run_id:
            raise ValueError("a rendezvous has a run id, and this one is empty; give the job a name")
        if self.min_nodes < 1:
            raise ValueError(f"min_nodes={self.min_nodes}: a job has nodes; give 1 or more")
        if self.max_nodes < self.min_nodes:
            raise ValueError(f"max_nodes={self.max_nodes} is below min_nodes={self.min_nodes}; give as many or more")
        if self.keep_alive_interval <= timedelta(0):
            raise ValueError(f"keep_alive_interval={self.keep_alive_interval}: a time is above 0; give seconds")
        if self.keep_alive_max_attempt < 1:
            raise ValueError(f"keep_alive_max_attempt={self.keep_alive_max_attempt}: give 1 or more")


class _Host(Struct, frozen=True):
    """This node's address for the others, and whether somebody gave it."""

    name: str
    given: bool


class _Blob:
    """The shared state, as it was when it was last read or written."""

    def __init__(self, backend: RendezvousBackend, run_id: str) -> None:
        self._backend = backend
        self._run_id = run_id
        self._token: Token | None = None
        self._read = 0.0
        self.state = SharedState(run_id)

    def read(self, age: float = 0.0) -> SharedState:
        """The state; one that was read less than `age` seconds ago will do."""
        if not age or time.monotonic() - self._read >= age:
            found = self._backend.get_state()
            self._take(*(found or (None, None)))
        return self.state

    def write(self, state: SharedState) -> SharedState:
        """Try to; the state that is there now, whoever wrote it."""
        try:
            found = self._backend.set_state(encode(state), self._token)
        except Exception as error:
            if not is_a(error, RendezvousConnectionError):
                raise
            return self.read()  # it may have been written all the same; if nobody answers, that is the error
        self._take(*(found[:2] if found else (None, None)))
        return self.state

    def _take(self, blob: bytes | None, token: Token | None) -> None:
        try:
            self.state = SharedState(self._run_id) if blob is None else decode(blob, self._run_id)
        except ProtocolError as error:
            raise RendezvousStateError(
                f"the state of the rendezvous {self._run_id!r} cannot be used: {error}; it is left as it is: "
                "use another run id, or remove it"
            ) from None
        self._token, self._read = token, time.monotonic()


class DynamicRendezvousHandler(RendezvousHandler):
    """Meets others that have a handler on the same blob, from `min_nodes` to `max_nodes` of them."""

    @classmethod
    def from_backend(
        cls,
        run_id: str,
        store: Any,
        backend: RendezvousBackend,
        min_nodes: int,
        max_nodes: int,
        local_addr: str | None = None,
        timeout: RendezvousTimeout | None = None,
        keep_alive_interval: int = 5,
        keep_alive_max_attempt: int = 3,
    ) -> DynamicRendezvousHandler:
        """A new node; `store` is what the rounds' stores are parts of."""
        settings = RendezvousSettings(
            run_id,
            min_nodes,
            max_nodes,
            timeout or RendezvousTimeout(),
            timedelta(seconds=keep_alive_interval),
            keep_alive_max_attempt,
        )
        host = _Host(local_addr or socket.getfqdn(), given=bool(local_addr))
        return cls(host, settings, backend.name, store, _Blob(backend, run_id))

    def __init__(
        self, node: _Host, settings: RendezvousSettings, backend_name: str, store: Any, state_holder: _Blob
    ) -> None:
        interval, attempts = settings.keep_alive_interval.total_seconds(), settings.keep_alive_max_attempt
        self._host, self._given = node.name, node.given
        self._settings = settings
        self.backend_name = backend_name
        self._store = store
        self._blob = state_holder
        self._beat = min(interval, interval * attempts / 3)  # a beat that is late by one is no loss
        self._member = Participant(
            f"{node.name}_{os.getpid()}_{uuid.uuid4().hex[:8]}",
            MemberSettings(
                settings.min_nodes,
                settings.max_nodes,
                settings.timeout.last_call.total_seconds(),
                self._beat,
                interval * attempts,
            ),
        )
        self._lock = threading.Lock()  # around every step: beats come from a thread of their own
        self._pulse: _Pulse | None = None
        self._faint = False  # the last beat failed, and that was said
        self._server: Any = None  # the workers' store of this round, on rank 0's node

    @property
    def settings(self) -> RendezvousSettings:
        return self._settings

    def get_backend(self) -> str:
        return self.backend_name

    def get_run_id(self) -> str:
        return self._settings.run_id

    @property
    def use_agent_store(self) -> bool:
        return os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "0") != "1"

    def next_rendezvous(self) -> RendezvousInfo:
        self._stop_beating()
        self._server = None  # its workers are gone
        listening = self._listen()
        try:
            formed = self._join(Address(self._host, listening.getsockname()[1]))
            self._start_beating()
            if formed.rank == 0 and self.use_agent_store:
                self._server = self._serve(listening)
        finally:
            listening.close()
        log.info(
            "rendezvous=%s round=%d node=%s rank=%d nodes=%d",
            self.get_run_id(), formed.round, self._member.node, formed.rank, formed.size,
        )  # fmt: skip
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        # the name of a node is no other job's; a round's number may be that of a job whose state is gone
        store = PrefixStore(f"torch.rendezvous.{self.get_run_id()}.{formed.round}.{formed.host}", self._store)
        where = RendezvousStoreInfo(formed.store.host, formed.store.port)
        return RendezvousInfo(store, formed.rank, formed.size, where)

    def is_closed(self) -> bool:
        with self._lock:
            return self._blob.read().closed

    def set_closed(self) -> None:
        self._run(lambda state, _: self._member.close(state), self._closing(), "closed")

    def num_nodes_waiting(self) -> int:
        with self._lock:
            return self._member.waiting(self._blob.read(self._pause()))

    def shutdown(self) -> bool:
        """Closes the rendezvous, as torch's does: the job is over for all its nodes."""
        self._stop_beating()
        self._server = None
        try:
            self.set_closed()
        except Exception as error:
            if not is_a(error, RendezvousError):
                raise
            log.warning("rendezvous=%s could not be closed: %s", self.get_run_id(), error)
            return False
        return True

    # steps ------------------------------------------------------------------------------------------------------------

    def _join(self, store: Address) -> Formed:
        patience = self._settings.timeout.join.total_seconds()
        try:
            end = self._run(lambda state, now: self._member.join(state, store, now), patience, "formed")
        except RendezvousTimeoutError:
            self._run(lambda state, _: self._member.leave(state), self._closing(), "left")
            raise
        match end:
            case Formed():
                return end
            case RendezvousClosed(spare=True):
                raise RendezvousGracefulExitError(f"the rendezvous {self.get_run_id()!r} was closed; this was a spare")
            case _:
                raise RendezvousClosedError(f"the rendezvous {self.get_run_id()!r} is closed: there is no other round")

    def _closing(self) -> float:
        return self._settings.timeout.close.total_seconds()

    def _run(self, step: Callable[[SharedState, float], Step], patience: float, what: str) -> Step:
        """Take the step again and again, with the newest state, until it says that it is done."""
        until = time.monotonic() + patience
        with self._lock:
            self._blob.read()
        while True:
            with self._lock:
                said = step(self._blob.state, time.monotonic())
                if isinstance(said, Write):
                    now_there = self._blob.write(said.state)
                    if (now_there.writer, now_there.revision) == (said.state.writer, said.state.revision):
                        continue
            if not isinstance(said, Wait | Write):
                return said
            if isinstance(said, Wait) and said.spare:
                until = time.monotonic() + patience  # a spare's time begins when there is a place
            if time.monotonic() >= until:
                raise RendezvousTimeoutError(self._late(what, patience))
            time.sleep(self._pause() * random.uniform(0.5, 1.5))
            with self._lock:
                self._blob.read()

    def _late(self, what: str, patience: float) -> str:
        state = self._blob.state
        seen = f"{len(state.coming)} of at least {self._settings.min_nodes} nodes have come"
        if inside := state.inside():
            seen += f", and {len(inside)} are in round {state.round} still"
        return (
            f"the rendezvous {self.get_run_id()!r} was not {what} in {patience:g} s: {seen}; start more, or wait longer"
        )

    def _pause(self) -> float:
        """Between two reads: all nodes together read so often, however many there are."""
        state = self._blob.state
        return min(LONGEST_PAUSE, self._beat / 4, (1 + len(state.seats) + len(state.coming)) / READS)

    # beats ------------------------------------------------------------------------------------------------------------

    def _start_beating(self) -> None:
        self._pulse = _Pulse(self, self._beat / 4)

    def _stop_beating(self) -> None:
        if self._pulse is not None:
            self._pulse.stop()
            self._pulse = None

    def beat(self) -> None:
        """One look, and a beat when it is time; called by the pulse, which goes on whatever the backend raises."""
        until = time.monotonic() + self._settings.timeout.heartbeat.total_seconds()
        try:
            with self._lock:
                said = self._member.beat(self._blob.read(), time.monotonic())
                while isinstance(said, Write) and time.monotonic() < until:
                    said = self._member.beat(self._blob.write(said.state), time.monotonic())
        except Exception as error:
            if not self._faint:
                what = f"{type(error).__name__}: {error}"
                log.warning("rendezvous=%s node=%s did not beat: %s", self.get_run_id(), self._member.node, what)
            self._faint = True
        else:
            self._faint = False

    # the workers' store -----------------------------------------------------------------------------------------------

    def _listen(self) -> socket.socket:
        """On the address that was given; on all where none was, since the others may know this node by another."""
        try:
            if self._given:
                family = socket.getaddrinfo(self._host, 0, type=socket.SOCK_STREAM)[0][0]
                return socket.create_server((self._host, 0), family=family)
            dual = socket.has_dualstack_ipv6()
            return socket.create_server(
                ("", 0), family=socket.AF_INET6 if dual else socket.AF_INET, dualstack_ipv6=dual
            )
        except OSError as error:
            raise RendezvousConnectionError(
                f"the workers' store must listen on an address of this node, and {self._host!r} is none: "
                f"{error.strerror}; give another as local_addr"
            ) from error

    def _serve(self, listening: socket.socket) -> Any:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        port = listening.getsockname()[1]
        here = self._host if self._given else "localhost"
        return TCPStore(here, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())


class _Pulse:
    """Has a handler beat in a thread, for as long as anybody holds the handler."""

    def __init__(self, handler: DynamicRendezvousHandler, interval: float) -> None:
        self._handler = weakref.ref(handler)
        self._interval = interval
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._main, name="ripstop-rendezvous-beat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join()

    def _main(self) -> None:
        while not self._over.wait(self._interval):
            if (handler := self._handler()) is None:
                return
            handler.beat()
            del handler  # nobody is kept alive by this


def create_handler(store: Any, backend: RendezvousBackend, params: RendezvousParameters) -> DynamicRendezvousHandler:
    """From the settings `join_timeout` (600), `last_call_timeout` (30), `close_timeout` (30), `heartbeat_timeout` (5),
    `keep_alive_interval` (5) and `keep_alive_max_attempt` (3), in seconds and beats."""

    def seconds(name: str) -> timedelta | None:
        value = params.get_as_int(f"{name}_timeout")
        return None if value is None else timedelta(seconds=value)

    def number(name: str, default: int) -> int:
        value = params.get_as_int(name, default)
        if value is None:
            raise TypeError(f"{name}=None: give a number, or leave it out for {default}")
        return value

    return DynamicRendezvousHandler.from_backend(
        params.run_id,
        store,
        backend,
        params.min_nodes,
        params.max_nodes,
        params.local_addr,
        RendezvousTimeout(seconds("join"), seconds("last_call"), seconds("close"), seconds("heartbeat")),
        keep_alive_interval=number("keep_alive_interval", 5),
        keep_alive_max_attempt=number("keep_alive_max_attempt", 3),
    )
