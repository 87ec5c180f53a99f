"""The user's key: a file that only this user can read, in a home directory that all nodes share.

A job's secret is derived from it, so it is in no environment variable and on no command line.  Rules: (1) the job's
first node creates the file, complete from its first moment on; the others wait for it, and so learn that the directory
is not shared; (2) a key that others could have read or written is rejected; (3) a file server that does not answer is
an error after `TIMEOUT_S`.
"""

import logging
import os
import secrets
import stat
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from ripstop.model.config import UserKey
from ripstop.model.errors import UsageError
from ripstop.protocol.secret import derive_job_secret
from ripstop.starters.start import Start
from ripstop.system.safe_files import check_own_directory

log = logging.getLogger("ripstop")

KEY_FILE = ".config/ripstop/key"  # in the home directory
TIMEOUT_S = 60.0  # file servers may show a new file to other machines up to 60 s later
POLL_INTERVAL_S = 0.2
KEY_BYTES = 32
MAX_KEY_LENGTH = 4096
REMEDY = "or set a secret for this job in the job script, before srun: export RIPSTOP_TOKEN=$(openssl rand -hex 32)"


def user_key(start: Start, environ: Mapping[str, str]) -> UserKey | None:
    """The key from which the job's secret is derived; None if the job has one node, or the starter has no name for it.

    The variable HOME is the same on all nodes: starters pass it on.
    """
    if start.nodes == 1 or not start.key_context:
        return None
    if not environ.get("HOME"):
        raise UsageError("HOME is not set: the job's secret comes from a file there; set HOME, or RIPSTOP_TOKEN")
    if not environ["HOME"].startswith("/"):
        raise UsageError(f"HOME={environ['HOME']}: not an absolute path; correct it, or set RIPSTOP_TOKEN")
    return UserKey(Path(environ["HOME"], KEY_FILE), start.key_context, is_creator=start.node_number == 0)


def job_secret_from_user_key(key: UserKey, timeout: float = TIMEOUT_S) -> str:
    """The job's secret.  UsageError: there is no key that only this user can read."""
    found: list[str | OSError | UsageError] = []

    def read() -> None:
        try:
            found.append(
                _create_or_read_user_key(key.path) if key.is_creator else _wait_for_user_key(key.path, timeout)
            )
        except (OSError, UsageError) as error:
            found.append(error)

    reader = threading.Thread(target=read, name="ripstop-key", daemon=True)  # a call to a file server may never return
    reader.start()
    reader.join(2 * timeout)
    match found:
        case [str() as text]:
            return derive_job_secret(text, key.context)
        case [UsageError() as error]:
            raise error
        case [OSError() as error]:
            problem = error.strerror or str(error)
        case _:
            problem = f"the file system did not answer within {2 * timeout:g} s"
    raise UsageError(f"{key.path}: cannot be used for the job's secret: {problem}; correct this, {REMEDY}")


def _create_or_read_user_key(path: Path) -> str:
    if (text := _read_user_key(path)) is not None:
        return text
    for folder in (path.parent.parent, path.parent):  # not the home directory: a missing one is not mounted
        folder.mkdir(mode=0o700, exist_ok=True)
    draft = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "w", encoding="ascii") as file:
            file.write(secrets.token_hex(KEY_BYTES) + "\n")
            file.flush()
            os.fsync(file.fileno())
        with suppress(FileExistsError):  # another job's first node was faster
            os.link(draft, path)
    finally:
        draft.unlink(missing_ok=True)
    text = _read_user_key(path)
    if text is None:
        raise UsageError(f"{path}: was removed just after it was created; keep this file, {REMEDY}")
    return text


def _wait_for_user_key(path: Path, timeout: float) -> str:
    end = time.monotonic() + timeout
    is_logged = False
    while (text := _read_user_key(path)) is None:
        if not is_logged:
            log.info("waiting for %s, which the job's first node creates", path)
        is_logged = True
        if time.monotonic() > end:
            raise UsageError(
                f"{path}: did not appear within {timeout:g} s, although the job's first node creates it; the nodes "
                f"need a home directory that they share, {REMEDY}"
            )
        time.sleep(POLL_INTERVAL_S)
    return text


def _read_user_key(path: Path) -> str | None:
    """The key; None if there is no file."""
    try:
        list(path.parent.iterdir())  # a file server's client may remember that the file was missing: look again
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    with os.fdopen(fd, "rb") as file:
        check_own_directory(path.parent)
        _check_user_key_file(path, os.fstat(fd))
        text = file.read(MAX_KEY_LENGTH).decode("ascii", "replace").strip()
    if len(text) < KEY_BYTES:
        raise UsageError(f"{path}: has {len(text)} characters, a key has {2 * KEY_BYTES}; remove the file")
    return text


def _check_user_key_file(path: Path, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise UsageError(f"{path}: is not a regular file; remove it")
    if found.st_uid != path.parent.stat().st_uid:
        raise UsageError(f"{path}: belongs to user {found.st_uid}, not to you; remove it")
    if found.st_mode & 0o077:
        mode = stat.S_IMODE(found.st_mode)
        raise UsageError(f"{path}: others may read or change it (mode {mode:o}); remove it, so that a new key is made")
