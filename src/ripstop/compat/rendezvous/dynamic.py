"""`torch.distributed.elastic.rendezvous.dynamic_rendezvous`: a handler over any backend with compare-and-set.

`compare_and_set.py` makes all decisions; this module reads, writes and waits, with torch's names.  Differences from
torch: the state is JSON and contains its job and version; clocks of nodes are not compared; survivors keep their ranks;
a round that has enough survivors needs no last call; the workers' store is new for every round, on a socket that was
bound before the round formed; and no two rounds share a key of the agents' store, not even with an earlier job of the
same name.
"""

from __future__ import annotations

import binascii
import logging
import os
import random
import socket
import threading
import time
import uuid
import weakref
from abc import ABC, abstractmethod
from base64 import b64decode
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from ripstop.compat.rendezvous.compare_and_set import (
    CompareAndSetParticipant,
    CompareAndSetState,
    Formed,
    ParticipantSettings,
    RendezvousClosed,
    Step,
    StoreAddress,
    Wait,
    Write,
    decode_compare_and_set_state,
    encode_compare_and_set_state,
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
    is_rendezvous_handler_error,
)
from ripstop.model.errors import ProtocolError

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
"""Identifies one version of the stored state; its type is the backend's."""

MAX_READS_PER_S = 50.0  # by all waiting nodes together
MAX_PAUSE_S = 1.0  # between two reads of one node


class RendezvousBackend(ABC):
    """Stores the shared state: one value with compare-and-set."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The backend's name, as in `--rdzv-backend`."""

    @abstractmethod
    def get_state(self) -> tuple[bytes, Token] | None:
        """The state and its token; None if there is none.  Raises `RendezvousConnectionError`."""

    @abstractmethod
    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        """Replace the state that has this token; with None, write the first state.

        Returns the state that is stored afterwards, its token, and whether it is this one.  Raises
        `RendezvousConnectionError`; the state may have been written even then.
        """


def decode_dynamic_rendezvous_state(value: bytes, where: str) -> bytes:
    """A stored state; backends store base64, as torch does, to detect other values."""
    try:
        return b64decode(value, validate=True)
    except binascii.Error:
        raise RendezvousStateError(
            f"{where} is not the state of a rendezvous: found {value[:80]!r}; it is left as it is: use another run id"
        ) from None


class RendezvousTimeout:
    """Timeouts: for `min_nodes` to join; for more nodes after that; for closing; for one heartbeat."""

    def __init__(
        self,
        join: timedelta | None = None,
        last_call: timedelta | None = None,
        close: timedelta | None = None,
        heartbeat: timedelta | None = None,
    ) -> None:
        for name, value in {"join": join, "last_call": last_call, "close": close, "heartbeat": heartbeat}.items():
            if value is not None and value <= timedelta(0):
                raise ValueError(f"{name}={value}: a time is above 0; give more")
        self.join = join or timedelta(seconds=600)
        self.last_call = last_call or timedelta(seconds=30)
        self.close = close or timedelta(seconds=30)
        self.heartbeat = heartbeat or timedelta(seconds=5)


@dataclass(repr=False, eq=False, frozen=True)
class RendezvousSettings:
    """A handler's settings.  A node without a heartbeat for `keep_alive_max_attempt` intervals is lost."""

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


class DynamicRendezvousStateHolder:
    """The shared state as it was last read or written."""

    def __init__(self, backend: RendezvousBackend, run_id: str) -> None:
        self._backend = backend
        self._run_id = run_id
        self._token: Token | None = None
        self._read = 0.0
        self.state = CompareAndSetState(run_id)

    def read(self, age: float = 0.0) -> CompareAndSetState:
        """The state; it may have been read up to `age` seconds ago."""
        if not age or time.monotonic() - self._read >= age:
            found = self._backend.get_state()
            self._accept(*(found or (None, None)))
        return self.state

    def write(self, state: CompareAndSetState) -> CompareAndSetState:
        """Try to write; returns the state that is stored now, whichever node wrote it."""
        try:
            found = self._backend.set_state(encode_compare_and_set_state(state), self._token)
        except Exception as error:
            if not is_rendezvous_handler_error(error, RendezvousConnectionError):
                raise
            return self.read()  # the write may have succeeded; if this fails too, its error is raised
        self._accept(*(found[:2] if found else (None, None)))
        return self.state

    def _accept(self, value: bytes | None, token: Token | None) -> None:
        try:
            self.state = (
                CompareAndSetState(self._run_id) if value is None else decode_compare_and_set_state(value, self._run_id)
            )
        except ProtocolError as error:
            raise RendezvousStateError(
                f"the state of the rendezvous {self._run_id!r} cannot be used: {error}; it is left as it is: "
                "use another run id, or remove it"
            ) from None
        self._token, self._read = token, time.monotonic()


