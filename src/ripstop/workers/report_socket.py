"""The agent's socket for progress reports of its workers (`ripstop.train`).

Each agent has one datagram socket, in a private directory.  A datagram is a small JSON object.  Rules
1.  The sender is identified by the pid that the kernel attaches, so a worker of an earlier round, or an unrelated
    process, cannot report for a worker.
2.  A worker never waits: unread datagrams fill a short queue, and the sender drops the rest.
3.  A flood uses a limited share of the agent's time.
4.  Invalid datagrams are ignored.
5.  If there is no socket, the job runs without reports.
6.  An agent removes the sockets of killed agents of this machine.
7.  A socket whose file was removed, as at the user's logout, is created again under the same path, the only one that
    the workers have.
"""

import asyncio
import json
import logging
import os
import socket
import struct
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from zlib import crc32

from msgspec import Struct

from ripstop.model.errors import UsageError
from ripstop.model.events import RESTORE_SOURCES
from ripstop.model.usage import MAX_ARRIVALS, StepProfile
from ripstop.system.safe_files import file_identity
from ripstop.system.socket_directory import HeldDirectory

log = logging.getLogger("ripstop.workers")

MAX_DATAGRAM_BYTES = 4096
MAX_SOCKET_PATH_BYTES = 107  # in Linux
MAX_SUFFIX_BYTES = len("-9999999-999")  # of the sockets beside it: "-state", and "-ROUND-RANK" of flight recorders
MAX_BURST = 64  # datagrams read in a row
BURST_PAUSE_S = 0.05
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
MAX_STEP = 2**62
MAX_SECONDS = 1e9


class WorkerHeartbeat(Struct, frozen=True):
    """A worker makes progress.  `count` includes the heartbeats that it did not send."""

    step: int | None
    count: int


class CheckpointReport(Struct, frozen=True):
    """A worker has saved its state up to this step."""

    step: int
    path: str


class CommitReport(Struct, frozen=True):
    """A worker has called `State.commit` at this step: its totals in this round, and size and age of the last commit.

    `stall` is the time that commits took in the training loop.
    """

    step: int
    commits: int
    size: int
    stall: float
    age: float


class RestoreReport(Struct, frozen=True):
    """A worker has restored a commit of this step."""

    source: str
    step: int
    seconds: float


WorkerReport = WorkerHeartbeat | CheckpointReport | CommitReport | RestoreReport | StepProfile


