"""The directory for the sockets of this machine's jobs.  Only this user has access to it.

It is `$XDG_RUNTIME_DIR/ripstop`, or `ripstop-UID` in the temporary directory.  A directory of another user, or with
access for others, is rejected: a process that can create a socket there could impersonate a job.  Agents hold it while
they run, and the last one removes it.  Commands search both places, because a job that a scheduler starts has another
environment than a shell.
"""

import errno
import fcntl
import os
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from ripstop.model.errors import UsageError

LOCK_TIMEOUT_S = 1.0  # agents lock it for an instant only; the event loop waits meanwhile
LOCK_RETRY_S = 0.001
MAX_SOCKET_PATH_BYTES = 100  # every system accepts a socket address of this length


def socket_directory(environ: Mapping[str, str]) -> Path:
    """The directory, created if it does not exist."""
    path = (
        _runtime_socket_directory(environ) if environ.get("XDG_RUNTIME_DIR") else _temporary_socket_directory(environ)
    )
    try:
        found = _make_socket_directory(path)
    except OSError as error:
        raise UsageError(
            f"sockets need a directory: {path} cannot be created ({error.strerror}); set TMPDIR"
        ) from error
    if not _is_private_socket_directory(found):
        raise UsageError(
            f"{path} must be a private directory of this user (mode 700); remove it, or set another TMPDIR"
        )
    return path


def socket_directories(environ: Mapping[str, str]) -> list[Path]:
    """The existing directories in which agents of this user may have sockets."""
    found = []
    for path in (_runtime_socket_directory(environ), _temporary_socket_directory(environ)):
        with suppress(OSError):
            if _is_private_socket_directory(path.lstat()):
                found.append(path)
    return found


def _runtime_socket_directory(environ: Mapping[str, str]) -> Path:
    return Path(environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.getuid()}", "ripstop")


def _temporary_socket_directory(environ: Mapping[str, str]) -> Path:
    return Path(environ.get("TMPDIR") or "/tmp", f"ripstop-{os.getuid()}")


def _is_private_socket_directory(found: os.stat_result) -> bool:
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077


def _make_socket_directory(path: Path) -> os.stat_result:
    while True:
        with suppress(FileExistsError):  # `exist_ok` checks again, and another agent may have removed it by then
            path.mkdir(mode=0o700)
        with suppress(FileNotFoundError):  # another agent has just removed it
            return path.lstat()


def _lock_socket_directory(path: Path) -> int:
    """Open and lock the directory.  FileNotFoundError: it was removed; BlockingIOError: another agent may remove it."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        if not os.fstat(fd).st_nlink:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    except BaseException:
        os.close(fd)
        raise
    return fd


class HeldDirectory:
    """The directory at `path`.  It stays until all holders have released it; the last one removes it if it is empty."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        give_up_at = time.monotonic() + LOCK_TIMEOUT_S
        while True:
            self.path = socket_directory(environ)
            try:
                self._fd = _lock_socket_directory(self.path)
                return
            except FileNotFoundError:  # another agent has just removed it
                continue
            except BlockingIOError as error:  # another agent is about to remove it
                if time.monotonic() > give_up_at:
                    raise UsageError(
                        f"sockets need a directory: another process has locked {self.path}; set another TMPDIR"
                    ) from error
                time.sleep(LOCK_RETRY_S)

    def release(self) -> None:
        with suppress(OSError):  # another agent holds it, or it is not empty
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(self._fd).st_nlink:  # the path may be another directory by now
                self.path.rmdir()
        os.close(self._fd)


@contextmanager
def socket_address(path: Path) -> Iterator[str]:
    """An address of the Unix socket at this path, even if the path is too long for an address."""
    if len(os.fsencode(path)) <= MAX_SOCKET_PATH_BYTES:
        yield str(path)
        return
    fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{path.name}"
    finally:
        os.close(fd)
