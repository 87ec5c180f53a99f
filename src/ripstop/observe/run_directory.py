"""Where the sockets of this machine's jobs are: a directory of this user's alone.

`$XDG_RUNTIME_DIR/ripstop`, or `ripstop-UID` in the temporary directory.  One that belongs to somebody else, or lets
others in, is refused: whoever can put a socket there could pose as a job.
"""

import os
import stat
from collections.abc import Mapping
from pathlib import Path

from ripstop.errors import UsageError


def run_directory(environ: Mapping[str, str]) -> Path:
    """The directory, made if it was not there."""
    runtime = environ.get("XDG_RUNTIME_DIR")
    path = Path(runtime, "ripstop") if runtime else Path(environ.get("TMPDIR") or "/tmp", f"ripstop-{os.getuid()}")
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        found = path.lstat()
    except OSError as error:
        raise UsageError(f"sockets need a directory: {path} cannot be made ({error.strerror}); set TMPDIR") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise UsageError(f"{path} must be a directory of this user's alone; remove it, or set TMPDIR to another place")
    return path
