"""The jobs of this user on this machine: a file for each agent, in `run_directory()`, that says how to reach its job.

An agent holds a lock on its file for as long as it lives, however it dies; so a file that can be locked is a dead
agent's, and whoever finds it removes it, with its socket.  A file is there whole or not at all.  Where
the job is steered at an endpoint it holds the token for that, so it is readable by this user alone, as is the
directory.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from ripstop.model.redacted import Redacted

MAX_FILE = 64 * 1024  # bytes
LONGEST_PATH = 100  # bytes of a socket's path that every system takes


class JobRecord(Redacted, frozen=True):
    """How to reach the job of one agent: through a socket here, or else at an endpoint."""

    run_id: str
    node: str
    pid: int
    since: float  # wall-clock time
    socket: str = ""  # the name of a file beside this one
    endpoint: str = ""
    token: str = ""
    tls_ca: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    tls: bool = False


class Registration:
    """This process's file, `name.json`."""

    def __init__(self, directory: Path, name: str) -> None:
        self._path = directory / f"{name}.json"
        self._fd: int | None = None

    def say(self, sign: JobRecord) -> None:
        """Write it, or write it anew."""
        draft = self._path.with_suffix(".new")
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)  # before anybody can see it
            os.write(fd, msgspec.json.encode(sign))
            draft.replace(self._path)
        except OSError:
            os.close(fd)
            raise
        old, self._fd = self._fd, fd
        if old is not None:
            os.close(old)

    def close(self) -> None:
        if self._fd is not None:
            self._path.unlink(missing_ok=True)
            os.close(self._fd)
            self._fd = None


def job_records(directory: Path) -> list[JobRecord]:
    """Those of agents that live, the oldest first; what dead ones have left is removed."""
    found = [sign for path in directory.glob("*.json") if (sign := _read(path)) is not None]
    return sorted(found, key=lambda sign: sign.since)


def _read(path: Path) -> JobRecord | None:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE)
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return _parse(data)
            if not os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return _read(path)  # it was written anew meanwhile, by an agent that lives
            path.with_suffix(".sock").unlink(missing_ok=True)
            path.unlink(missing_ok=True)
    except OSError:
        pass  # it went away meanwhile, or is not ours
    return None


def _parse(data: bytes) -> JobRecord | None:
    """None for what another version has written."""
    try:
        return msgspec.json.decode(data, type=JobRecord)
    except msgspec.DecodeError:
        return None


@contextmanager
def socket_address(path: Path) -> Iterator[str]:
    """An address for a Unix socket at this path, also where the path is longer than addresses are."""
    if len(os.fsencode(path)) <= LONGEST_PATH:
        yield str(path)
        return
    fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{path.name}"
    finally:
        os.close(fd)