class DynamicRendezvousHandler(RendezvousHandler):
    """Forms rounds of `min_nodes` to `max_nodes` nodes whose handlers use the same shared state."""

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
        """A new node; the stores of its rounds are prefixes of `store`."""
        timeout, interval = timeout or RendezvousTimeout(), timedelta(seconds=keep_alive_interval)
        settings = RendezvousSettings(run_id, min_nodes, max_nodes, timeout, interval, keep_alive_max_attempt)
        return cls(local_addr, settings, backend.name, store, DynamicRendezvousStateHolder(backend, run_id))

    def __init__(
        self,
        node: str | None,
        settings: RendezvousSettings,
        backend_name: str,
        store: Any,
        state_holder: DynamicRendezvousStateHolder,
    ) -> None:
        """`node`: the address of this node for other nodes, if the user gave one."""
        interval, attempts = settings.keep_alive_interval.total_seconds(), settings.keep_alive_max_attempt
        self._host, self._given = node or socket.getfqdn(), bool(node)
        self.settings = settings
        self.backend_name = backend_name
        self._store = store
        self._holder = state_holder
        self._heartbeat_interval = min(interval, interval * attempts / 3)  # one late heartbeat does not remove a node
        last_call = settings.timeout.last_call.total_seconds()
        times = (last_call, self._heartbeat_interval, interval * attempts)
        self._participant = CompareAndSetParticipant(
            f"{self._host}_{os.getpid()}_{uuid.uuid4().hex[:8]}",
            ParticipantSettings(settings.min_nodes, settings.max_nodes, *times),
        )
        self._lock = threading.Lock()  # around every step: heartbeats run in another thread
        self._heartbeats: tuple[threading.Thread, threading.Event] | None = None  # and its end
        self._heartbeat_failing = False  # the last heartbeat failed, and that was logged
        self._server: Any = None  # the workers' store of this round, on rank 0's node

    def get_backend(self) -> str:
        return self.backend_name

    def get_run_id(self) -> str:
        return self.settings.run_id

    @property
    def use_agent_store(self) -> bool:
        return os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "0") != "1"

    def next_rendezvous(self) -> RendezvousInfo:
        self._stop_heartbeats()
        self._server = None  # its workers have exited
        listening = self._listen()
        try:
            formed = self._join(StoreAddress(self._host, listening.getsockname()[1]))
            self._start_heartbeats()
            if formed.rank == 0 and self.use_agent_store:
                self._server = self._serve(listening)
        finally:
            listening.close()
        log.info(
            "rendezvous=%s round=%d node=%s rank=%d nodes=%d",
            self.get_run_id(), formed.round, self._participant.node, formed.rank, formed.size,
        )  # fmt: skip
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        # The host's name is unique; an earlier job of the same name may have had this round number.
        store = PrefixStore(f"torch.rendezvous.{self.get_run_id()}.{formed.round}.{formed.host}", self._store)
        where = RendezvousStoreInfo(formed.store.host, formed.store.port)
        return RendezvousInfo(store, formed.rank, formed.size, where)

    def is_closed(self) -> bool:
        with self._lock:
            return self._holder.read().closed

    def set_closed(self) -> None:
        self._run(lambda state, _: self._participant.close(state), self._closing(), "closed")

    def num_nodes_waiting(self) -> int:
        with self._lock:
            return self._participant.waiting(self._holder.read(self._pause()))

    def shutdown(self) -> bool:
        """Close the rendezvous for all nodes, as torch does."""
        self._stop_heartbeats()
        self._server = None
        try:
            self.set_closed()
        except Exception as error:
            if not is_rendezvous_handler_error(error, RendezvousError):
                raise
            log.warning("rendezvous=%s could not be closed: %s", self.get_run_id(), error)
            return False
        return True

    # steps ------------------------------------------------------------------------------------------------------------

    def _join(self, store: StoreAddress) -> Formed:
        timeout = self.settings.timeout.join.total_seconds()
        try:
            end = self._run(lambda state, now: self._participant.join(state, store, now), timeout, "formed")
        except RendezvousTimeoutError:
            self._run(lambda state, _: self._participant.leave(state), self._closing(), "left")
            raise
        match end:
            case Formed():
                return end
            case RendezvousClosed(spare=True):
                raise RendezvousGracefulExitError(f"the rendezvous {self.get_run_id()!r} was closed; this was a spare")
            case _:
                raise RendezvousClosedError(f"the rendezvous {self.get_run_id()!r} is closed: there is no other round")

    def _closing(self) -> float:
        return self.settings.timeout.close.total_seconds()

    def _run(self, step: Callable[[CompareAndSetState, float], Step], timeout: float, what: str) -> Step:
        """Repeat the step with the newest state until it returns neither `Write` nor `Wait`."""
        until = time.monotonic() + timeout
        with self._lock:
            self._holder.read()
        while True:
            with self._lock:
                step_result = step(self._holder.state, time.monotonic())
                if isinstance(step_result, Write):
                    now_there = self._holder.write(step_result.state)
                    if (now_there.writer, now_there.revision) == (step_result.state.writer, step_result.state.revision):
                        continue
            if not isinstance(step_result, Wait | Write):
                return step_result
            if isinstance(step_result, Wait) and step_result.spare:
                until = time.monotonic() + timeout  # the timeout of a spare begins when there is room
            if time.monotonic() >= until:
                raise RendezvousTimeoutError(self._timeout_message(what, timeout))
            time.sleep(self._pause() * random.uniform(0.5, 1.5))
            with self._lock:
                self._holder.read()

    def _timeout_message(self, what: str, timeout: float) -> str:
        state = self._holder.state
        seen = f"{len(state.candidates)} of at least {self.settings.min_nodes} nodes have joined"
        if active := state.active():
            seen += f", and {len(active)} are still in round {state.round}"
        return (
            f"the rendezvous {self.get_run_id()!r} was not {what} in {timeout:g} s: {seen}; start more, or wait longer"
        )

    def _pause(self) -> float:
        """Between two reads, in seconds; it grows with the number of nodes, to limit the reads of all together."""
        state = self._holder.state
        nodes = 1 + len(state.members) + len(state.candidates)
        return min(MAX_PAUSE_S, self._heartbeat_interval / 4, nodes / MAX_READS_PER_S)

    # heartbeats -------------------------------------------------------------------------------------------------------

    def _start_heartbeats(self) -> None:
        ended = threading.Event()
        args = (weakref.ref(self), self._heartbeat_interval / 4, ended)
        thread = threading.Thread(
            target=_send_dynamic_rendezvous_heartbeats, args=args, name="ripstop-rendezvous-heartbeat", daemon=True
        )
        thread.start()
        self._heartbeats = (thread, ended)

    def _stop_heartbeats(self) -> None:
        if self._heartbeats is not None:
            thread, ended = self._heartbeats
            ended.set()
            thread.join()
            self._heartbeats = None

    def heartbeat(self) -> None:
        """Read the state and write a heartbeat when it is due; an exception of the backend is logged."""
        until = time.monotonic() + self.settings.timeout.heartbeat.total_seconds()
        try:
            with self._lock:
                step_result = self._participant.heartbeat(self._holder.read(), time.monotonic())
                while isinstance(step_result, Write) and time.monotonic() < until:
                    step_result = self._participant.heartbeat(self._holder.write(step_result.state), time.monotonic())
        except Exception as error:
            if not self._heartbeat_failing:
                who, what = self._participant.node, f"{type(error).__name__}: {error}"
                log.warning("rendezvous=%s node=%s could not write a heartbeat: %s", self.get_run_id(), who, what)
            self._heartbeat_failing = True
        else:
            self._heartbeat_failing = False

    # the workers' store -----------------------------------------------------------------------------------------------

    def _listen(self) -> socket.socket:
        """Listen on the address that the user gave; without one, on all, because other nodes may use any."""
        try:
            if self._given:
                family = socket.getaddrinfo(self._host, 0, type=socket.SOCK_STREAM)[0][0]
                return socket.create_server((self._host, 0), family=family)
            dual = socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if dual else socket.AF_INET
            return socket.create_server(("", 0), family=family, dualstack_ipv6=dual)
        except OSError as error:
            raise RendezvousConnectionError(
                f"the workers' store must listen on an address of this node, and {self._host!r} is not one: "
                f"{error.strerror}; give another as local_addr"
            ) from error

    def _serve(self, listening: socket.socket) -> Any:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        port = listening.getsockname()[1]
        here = self._host if self._given else "localhost"
        return TCPStore(here, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())


def _send_dynamic_rendezvous_heartbeats(
    handler: weakref.ref[DynamicRendezvousHandler], pause: float, ended: threading.Event
) -> None:
    while not ended.wait(pause) and (alive := handler()) is not None:
        alive.heartbeat()
        del alive  # this thread must not keep the handler alive


def create_handler(store: Any, backend: RendezvousBackend, params: RendezvousParameters) -> DynamicRendezvousHandler:
    """From the settings `join_timeout` (600), `last_call_timeout` (30), `close_timeout` (30), `heartbeat_timeout` (5),
    `keep_alive_interval` (5) and `keep_alive_max_attempt` (3), in seconds and heartbeats."""

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
