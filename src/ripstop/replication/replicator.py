"""The replicator: copies this node's commits to its partner's memory, and takes the commits of another node.

It is a process of its own, without torch, so that gigabytes never delay the agent.  Run as
`python -P -m ripstop.replication.replicator FD`; FD is a socket to the agent.  It ends when the agent closes that.

| from the agent | meaning |
| --- | --- |
| `setup`, with a bound socket | the job's secret and TLS files, this node, the limit of the bandwidth |
| `round` | its number, this node's ranks, the partner, and the time between two sets |
| `buffer`, with a descriptor | the memory of a rank, State and slot |
| `replicate` | copy this commit of a State to the partner |
| `kept` | whether the agent keeps the last copy |

| to the agent | meaning |
| --- | --- |
| `report` | the fields of `protocol.messages.Replicated` |
| `copy`, with a descriptor | a complete commit of another node |
| `warning` | a line for the log |

Rules
1.  A copy counts if the commit's header was whole before and after it was read, and if the receiver found the same
    checksum.  The agent gets a copy only then.
2.  A copy is never changed: the next one gets new memory.
3.  A peer can make this process use no more memory than the node has free, and at most `MAX_CONNECTIONS` threads.
4.  A problem is logged once in a round.  The copy is tried again, with growing pauses.
"""

import array
import json
import mmap
import os
import queue
import socket
import ssl
import sys
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

from msgspec import Struct

from ripstop.commit_memory import (
    HEAD_BYTES,
    IS_REPLICATED,
    CommitHeader,
    CommitId,
    NotEnoughMemory,
    create_memory,
    unpack_commit_header,
)
from ripstop.model.config import Tls
from ripstop.replication import MAX_CONTROL_BYTES
from ripstop.replication.peer_connection import IDLE_TIMEOUT_S, PeerConnection, PeerError, accept_peer, connect_to_peer
from ripstop.system.network import describe_network_error

MAX_CONNECTIONS = 8
MAX_COPY_BYTES = 1 << 44
MAX_NAME_CHARS = 64
CHUNK_BYTES = 1 << 20
POLL_S, SLOW_POLL_S = 0.02, 0.25  # how often headers are read, while a set is awaited and otherwise
COMMITS_BEFORE_REPORT, SECONDS_BEFORE_REPORT = 3, 5.0  # by then the ranks may have found that all have the same state
FIRST_RETRY_S, LAST_RETRY_S = 0.2, 30.0
RETRIES_BEFORE_WARNING = 4  # the partner's replicator may start later


class ReplicatorSetup(Struct, frozen=True):
    run_id: str
    node: str
    token: str
    bandwidth: int  # bytes per second; 0: no limit
    cert: str = ""
    key: str = ""
    ca: str = ""
    has_tls: bool = False

    def tls(self) -> Tls | None:
        cert, key, ca = (Path(name) if name else None for name in (self.cert, self.key, self.ca))
        return Tls(cert, key, ca) if self.has_tls else None

    @property
    def run(self) -> int:
        return crc32(self.run_id.encode())


class Round(Struct, frozen=True):
    number: int = 0
    first_rank: int = 0
    ranks: int = 0
    world_size: int = 0
    interval: float = 0.0  # between two sets
    partner: tuple[str, int] | None = None


class ReplicatorSocket:
    """The socket to the agent."""

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)
        self._sending = threading.Lock()

    def send(self, message: dict[str, Any], *fds: int) -> None:
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            with self._sending:
                self._socket.sendmsg([json.dumps(message).encode()], ancillary)
        except ConnectionError:
            os._exit(0)  # the agent has gone

    def receive(self) -> tuple[dict[str, Any], list[int]]:
        """The next message; ({}, []) at the end."""
        data, ancillary, _, _ = self._socket.recvmsg(MAX_CONTROL_BYTES, socket.CMSG_SPACE(16), socket.MSG_CMSG_CLOEXEC)
        fds = array.array("i")
        for _, _, value in ancillary:
            fds.frombytes(value)
        return (json.loads(data) if data else {}), list(fds)


class Progress(Struct):
    """The sets of one State in this round."""

    first: int = 0  # the first commit that was seen, and when
    first_at: float = 0.0
    is_reported: bool = False
    target: int = 0
    settled: int = 0  # the last target that was copied or missed
    copied: int = 0
    report_at: float | None = None
    missed: int = 0
    size: int = 0  # bytes of the last copied set


