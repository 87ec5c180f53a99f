"""The agent's socket: workers say here that they make progress (`ripstop.train`).

One datagram socket an agent, in a directory of this user's alone; a datagram is a small JSON object.  Rules: (1) the
kernel says which process has sent it; what a process says of itself is not asked, so a worker of an earlier round,
or a stranger, is nobody's worker; (2) a worker is never made to wait: what nobody has read yet fills a short queue,
and the rest is dropped by the sender; (3) a flood costs a bounded share of the agent's time; (4) what makes no sense is
passed over; (5) a job without this socket is a job without reports, and no less; (6) what an agent of this machine that
was killed has left is removed by the next one; (7) a socket whose name is gone, as those of a user who has logged out,
is made anew under the same name: workers know no other.
"""

import asyncio
import json
import logging
import os
import socket
import struct
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from zlib import crc32

from msgspec import Struct

from ripstop.model.errors import UsageError
from ripstop.system.run_directory import HeldDirectory

log = logging.getLogger("ripstop.workers")

LARGEST = 4096  # bytes of a datagram
LONGEST_PATH = 107  # bytes of a Unix socket's name, in Linux
BURST = 64  # datagrams read in a row
PAUSE = 0.05  # seconds for everybody else, after as many
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
MAX_STEP = 2**62


class WorkerHeartbeat(Struct, frozen=True):
    """A worker makes progress; it has said so `count` times by now, and not every time to us."""

    step: int | None
    count: int


class CheckpointReport(Struct, frozen=True):
    """A worker's state up to this step is safe."""

    step: int
    path: str


JobReport = WorkerHeartbeat | CheckpointReport


class Reports:
    """The socket, for as long as the agent lives; `on_report` is called in the event loop with the sender's pid."""

    def __init__(self, environ: Mapping[str, str], on_report: Callable[[int, JobReport], None]) -> None:
        self._on_report = on_report
        self._loop = asyncio.get_running_loop()
        self._socket: socket.socket | None = None
        self._held: HeldDirectory | None = None
        self.path = ""  # where workers find it; empty: there is none
        self._name: tuple[int, int] | None = None  # what is there
        self._said = False
        self._recorder_sockets: tuple[str, ...] = ()
        why = ""
        for where in (environ, {}):  # TMPDIR may be longer than a socket's name can be
            try:
                self._open_in(where, f"{os.getpid():x}-{_machine()}-{os.urandom(3).hex()}")
                return
            except (OSError, UsageError) as error:
                why = why or str(error)
        log.warning("workers cannot report progress: %s", why)

    def _open_in(self, where: Mapping[str, str], name: str) -> None:
        held = HeldDirectory(where)
        try:
            self._open(held.path / name)
        except OSError:
            held.leave()
            raise
        self._held, self._where = held, where
        remove_dead(held.path)

    def _open(self, path: Path) -> None:
        opened = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            opened.bind(str(path))
        except OSError:
            opened.close()
            raise
        self._socket, self.path, self._name = opened, str(path), _number(path)
        self._loop.add_reader(opened, self._read)

    def audible(self) -> bool:
        """Whether workers have found the socket until now; if they have not, it is made anew (rule 7)."""
        if self._name is None:
            return False  # there never was one
        if self._socket is not None and _number(Path(self.path)) == self._name:
            return True
        path = Path(self.path)
        self._let_go()
        try:
            self._open_in(self._where, path.name)
            log.warning("%s was removed, and is made anew: workers could not report progress", path)
        except (OSError, UsageError) as error:
            if not self._said:
                log.warning("%s was removed: workers cannot report progress, and are not missed: %s", path, error)
            self._said = True
        return False

    def _read(self) -> None:
        assert self._socket is not None
        for _ in range(BURST):
            try:
                data, ancillary, _, _ = self._socket.recvmsg(LARGEST + 1, socket.CMSG_SPACE(_CREDENTIALS.size))
            except BlockingIOError:
                return
            except OSError as error:
                log.warning("workers cannot report progress any more: %s", error)
                self._loop.remove_reader(self._socket)
                return
            report = read(data)
            for level, kind, value in ancillary:
                if report and (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
                    self._on_report(_CREDENTIALS.unpack(value[: _CREDENTIALS.size])[0], report)
        self._loop.remove_reader(self._socket)  # rule 3
        self._loop.call_later(PAUSE, self._resume)

    def _resume(self) -> None:
        if self._socket is not None:
            self._loop.add_reader(self._socket, self._read)

    def renew_recorder_sockets(self, round: int, workers: int) -> tuple[str, ...]:
        """Where the workers of this round may listen in turn (`flight.py`); those of the last one are removed."""
        self._remove_recorder_sockets()
        if self.path and len(f"{self.path}-{round}-{workers}".encode()) <= LONGEST_PATH:
            self._recorder_sockets = tuple(f"{self.path}-{round}-{rank}" for rank in range(workers))
        return self._recorder_sockets

    def _remove_recorder_sockets(self) -> None:
        for path in self._recorder_sockets:
            with suppress(OSError):
                Path(path).unlink(missing_ok=True)
        self._recorder_sockets = ()

    def close(self) -> None:
        """Nobody is heard any more, and the name is gone."""
        self._remove_recorder_sockets()
        if self._socket is not None and _number(Path(self.path)) == self._name:
            with suppress(OSError):
                Path(self.path).unlink()
        self._let_go()

    def _let_go(self) -> None:
        if self._socket is not None:
            self._loop.remove_reader(self._socket)
            self._socket.close()
            self._socket = None
        if self._held is not None:
            self._held.leave()
            self._held = None


def _number(path: Path) -> tuple[int, int] | None:
    """What is there, by the numbers of file system and file."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def remove_dead(directory: Path) -> None:
    """Sockets of agents of this machine whose process is gone, and to which nobody listens."""
    with suppress(OSError):
        for path in directory.glob(f"*-{_machine()}-*"):
            with suppress(ValueError):
                pid = int(path.name.split("-")[0], 16)
                if not Path(f"/proc/{pid}").exists() and _refuses(path):
                    path.unlink(missing_ok=True)


def _refuses(path: Path) -> bool:
    """A process that cannot be seen may live in another container."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as asking:
        try:
            asking.connect(str(path))
        except ConnectionRefusedError:
            return True
        except OSError:
            pass
    return False


def _machine() -> str:
    """Where machines share the directory, a socket is nobody's who is on another one."""
    return f"{crc32(os.fsencode(os.uname().nodename)):08x}"


def read(data: bytes) -> JobReport | None:
    """The report in a datagram; None when it is none."""
    if len(data) > LARGEST:
        return None
    try:
        said: Any = json.loads(data)
    except (ValueError, RecursionError):
        return None
    match said:
        case {"beat": int(count), "step": None} if _fits(count):
            return WorkerHeartbeat(None, count)
        case {"beat": int(count), "step": int(step)} if _fits(count) and _fits(step):
            return WorkerHeartbeat(step, count)
        case {"saved": int(step), "path": str(path)} if _fits(step):
            return CheckpointReport(step, path)
    return None


def _fits(number: int) -> bool:
    return not isinstance(number, bool) and 0 <= number < MAX_STEP
