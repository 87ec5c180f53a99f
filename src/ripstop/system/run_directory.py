"""Where the sockets of this machine's jobs are: a directory of this user's alone.

`$XDG_RUNTIME_DIR/ripstop`, or `ripstop-UID` in the temporary directory.  One that belongs to somebody else, or lets
others in, is refused: whoever can put a socket there could pose as a job.  Agents hold it while they live, and the last
one removes it.  Who looks for jobs looks in both: what a scheduler starts has another environment than a shell.
"""

import fcntl
import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from ripstop.model.errors import UsageError


def run_directory(environ: Mapping[str, str]) -> Path:
    """The directory, made if it was not there."""
    path = _runtime(environ) if environ.get("XDG_RUNTIME_DIR") else _temporary(environ)
    try:
        found = _make(path)
    except OSError as error:
        raise UsageError(f"sockets need a directory: {path} cannot be made ({error.strerror}); set TMPDIR") from error
    if not _is_ours_alone(found):
        raise UsageError(f"{path} must be a directory of this user's alone; remove it, or set TMPDIR to another place")
    return path


def run_directories(environ: Mapping[str, str]) -> list[Path]:
    """Wherever agents of this user may have theirs; none is made."""
    found = []
    for path in (_runtime(environ), _temporary(environ)):
        with suppress(OSError):
            if _is_ours_alone(path.lstat()):
                found.append(path)
    return found


def _runtime(environ: Mapping[str, str]) -> Path:
    return Path(environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.getuid()}", "ripstop")


def _temporary(environ: Mapping[str, str]) -> Path:
    return Path(environ.get("TMPDIR") or "/tmp", f"ripstop-{os.getuid()}")


def _is_ours_alone(found: os.stat_result) -> bool:
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077


def _make(path: Path) -> os.stat_result:
    while True:
        with suppress(FileExistsError):  # `exist_ok` looks again, and it may be gone then
            path.mkdir(mode=0o700)
        with suppress(FileNotFoundError):  # somebody was just leaving
            return path.lstat()


class HeldDirectory:
    """The directory at `path`, which stays until it is left; an empty one goes with the last who leaves."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        while True:
            self.path = run_directory(environ)
            with suppress(FileNotFoundError):  # somebody was just leaving
                self._fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                fcntl.flock(self._fd, fcntl.LOCK_SH)
                if os.fstat(self._fd).st_nlink:
                    return  # it is still there, and now stays
                os.close(self._fd)

    def leave(self) -> None:
        with suppress(OSError):  # others are there, or something of theirs
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(self._fd).st_nlink:  # what is at the path now may be another one
                self.path.rmdir()
        os.close(self._fd)