class ReplicatorSender(threading.Thread):
    """Copies this node's commits to its partner."""

    def __init__(self, setup: ReplicatorSetup, agent: ReplicatorSocket) -> None:
        super().__init__(daemon=True)
        self._setup = setup
        self._agent = agent
        self._changed = threading.Condition()
        self._round = Round()
        self._buffers: dict[tuple[int, str], dict[int, mmap.mmap]] = {}  # (rank, name) → slot
        self._sets: dict[str, Progress] = {}
        self._peer: PeerConnection | None = None
        self._connected_in = self._round
        self._warned: set[str] = set()
        self._failures = 0
        self._retry_at = 0.0
        self._reported_at = 0.0

    # called by the main thread ----------------------------------------------------------------------------------------

    def start_round(self, round: Round) -> None:
        with self._changed:
            self._round, self._buffers, self._sets = round, {}, {}
            self._warned, self._failures, self._retry_at = set(), 0, 0.0
            if self._peer is not None:
                self._peer.interrupt()
            self._changed.notify()

    def add_buffer(self, rank: int, name: str, slot: int, fd: int) -> None:
        with self._changed:
            self._buffers.setdefault((rank, name), {})[slot] = mmap.mmap(fd, os.fstat(fd).st_size, prot=mmap.PROT_READ)
            self._sets.setdefault(name, Progress())
            self._changed.notify()
        os.close(fd)

    def request(self, state: str, round: int, number: int) -> None:
        with self._changed:
            if round == self._round.number:
                self._sets.setdefault(state, Progress()).target = number
                self._changed.notify()

    # in this thread ---------------------------------------------------------------------------------------------------

    def run(self) -> None:
        while True:
            with self._changed:
                is_awaiting = any(each.target != each.settled for each in self._sets.values())
                self._changed.wait(None if self._round.partner is None else POLL_S if is_awaiting else SLOW_POLL_S)
                round, sets = self._round, dict(self._sets)
            if round.partner is None:
                continue
            for name, progress in sets.items():
                self._advance(round, name, progress)

    def _headers(self, round: Round, name: str) -> list[dict[int, tuple[mmap.mmap, CommitHeader]]] | None:
        """For each rank of this node, its complete commits of this round by number; None if a rank has none."""
        found: list[dict[int, tuple[mmap.mmap, CommitHeader]]] = []
        for rank in range(round.first_rank, round.first_rank + round.ranks):
            with self._changed:
                buffers = list(self._buffers.get((rank, name), {}).values())
            headers = ((buffer, _replicator_commit_header(buffer, self._setup.run)) for buffer in buffers)
            of_round = [
                (buffer, header)
                for buffer, header in headers
                if header is not None and header.id.in_job().round == round.number and header.rank == rank
            ]
            of_round.sort(key=lambda each: each[1].id)
            own = {header.id.number: (buffer, header) for buffer, header in of_round}
            if not own:
                return None
            found.append(own)
        return found

    def _advance(self, round: Round, name: str, progress: Progress) -> None:
        headers = self._headers(round, name)
        if headers is None or any(own[max(own)][1].flags & IS_REPLICATED for own in headers):
            return  # a replicated state is on every node anyway
        now = time.monotonic()
        newest = max(max(own) for own in headers)
        if not progress.first:
            progress.first, progress.first_at = newest, now
        is_due = newest >= progress.first + COMMITS_BEFORE_REPORT or now >= progress.first_at + SECONDS_BEFORE_REPORT
        if is_due and not progress.is_reported:
            progress.is_reported, progress.report_at = True, now
        target = progress.target
        if target != progress.settled and now >= self._retry_at:
            if all(target in own for own in headers):
                if not self._copy_set(round, name, [own[target] for own in headers]):
                    return
                progress.settled = progress.copied = target
                progress.size = sum(own[target][1].end for own in headers)
                progress.report_at = max(now, self._reported_at + round.interval)
            elif any(max(own) > target and target not in own for own in headers):
                progress.settled = progress.missed = target
                progress.report_at = now
        if progress.report_at is not None and now >= progress.report_at:
            progress.report_at, self._reported_at = None, now
            report = {"round": round.number, "state": name, "newest": newest}
            self._agent.send(
                {"report": {**report, "copied": progress.copied, "missed": progress.missed, "size": progress.size}}
            )

    def _copy_set(self, round: Round, name: str, parts: list[tuple[mmap.mmap, CommitHeader]]) -> bool:
        """Whether the partner has them all."""
        assert round.partner is not None
        try:
            if self._peer is not None and self._connected_in is not round:
                self._peer.close()
                self._peer = None
            if self._peer is None:
                self._connected_in = round
                self._peer = connect_to_peer(
                    *round.partner,
                    tls=self._setup.tls(),
                    token=self._setup.token,
                    run_id=self._setup.run_id,
                    node=self._setup.node,
                    round=round.number,
                )
            for buffer, header in parts:
                self._copy(self._peer, name, buffer, header)
        except (OSError, PeerError) as error:
            if self._peer is not None:
                self._peer.close()
                self._peer = None
            self._failures += 1
            self._retry_at = time.monotonic() + min(FIRST_RETRY_S * 2 ** (self._failures - 1), LAST_RETRY_S)
            if self._failures >= RETRIES_BEFORE_WARNING and "copy" not in self._warned and self._round is round:
                self._warned.add("copy")
                why = error if isinstance(error, PeerError | ssl.SSLError) else describe_network_error(error)
                host, port = round.partner
                text = (
                    f"state {name!r} has no new copy on another node: {host}:{port}: {why}; training goes on, retrying"
                )
                self._agent.send({"warning": text})
            return False
        self._failures = 0
        return True

    def _copy(self, peer: PeerConnection, name: str, buffer: mmap.mmap, header: CommitHeader) -> None:
        id = header.id
        place = {"rank": header.rank, "world_size": header.world_size, "number": id.number}
        peer.send({"put": name, "size": header.end, **place})
        _check_replicator_reply(peer)
        view, checksum, began = memoryview(buffer), 0, time.monotonic()
        for start in range(0, header.end, CHUNK_BYTES):
            chunk = view[start : min(start + CHUNK_BYTES, header.end)]
            checksum = crc32(chunk, checksum)
            peer.socket.sendall(chunk)
            if self._setup.bandwidth:
                ahead = (start + len(chunk)) / self._setup.bandwidth - (time.monotonic() - began)
                if ahead > 0:
                    time.sleep(ahead)
        if _replicator_commit_header(buffer, self._setup.run) != header:  # rule 1
            raise PeerError("the commit was overwritten while it was copied, because this node has too little memory")
        peer.send({"checksum": checksum})
        _check_replicator_reply(peer)


