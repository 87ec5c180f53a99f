"""The agent's side of the memory for training state (`ripstop.train.State`): it keeps workers' buffers when they die.

A worker makes a memfd, maps it, and hands its descriptor to the agent over a Unix socket beside that of
`report_socket.py`.  The workers of the next round ask for the descriptors: those of their own rank, and of others whose
shards this node holds.  Rules
1.  The agent never maps or reads a buffer: `commit_memory.py` says what is in it, and who may restore it.
2.  The kernel names the peer's pid.  Only workers of the current round are served; each writes its own rank only.
3.  A buffer is a memfd whose size is sealed, so that no process can shrink it under another's mapping.
4.  The numbers of buffers, connections and bytes in a request are bounded.
5.  A connection is of the round in which its worker asked for its identity: what a worker that goes on in place
    (`elastic_workers.py`) still sends in its old round changes nothing.
6.  Buffers of ranks that now run elsewhere stay until the workers here say that a newer commit is complete.
7.  If there is no socket, the job runs without this memory, and workers say so.
"""

import array
import asyncio
import fcntl
import json
import logging
import os
import socket
import stat
import struct
import threading
from collections.abc import Callable, Container, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ripstop.commit_memory import FIRST_COPY_SLOT, CommitId
from ripstop.protocol.messages import FinalCommit
from ripstop.system.safe_files import file_identity
from ripstop.workers.elastic_workers import ElasticWorkers
from ripstop.workers.saver_process import SaverProcesses

log = logging.getLogger("ripstop.workers")

PATH_SUFFIX = "-state"  # of the path of the socket for reports; `train/agent_memory.py` has it too
MAX_REQUEST_BYTES = 4096
MAX_NAMES = 16  # of States, for each rank
MAX_NAME_CHARS = 64
MAX_NUMBER = 1 << 48  # of a commit, or of its round; the coordinator has the same limits
MAX_SLOTS = 16  # buffers of one State
MAX_DESCRIPTORS = 128  # in a reply; the kernel passes at most 253 at once
MAX_RANKS = 512  # whose buffers of one State a node can hold
ACCEPT_RETRY_S = 1.0
MAX_CONNECTIONS = 1024
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """A worker of the current round, and all ranks of its node."""

    round: int
    rank: int
    world_size: int
    local_ranks: range
    key: str = field(default="", repr=False)  # of the round's workers; "": they have none


@dataclass(frozen=True, slots=True)
class MadeCommit:
    """One rank's final commit of a State in a round, its buffer, and whether all ranks have it equal."""

    id: CommitId
    slot: int
    is_replicated: bool


