"""Directories of a run: made here, or found and known to be this user's.

Others may be able to write where a run's directory is to be, as in /tmp, and put a directory or a link of theirs there
first: a job of root's would then write wherever that link leads.  Rules: (1) a directory below which we write is a
directory, no link, and of the user whom our files belong to; (2) one that is made here is writable by that user alone;
(3) whoever opens a file below it adds O_NOFOLLOW.  Directories above it are the user's business.
"""

import errno
import os
import stat
from pathlib import Path


def make_own_directory(path: Path) -> None:
    """Make it, or see that what is there is ours; OSError if it is not."""
    try:
        path.mkdir(mode=0o755)
    except FileExistsError:
        check_own_directory(path)


def check_own_directory(path: Path) -> None:
    """OSError if it is no directory, or another user's."""
    found = path.lstat()
    if stat.S_ISLNK(found.st_mode):
        raise OSError(errno.ELOOP, f"{path.name} is a symbolic link", str(path))
    if not stat.S_ISDIR(found.st_mode):
        raise OSError(errno.ENOTDIR, f"{path.name} is not a directory", str(path))
    if found.st_uid not in (os.geteuid(), _owner_of_new_files(path)):
        raise OSError(errno.EPERM, f"{path.name} belongs to user {found.st_uid}", str(path))


def _owner_of_new_files(directory: Path) -> int:
    """Whom our files belong to there: a file server may take us for another user."""
    probe = directory / f".{os.urandom(6).hex()}"
    fd = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        return os.fstat(fd).st_uid
    finally:
        os.close(fd)
        probe.unlink(missing_ok=True)


def no_follow(path: Path) -> int:
    """The flag with which to open a file of a run; what is in /dev may well be a link."""
    return 0 if path.parts[:2] == ("/", "dev") else os.O_NOFOLLOW