def _check_replicator_reply(peer: PeerConnection) -> None:
    match peer.receive():
        case {"ok": True}:
            return
        case {"error": str(why)}:
            raise PeerError(why)
    raise PeerError("the peer sends no valid reply")


def _replicator_commit_header(buffer: mmap.mmap, run: int) -> CommitHeader | None:
    """The header of a complete commit."""
    header = unpack_commit_header(buffer[:HEAD_BYTES], run) if len(buffer) >= HEAD_BYTES else None
    return header if header is not None and HEAD_BYTES <= header.end <= len(buffer) else None


class ReplicatorReceiver(threading.Thread):
    """Takes the commits of another node."""

    def __init__(self, listening: socket.socket, setup: ReplicatorSetup, agent: ReplicatorSocket) -> None:
        super().__init__(daemon=True)
        self._listening = listening
        self._setup = setup
        self._agent = agent
        self._unauthenticated: dict[socket.socket, None] = {}  # the oldest first; duplicates of their sockets
        self._peers: set[PeerConnection] = set()  # the authenticated ones
        self._receiving = threading.Lock()
        self._kept: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self.round = Round()

    def start_round(self, round: Round) -> None:
        self.round = round
        for peer in list(self._peers):
            peer.interrupt()

    def on_kept(self, is_kept: bool) -> None:
        self._kept.put(is_kept)

    def run(self) -> None:
        self._listening.listen(MAX_CONNECTIONS)
        while True:
            try:
                opened, _ = self._listening.accept()
                duplicate = opened.dup()
            except OSError:
                time.sleep(FIRST_RETRY_S)  # such as no free descriptor
                continue
            self._unauthenticated[duplicate] = None
            for oldest in list(self._unauthenticated)[:-MAX_CONNECTIONS]:  # a node of the job needs milliseconds
                self._forget(oldest)
            threading.Thread(target=self._serve, args=(opened, duplicate), daemon=True).start()

    def _forget(self, duplicate: socket.socket, *, interrupts: bool = True) -> None:
        """The connection is authenticated, or has ended, or must end."""
        if self._unauthenticated.pop(duplicate, duplicate) is None:
            if interrupts:
                with suppress(OSError):
                    duplicate.shutdown(socket.SHUT_RDWR)
            duplicate.close()

    def _serve(self, opened: socket.socket, duplicate: socket.socket) -> None:
        try:
            round, setup = self.round, self._setup
            peer = accept_peer(opened, tls=setup.tls(), token=setup.token, run_id=setup.run_id, round=round.number)
            self._forget(duplicate, interrupts=False)
            try:
                if len(self._peers) < MAX_CONNECTIONS:
                    self._peers.add(peer)
                while peer in self._peers and round is self.round:
                    peer.socket.settimeout(None)  # the next set may come in hours; the kernel finds dead peers
                    message = peer.receive()
                    peer.socket.settimeout(IDLE_TIMEOUT_S)
                    self._receive(peer, message, round)
            finally:
                self._peers.discard(peer)
                peer.close()
        except (OSError, PeerError):
            pass  # the sender logs it if it is one of this job's
        finally:
            opened.close()
            self._forget(duplicate)

    def _receive(self, peer: PeerConnection, message: dict[str, Any], round: Round) -> None:
        match message:
            case {
                "put": str(name),
                "size": int(size),
                "rank": int(rank),
                "world_size": int(world_size),
                "number": int(number),
            }:
                pass
            case _:
                raise PeerError("the request is invalid")
        if not (HEAD_BYTES <= size <= MAX_COPY_BYTES and 0 < len(name) <= MAX_NAME_CHARS):
            raise PeerError("the request is out of range")
        is_own = round.first_rank <= rank < round.first_rank + round.ranks
        if world_size != round.world_size or not 0 <= rank < world_size or is_own or not 0 < number < 1 << 63:
            raise PeerError("the request does not fit the round")
        with self._receiving:
            try:
                fd = create_memory(size)
            except NotEnoughMemory as error:
                peer.send({"error": f"the partner has too little memory: {error}"})
                return
            try:
                peer.send({"ok": True})
                memory = mmap.mmap(fd, os.fstat(fd).st_size)
                checksum = _receive_replica_into(peer, memoryview(memory)[:size])
                announced = peer.receive().get("checksum")
                header = _replicator_commit_header(memory, self._setup.run)
                place = CommitId(round.number, number), rank, world_size, size
                if announced != checksum:
                    why = "the checksum differs"
                elif header is None or (header.id.in_job(), header.rank, header.world_size, header.end) != place:
                    why = "the copy is not the commit that was announced"
                else:
                    copy = {"rank": rank, "state": name, "round": round.number, "number": number}
                    self._agent.send({"copy": copy}, fd)
                    why = "" if self._kept.get() else "the partner keeps no more copies"
            finally:
                os.close(fd)
        peer.send({"error": why} if why else {"ok": True})