class StateMemory:
    """The buffers, by rank, name and slot, until the agent ends; `identify` finds the worker with this pid."""

    def __init__(
        self,
        reports_path: str,
        identify: Callable[[int], WorkerIdentity | None],
        saver: SaverProcesses | None = None,
        elastic: ElasticWorkers | None = None,
    ) -> None:
        self._path = Path(reports_path + PATH_SUFFIX) if reports_path else None
        self._identify = identify
        self._saver = saver  # None: no commit is saved to disk
        self._elastic = elastic  # None: no worker goes on in place
        self._loop = asyncio.get_running_loop()
        self._rounds: dict[socket.socket, int] = {}  # rule 5
        self._socket: socket.socket | None = None
        self._socket_identity: tuple[int, int] | None = None
        self._connections: set[socket.socket] = set()
        self._buffers: dict[tuple[int, str], dict[int, int]] = {}  # (rank, name) → slot → descriptor
        self._from_workers: set[tuple[int, str]] = set()  # those that workers of this node have made
        self._copies: dict[tuple[int, str, int], CommitId] = {}  # by rank, name and slot: those from another node
        self._held: dict[str, list[CommitId]] = {}  # by name: commits that workers must not overwrite
        self._listeners: dict[socket.socket, str] = {}  # connections that learn of changes in `held`, and the name
        self._drops: dict[str, tuple[int, range]] = {}  # by name: a round with a complete set lets others be freed
        self._ending: set[socket.socket] = set()  # listeners whose workers make the final commit of their round
        self._last: dict[str, dict[int, MadeCommit]] = {}  # by name and rank: the final commits of the round
        self._waiting: set[int] = set()  # ranks that have made theirs
        self.on_first_commit: Callable[[int], None] | None = None  # of a worker in this round
        # all workers of this round have made their final commits; or why these are of no use
        self.on_final_commits: Callable[[int, tuple[FinalCommit, ...], str], None] | None = None
        self.on_state_lost: Callable[[int, str], None] | None = None  # a worker cannot go on in place, and why
        self.on_kept: Callable[[int, str, int, int], None] | None = None  # a worker's rank, name, slot, descriptor

    def listen(self) -> None:
        """Open the socket; called before every round, because a logout may remove its file."""
        self._last, self._waiting = {}, set()
        if self._path is None or (self._socket is not None and file_identity(self._path) == self._socket_identity):
            return
        self._stop_listening()
        opened = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            opened.bind(str(self._path))
            opened.listen(128)
        except OSError as error:
            opened.close()
            log.warning("train.State cannot use this node's memory: %s: %s", self._path, error)
            self._path = None
            return
        self._socket, self._socket_identity = opened, file_identity(self._path)
        self._loop.add_reader(opened, self._accept)

    def _accept(self) -> None:
        assert self._socket is not None
        try:
            connection, _ = self._socket.accept()
        except (BlockingIOError, ConnectionError):
            return
        except OSError as error:  # no descriptor is left
            log.warning("workers cannot reach the memory for their state; retrying: %s", error.strerror)
            self._loop.remove_reader(self._socket)
            self._loop.call_later(ACCEPT_RETRY_S, self._accept_again, self._socket)
            return
        if len(self._connections) >= MAX_CONNECTIONS:
            connection.close()
            return
        connection.setblocking(False)
        self._connections.add(connection)
        self._loop.add_reader(connection, self._serve, connection, _state_memory_peer_pid(connection))

    def _accept_again(self, listening: socket.socket) -> None:
        if self._socket is listening:  # not closed meanwhile
            self._loop.add_reader(listening, self._accept)

    def _serve(self, connection: socket.socket, pid: int) -> None:
        try:
            data, fds = _receive_state_memory_request(connection)
        except BlockingIOError:
            return
        except OSError:
            data, fds = b"", []
        if not data:
            self._close(connection)
            return
        try:
            reply, given = self._answer(connection, data, fds, pid)
        finally:
            for fd in fds:  # those that are kept are duplicates
                os.close(fd)
        if reply is None:
            return
        try:
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", given))] if given else []
            connection.sendmsg([json.dumps(reply).encode()], ancillary)
        except OSError:  # it has ended, or does not read its replies
            self._close(connection)

    def _answer(
        self, connection: socket.socket, data: bytes, fds: list[int], pid: int
    ) -> tuple[dict[str, Any] | None, list[int]]:
        """The reply, and the descriptors to send with it."""
        worker = self._identify(pid)
        if worker is None:
            return {"retry": "the sender is no worker of the current round"}, []
        try:
            request: Any = json.loads(data)
        except (ValueError, RecursionError):
            request = None
        if self._rounds.get(connection, worker.round) != worker.round:
            return {"stale": f"round {self._rounds[connection]} is over"}, []
        match request:
            case {"elastic": None} if self._elastic is not None:
                self._elastic.register(pid, connection)
                return {"round": worker.round}, []
            case {"reformed": int(round)} if self._elastic is not None:
                self._elastic.on_reformed(pid, round)
                return None, []
            case {"peer_lost": int(round)} if self._elastic is not None and round == worker.round:
                self._elastic.lost_peer(round)
                return None, []
            case {"peer_lost": int()}:  # of an earlier round
                return None, []
            case {"get": str(name), "of": int(rank)}:
                found = self._buffers.get((rank, name), {})
                return {"slots": list(found)}, list(found.values())
            case {"get": str(name)}:
                return self._all_buffers(name)
            case {"identity": None}:
                self._rounds[connection] = worker.round
                return self._identity(worker), []
            case {"saving": str(name)}:
                return {"slots": self._saver.slots_in_use(worker.rank, name) if self._saver else []}, []
            case {"save": str(name), "slot": int(slot), "commit": [int(round), int(number)]}:
                return {"accepted": self._save(worker, name, slot, (round, number), fds)}, []
            case {"drop": str(name)} if self._held.get(name):
                self._drops[name] = worker.round, worker.local_ranks  # later: they may be part of a complete set
                return {}, []
            case {"drop": str(name)}:
                self._drop(name, worker.local_ranks)
                return {}, []
            case {
                "last": str(name),
                "commit": [int(round), int(number)],
                "slot": int(slot),
                "replicated": bool(same),
            } if self._is_valid_last(name, round, number):
                self._last.setdefault(name, {})[worker.rank] = MadeCommit(CommitId(round, number), slot, same)
                return {}, []
            case {"waits": None}:
                self._on_waiting(worker)
                return {}, []
            case {"state_lost": str(name)}:
                self._listeners[connection] = name
                self._ending.add(connection)
                if self.on_state_lost is not None:
                    self.on_state_lost(worker.round, f"rank {worker.rank} has no commit of state {name!r} to restore")
                return {}, []
            case {"held": str(name)}:
                self._listeners[connection] = name
                if self.on_first_commit is not None:
                    self.on_first_commit(worker.round)
                return self._held_message(connection), []
            case {"keep": str(name), "slot": int(slot)} if 0 <= slot < MAX_SLOTS and len(name) <= MAX_NAME_CHARS:
                why = self._keep(worker.rank, name, slot, fds)
                return {"error": why} if why else {}, []
        return {"error": "the request is invalid"}, []

    def _identity(self, worker: WorkerIdentity) -> dict[str, Any]:
        found = {"round": worker.round, "rank": worker.rank, "world_size": worker.world_size, "key": worker.key}
        if self._saver is None:
            return found
        config = self._saver.config
        return {**found, "checkpoint_dir": str(config.directory), "checkpoint_interval": config.interval}

    def _save(self, worker: WorkerIdentity, name: str, slot: int, commit: tuple[int, int], fds: list[int]) -> bool:
        """From the buffer in this slot, or from a file, if the worker has no memory for buffers."""
        fd = fds[0] if fds else self._buffers.get((worker.rank, name), {}).get(slot)
        if self._saver is None or fd is None:
            return False
        return self._saver.request(worker.rank, worker.local_ranks, worker.world_size, name, slot, commit, fd)

    def _all_buffers(self, name: str) -> tuple[dict[str, Any], list[int]]:
        """The rank and slot of each buffer of this State, their descriptors, and the ranks that do not fit."""
        places: list[tuple[int, int]] = []
        fds: list[int] = []
        more: list[int] = []
        for rank in self._ranks(name):
            slots = self._buffers[rank, name]
            if len(fds) + len(slots) > MAX_DESCRIPTORS:
                more.append(rank)
            else:
                places += [(rank, slot) for slot in slots]
                fds += slots.values()
        return {"buffers": places, "more": more}, fds

    def _ranks(self, name: str) -> list[int]:
        """The ranks whose buffers of this State are held."""
        return [rank for rank, held in self._buffers if held == name]

    def _drop(self, name: str, local_ranks: range) -> None:
        """Free the buffers of ranks that run elsewhere, and, if no set is kept, the copies of other nodes' commits."""
        has_sets = bool(self._held.get(name))
        for rank in self._ranks(name):
            is_old = rank not in local_ranks and (rank, name) in self._from_workers
            for slot in list(self._buffers[rank, name]):
                is_copy = (rank, name, slot) in self._copies
                if (is_copy and not has_sets) or (is_old and not is_copy):
                    self._free(rank, name, slot)
            if is_old:
                self._from_workers.discard((rank, name))

    def _free(self, rank: int, name: str, slot: int) -> None:
        self._copies.pop((rank, name, slot), None)
        fd = self._buffers[rank, name].pop(slot)
        threading.Thread(target=os.close, args=(fd,), daemon=True).start()  # the kernel frees 5 to 10 GB in a second
        if not self._buffers[rank, name]:
            del self._buffers[rank, name]

    def _keep(self, rank: int, name: str, slot: int, fds: list[int]) -> str:
        """Keep the buffer in place of the slot's old one; why it is rejected, or ""."""
        if len(fds) != 1 or not _is_state_buffer(fds[0]):
            return "a buffer must be one memfd with a sealed size"
        names = [held for held_rank, held in self._buffers if held_rank == rank]
        if name not in names and len(names) >= MAX_NAMES:
            return f"a worker may have {MAX_NAMES} States; this one has {', '.join(names)}"
        if (rank, name) not in self._buffers and len(self._ranks(name)) >= MAX_RANKS:
            return f"a node can hold the buffers of {MAX_RANKS} ranks"
        try:
            kept = os.dup(fds[0])
        except OSError as error:
            return f"the agent cannot keep another descriptor: {error.strerror}; raise its limit (ulimit -n)"
        self._from_workers.add((rank, name))
        self._put(rank, name, slot, kept)
        if self.on_kept is not None:
            self.on_kept(rank, name, slot, kept)
        return ""

    def _put(self, rank: int, name: str, slot: int, fd: int) -> None:
        slots = self._buffers.setdefault((rank, name), {})
        if slot in slots:
            os.close(slots[slot])
        slots[slot] = fd
        self._copies.pop((rank, name, slot), None)

    # copies of another node's buffers, and commits of this node of which another has copies ---------------------------

    def buffers(self, ranks: range) -> list[tuple[int, str, int, int]]:
        """The rank, name, slot and descriptor of these ranks' buffers."""
        return [
            (rank, name, slot, fd)
            for (rank, name), slots in self._buffers.items()
            if rank in ranks
            for slot, fd in slots.items()
        ]

    def keep_copy(self, rank: int, name: str, id: CommitId, fd: int) -> bool:
        """Keep another node's commit, which the caller gives away; False if there is no room for it."""
        slots = self._buffers.get((rank, name), {})
        same = [slot for slot in slots if self._copies.get((rank, name, slot)) == id]
        free = [slot for slot in range(FIRST_COPY_SLOT, MAX_SLOTS) if slot not in slots]
        if not (same or free) or (not slots and len(self._ranks(name)) >= MAX_RANKS):
            os.close(fd)
            return False
        slot = (same or free)[0]
        self._put(rank, name, slot, fd)
        self._copies[rank, name, slot] = id
        return True

    def hold(self, name: str, ids: Iterable[CommitId], complete: CommitId | None) -> None:
        """Workers must not overwrite these commits.  If one is `complete` on all nodes, older copies are freed."""
        if name not in self._held and len(self._held) >= MAX_NAMES:
            self._held = {state: held for state, held in self._held.items() if self._ranks(state)}
            if len(self._held) >= MAX_NAMES:
                return
        self._held[name] = list(ids)
        self._tell([connection for connection, state in self._listeners.items() if state == name])
        newest = max(self._held[name])
        held = set(self._held[name])
        for key in [key for key, id in self._copies.items() if key[1] == name and id < newest and id not in held]:
            self._free(*key)
        if complete is None:
            return
        if name in self._drops and complete.round >= self._drops[name][0]:
            self._drop(name, self._drops.pop(name)[1])

    def _tell(self, listeners: Iterable[socket.socket]) -> None:
        for connection in listeners:
            try:
                connection.send(json.dumps(self._held_message(connection)).encode())
            except OSError:
                self._close(connection)

    # the final commit of a round --------------------------------------------------------------------------------------

    def end_after_commit(self, round: int, workers: int) -> str:
        """Let the workers make one more commit, after the same step, and wait; why this is not possible, or ""."""
        listeners = [connection for connection in self._listeners if self._rounds.get(connection) == round]  # rule 5
        found = len({_state_memory_peer_pid(connection) for connection in listeners})  # a worker has one or more States
        if found < workers:
            return f"only {found} of {workers} workers of a node have a train.State with a commit"
        self._ending = set(listeners)
        self._tell(listeners)
        return ""

    def release(self, kept: Container[int] = ()) -> None:
        """The workers are being stopped: those that wait may handle their signal.

        Workers with the pids `kept` go on in place.  They wait until they learn of their next round.
        """
        find = self._elastic.find_worker if self._elastic is not None else int
        released = {connection for connection in self._ending if find(_state_memory_peer_pid(connection)) not in kept}
        self._ending -= released
        self._tell(released)

    def _is_valid_last(self, name: str, round: int, number: int) -> bool:
        is_known = name in self._last or len(self._last) < MAX_NAMES
        return is_known and len(name) <= MAX_NAME_CHARS and 0 <= round <= MAX_NUMBER and 0 <= number <= MAX_NUMBER

    def _on_waiting(self, worker: WorkerIdentity) -> None:
        if worker.rank in self._waiting:
            return
        self._waiting.add(worker.rank)
        if len(self._waiting) < len(worker.local_ranks):
            return
        commits, why_not = [], ""
        for name, made in self._last.items():
            ids = {commit.id for commit in made.values()}
            if len(ids) > 1:
                why_not = f"the ranks of a node have different commits of state {name!r}"
                continue
            (id,) = ids
            self._save_last(worker, name, id, made)
            needs_copies = not all(commit.is_replicated for commit in made.values())
            commits.append(FinalCommit(name, id.number, needs_copies))
        if self.on_final_commits is not None:
            self.on_final_commits(worker.round, tuple(commits), why_not)

    def _save_last(self, worker: WorkerIdentity, name: str, id: CommitId, made: Mapping[int, MadeCommit]) -> None:
        """Save the final commit to disk: perhaps no node goes on."""
        slots = {rank: (commit.slot, self._buffers.get((rank, name), {})) for rank, commit in made.items()}
        buffers = {rank: (slot, fds[slot]) for rank, (slot, fds) in slots.items() if slot in fds}
        if self._saver is not None and buffers.keys() == set(worker.local_ranks):
            self._saver.save_last(name, (id.round, id.number), worker.world_size, buffers)

    def forget_sets(self) -> None:
        """No other node takes copies any more: commits need not be kept for a set."""
        self._held.clear()
        self._drops.clear()  # workers ask again in every round

    def held(self, name: str) -> list[CommitId]:
        return self._held.get(name, [])

    def _held_message(self, connection: socket.socket) -> dict[str, Any]:
        held = self._held.get(self._listeners[connection], [])
        return {"held": [[id.round, id.number] for id in held], "ending": connection in self._ending}

    def _close(self, connection: socket.socket) -> None:
        self._loop.remove_reader(connection)
        self._connections.discard(connection)
        self._listeners.pop(connection, None)
        self._rounds.pop(connection, None)
        self._ending.discard(connection)
        if self._elastic is not None:
            self._elastic.closed(connection)
        connection.close()

    def _stop_listening(self) -> None:
        if self._socket is not None:
            self._loop.remove_reader(self._socket)
            self._socket.close()
            self._socket = None

    def close(self) -> None:
        """Close and remove the socket, and free all buffers."""
        if self._path is not None and self._socket is not None and file_identity(self._path) == self._socket_identity:
            with suppress(OSError):
                self._path.unlink()
        self._stop_listening()
        for connection in list(self._connections):
            self._close(connection)
        for slots in self._buffers.values():
            for fd in slots.values():
                os.close(fd)
        self._buffers.clear()


def _state_memory_peer_pid(connection: socket.socket) -> int:
    pid: int
    pid, _, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid


def _receive_state_memory_request(connection: socket.socket) -> tuple[bytes, list[int]]:
    data, ancillary, _, _ = connection.recvmsg(
        MAX_REQUEST_BYTES + 1, socket.CMSG_SPACE(MAX_SLOTS * 4), socket.MSG_CMSG_CLOEXEC
    )
    fds = array.array("i")
    for level, kind, value in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(value[: len(value) - len(value) % fds.itemsize])
    return data, list(fds)


def _is_state_buffer(fd: int) -> bool:
    try:
        return stat.S_ISREG(os.fstat(fd).st_mode) and fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS == _SEALS
    except OSError:  # not a memfd
        return False