class ReportSocket:
    """The socket, while the agent runs; `on_report` is called in the event loop with the sender's pid."""

    def __init__(self, environ: Mapping[str, str], on_report: Callable[[int, WorkerReport], None]) -> None:
        self._on_report = on_report
        self._loop = asyncio.get_running_loop()
        self._socket: socket.socket | None = None
        self._held: HeldDirectory | None = None
        self.path = ""  # empty: there is no socket
        self._identity: tuple[int, int] | None = None  # of the file at the path
        self._has_warned = False
        self._recorder_sockets: tuple[str, ...] = ()
        why = ""
        for where in (environ, {}):  # TMPDIR may be too long for the paths of sockets
            try:
                self._open_in(where, f"{os.getpid():x}-{_report_socket_machine_id()}-{os.urandom(3).hex()}")
                return
            except (OSError, UsageError) as error:
                why = why or str(error)
        log.warning("workers cannot report progress: %s", why)

    def _open_in(self, where: Mapping[str, str], name: str) -> None:
        held = HeldDirectory(where)
        try:
            if len(os.fsencode(held.path / name)) > MAX_SOCKET_PATH_BYTES - MAX_SUFFIX_BYTES:
                raise OSError(f"{held.path / name} is too long for a socket; set another TMPDIR")
            self._open(held.path / name)
        except OSError:
            held.release()
            raise
        self._held, self._where = held, where
        remove_stale_report_sockets(held.path)

    def _open(self, path: Path) -> None:
        opened = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            opened.bind(str(path))
        except OSError:
            opened.close()
            raise
        self._socket, self.path, self._identity = opened, str(path), file_identity(path)
        self._loop.add_reader(opened, self._read)

    def ensure_socket(self) -> bool:
        """True if workers could use the socket until now; otherwise create it again (rule 7)."""
        if self._identity is None:
            return False  # there never was one
        if self._is_in_place():
            return True
        path = Path(self.path)
        self._release()
        try:
            self._open_in(self._where, path.name)
            log.warning("%s was removed and is created again: workers could not report progress", path)
        except (OSError, UsageError) as error:
            if not self._has_warned:
                log.warning(
                    "%s was removed: workers cannot report progress; hang detection ignores it: %s", path, error
                )
            self._has_warned = True
        return False

    def _is_in_place(self) -> bool:
        return self._socket is not None and file_identity(Path(self.path)) == self._identity

    def _read(self) -> None:
        assert self._socket is not None
        ancillary_bytes = socket.CMSG_SPACE(_CREDENTIALS.size)
        for _ in range(MAX_BURST):
            try:
                data, ancillary, _, _ = self._socket.recvmsg(MAX_DATAGRAM_BYTES + 1, ancillary_bytes)
            except BlockingIOError:
                return
            except OSError as error:
                log.warning("workers cannot report progress any more: %s", error)
                self._loop.remove_reader(self._socket)
                return
            report = parse_report_datagram(data)
            for level, kind, value in ancillary:
                if report and (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
                    self._on_report(_CREDENTIALS.unpack(value[: _CREDENTIALS.size])[0], report)
        self._loop.remove_reader(self._socket)  # rule 3
        self._loop.call_later(BURST_PAUSE_S, self._resume)

    def _resume(self) -> None:
        if self._socket is not None:
            self._loop.add_reader(self._socket, self._read)

    def renew_recorder_sockets(
        self, round: int, workers: int, kept: Mapping[int, str] | None = None
    ) -> tuple[str, ...]:
        """Paths at which this round's workers serve their flight recorders; the last round's sockets are removed.

        `kept` are the paths of workers that go on in place, by local rank.
        """
        kept = kept or {}
        self._remove_recorder_sockets(set(kept.values()))
        if self.path:
            paths = (kept.get(rank, f"{self.path}-{round}-{rank}") for rank in range(workers))
            self._recorder_sockets = tuple(paths)
        return self._recorder_sockets

    def _remove_recorder_sockets(self, kept: Collection[str] = ()) -> None:
        for path in set(self._recorder_sockets) - set(kept):
            with suppress(OSError):
                Path(path).unlink(missing_ok=True)
        self._recorder_sockets = ()

    def close(self) -> None:
        """Close and remove the socket."""
        self._remove_recorder_sockets()
        if self._is_in_place():
            with suppress(OSError):
                Path(self.path).unlink()
        self._release()

    def _release(self) -> None:
        if self._socket is not None:
            self._loop.remove_reader(self._socket)
            self._socket.close()
            self._socket = None
        if self._held is not None:
            self._held.release()
            self._held = None


def remove_stale_report_sockets(directory: Path) -> None:
    """Remove the sockets of this machine's agents whose process has ended and which refuse connections."""
    with suppress(OSError):
        for path in directory.glob(f"*-{_report_socket_machine_id()}-*"):
            with suppress(ValueError):
                pid = int(path.name.split("-")[0], 16)
                if not Path(f"/proc/{pid}").exists() and _refuses_reports(path):
                    path.unlink(missing_ok=True)


def _refuses_reports(path: Path) -> bool:
    """A socket that does not refuse has a process, perhaps in another container."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as client:
        try:
            client.connect(str(path))
        except ConnectionRefusedError:
            return True
        except OSError:
            pass
    return False


def _report_socket_machine_id() -> str:
    """In the name of every socket, because machines may share the directory."""
    return f"{crc32(os.fsencode(os.uname().nodename)):08x}"


def parse_report_datagram(data: bytes) -> WorkerReport | None:
    """The report in a datagram; None if it is invalid."""
    if len(data) > MAX_DATAGRAM_BYTES:
        return None
    try:
        value: Any = json.loads(data)
    except (ValueError, RecursionError):
        return None
    match value:
        case {"beat": int(count), "step": None} if _is_reported_number(count):
            return WorkerHeartbeat(None, count)
        case {"beat": int(count), "step": int(step)} if _is_reported_number(count) and _is_reported_number(step):
            return WorkerHeartbeat(step, count)
        case {"saved": int(step), "path": str(path)} if _is_reported_number(step):
            return CheckpointReport(step, path)
        case {"commits": int(n), "step": int(step), "bytes": int(size), "stall": float(stall), "age": float(age)}:
            if all(map(_is_reported_number, (n, step, size))) and all(map(_is_reported_duration, (stall, age))):
                return CommitReport(step, n, size, stall, age)
        case {"restored": str(source), "step": int(step), "seconds": float(seconds)}:
            if source in RESTORE_SOURCES and _is_reported_number(step) and _is_reported_duration(seconds):
                return RestoreReport(source, step, seconds)
        case {"profile": int(count), "period": float(period), "arrivals": list(arrivals), "waiting": waiting}:
            times = [period, *arrivals, *([] if waiting is None else [waiting])]
            if _is_reported_number(count) and len(arrivals) <= MAX_ARRIVALS and all(map(_is_reported_duration, times)):
                return StepProfile(count, period, tuple(arrivals), waiting)
    return None


def _is_reported_number(number: int) -> bool:
    return not isinstance(number, bool) and 0 <= number < MAX_STEP


def _is_reported_duration(seconds: Any) -> bool:
    return isinstance(seconds, float) and 0 <= seconds < MAX_SECONDS