def _receive_replica_into(peer: PeerConnection, memory: memoryview) -> int:
    """Receive as many bytes as fit into `memory`; their checksum."""
    checksum, start = 0, 0
    while start < len(memory):
        size = peer.receive_into(memory[start : start + CHUNK_BYTES])
        checksum = crc32(memory[start : start + size], checksum)
        start += size
    return checksum


def _exit_on_replicator_thread_defect(needed: tuple[threading.Thread, ...], args: threading.ExceptHookArgs) -> None:
    """A thread has raised: a new process is better than one without it."""
    if args.thread in needed:
        print(f"ripstop: the replicator has a defect: {args.exc_value!r}", file=sys.stderr)
        os._exit(1)


def run_replicator(fd: int) -> None:
    agent = ReplicatorSocket(fd)
    message, (listening,) = agent.receive()
    setup = ReplicatorSetup(**message["setup"])
    sender = ReplicatorSender(setup, agent)
    receiver = ReplicatorReceiver(socket.socket(fileno=listening), setup, agent)
    threading.excepthook = partial(_exit_on_replicator_thread_defect, (sender, receiver))
    is_started = False
    while True:
        message, fds = agent.receive()
        match message:
            case {"round": values}:
                round = Round(**{**values, "partner": tuple(values["partner"]) if values["partner"] else None})
                receiver.start_round(round)
                sender.start_round(round)
                if not is_started:
                    is_started = True
                    sender.start()
                    receiver.start()
            case {"buffer": [rank, name, slot]}:
                sender.add_buffer(rank, name, slot, *fds)
            case {"replicate": [state, round_number, number]}:
                sender.request(state, round_number, number)
            case {"kept": is_kept}:
                receiver.on_kept(is_kept)
            case _:
                os._exit(0)  # the agent has gone; threads may wait for peers


if __name__ == "__main__":
    run_replicator(int(sys.argv[1]))
