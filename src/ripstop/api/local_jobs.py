"""The jobs of this user on this machine: each agent has a file in the socket directory with its job's address.

Rules: (1) an agent holds a lock on its file as long as it lives; a file that can be locked belongs to a dead agent, and
the process that finds it removes it with its socket; (2) a file is written atomically; (3) file and directory are
readable by this user alone: a file may hold the API's token.
"""

import fcntl
import os
from pathlib import Path

import msgspec

from ripstop.model.config import Redacted

MAX_FILE_BYTES = 64 * 1024


class JobRecord(Redacted, frozen=True):
    """How to reach the job of one agent: through a socket on this machine, or else at an endpoint."""

    run_id: str
    node: str
    pid: int
    since: float  # wall-clock time
    socket: str = ""  # the name of a file in the same directory
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

    def write(self, record: JobRecord) -> None:
        """Create or replace the file."""
        draft = self._path.with_suffix(".new")
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)  # before other processes can see it
            os.write(fd, msgspec.json.encode(record))
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


def read_local_jobs(directory: Path) -> list[JobRecord]:
    """The records of living agents, oldest first; removes the files of dead ones."""
    records = [record for path in directory.glob("*.json") if (record := _read_local_job(path)) is not None]
    return sorted(records, key=lambda record: record.since)


def _read_local_job(path: Path) -> JobRecord | None:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES)
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return msgspec.json.decode(data, type=JobRecord)
            if not os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return _read_local_job(path)  # a living agent has replaced the file meanwhile
            path.with_suffix(".sock").unlink(missing_ok=True)
            path.unlink(missing_ok=True)
    except (OSError, msgspec.DecodeError):
        pass  # removed meanwhile, or not accessible, or of an incompatible version
    return None
