"""Creates and opens the files and directories of a run, in places where other users may be able to write.

Another user may be able to write to the parent directory, as in /tmp, and create a directory or a link there first.  A
job of root would then write to the target of that link.  Rules: (1) a directory that we write to is no link, and
belongs to the owner of our files; (2) a directory that we create is writable only by that user; (3) code that opens a
file in it adds O_NOFOLLOW.  Directories above it are the user's responsibility.
"""

import errno
import os
import stat
from pathlib import Path


def make_own_directory(path: Path) -> None:
    """Create it, or check that it is ours; OSError if it is not."""
    try:
        path.mkdir(mode=0o755)
    except FileExistsError:
        check_own_directory(path)


def check_own_directory(path: Path) -> None:
    """Raise OSError if it is no directory, or another user's."""
    found = path.lstat()
    if stat.S_ISLNK(found.st_mode):
        raise OSError(errno.ELOOP, f"{path.name} is a symbolic link", str(path))
    if not stat.S_ISDIR(found.st_mode):
        raise OSError(errno.ENOTDIR, f"{path.name} is not a directory", str(path))
    if found.st_uid != os.geteuid() and found.st_uid != _owner_of_new_files(path):
        raise OSError(errno.EPERM, f"{path.name} belongs to user {found.st_uid}", str(path))


def _owner_of_new_files(directory: Path) -> int:
    """The owner of files that we create there: a file server may map us to another user."""
    probe = directory / f".{os.urandom(6).hex()}"
    fd = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        return os.fstat(fd).st_uid
    finally:
        os.close(fd)
        probe.unlink(missing_ok=True)


def no_follow(path: Path) -> int:
    """The flag for opening a file of a run.  Files in /dev may be links."""
    return 0 if path.parts[:2] == ("/", "dev") else os.O_NOFOLLOW


def open_to_append(path: Path) -> int:
    """Open a file of a run for appending; create it if it does not exist."""
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | no_follow(path) | os.O_CLOEXEC, 0o666)


def file_identity(path: Path) -> tuple[int, int] | None:
    """Which file is there; None if none is."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def replace_file(path: Path, text: str) -> None:
    """Replace a file atomically.  Raises OSError."""
    draft = path.with_name(f".{path.name}.{os.urandom(6).hex()}")  # other nodes may share the directory
    try:
        with draft.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


def rename_existing(path: Path) -> Path | None:
    """Rename the file to `NAME.1`, or the next free number, if it exists; return its new name."""
    if not os.path.lexists(path):
        return None
    number = 1
    while os.path.lexists(free := path.with_name(f"{path.name}.{number}")):
        number += 1
    return path.rename(free)
