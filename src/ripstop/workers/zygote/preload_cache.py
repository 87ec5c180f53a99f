"""A cache on disk of which imports of a script can be preloaded, so that the next start need not find out again.

A file for each key in `$XDG_CACHE_HOME/ripstop` or `~/.cache/ripstop`.  The key has the interpreter, the installed
packages, the script's imports and the text of its own modules.  An old entry cannot do harm: the zygote observes every
import in any case.  It could only leave out too much, so it is forgotten after a week.

Only a directory and files of this user are read.  Errors are silent: then nothing is remembered.  This file runs in a
separate process of the zygote's, and in a dry run, and imports nothing of ripstop.
"""

# Every job waits for this: pathlib takes longer to import than this takes.
# ruff: noqa: PTH102, PTH103, PTH118, PTH208

from __future__ import annotations

import marshal
import os
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Any

VERSION = 1  # of the format and of the rules
MAX_AGE_S = 7 * 24 * 3600.0
MAX_ENTRIES = 200
MAX_BYTES = 4_000_000


def cache_key(names: Iterable[str], sources: Mapping[str, bytes], path: Iterable[str]) -> str:
    """What a verdict depends on, as a file name.  The first source is the script, which the zygote does not import."""
    from _blake2 import blake2b  # hashlib would load OpenSSL

    inputs = (VERSION, sys.version, sys.prefix, list(names), list(sources.items())[1:])
    digest = blake2b(marshal.dumps(inputs), digest_size=16)
    for directory in path:
        if directory.endswith("-packages"):
            digest.update(marshal.dumps((directory, _distributions_in_cache_key(directory))))
    return str(digest.hexdigest())


def _distributions_in_cache_key(directory: str) -> list[tuple[str, int]]:
    """The distributions in this directory, and when they were installed."""
    try:
        with os.scandir(directory) as entries:
            return sorted(
                (e.name, e.stat().st_mtime_ns) for e in entries if e.name.endswith((".dist-info", ".egg-info"))
            )
    except OSError:
        return []


def recall_from_cache(key: str) -> dict[str, Any] | None:
    """The remembered plan."""
    try:
        with _Directory() as directory:
            file = os.open(key, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory.fd)
            try:
                found = os.fstat(file)
                if found.st_uid != os.geteuid() or not 0 <= time.time() - found.st_mtime < MAX_AGE_S:
                    return None
                data = os.read(file, MAX_BYTES)
            finally:
                os.close(file)
        import json

        match json.loads(data):
            case {"steps": [*steps], "left_out": dict(left_out), "variables": [*variables]}:
                steps = [(str(name), list(map(str, modules))) for name, modules in steps]
                left_out = {str(name): str(why) for name, why in left_out.items()}
                return {"steps": steps, "left_out": left_out, "variables": variables, "careful": False, "fit": 0}
    except (OSError, ValueError, TypeError):
        pass
    return None


def remember_in_cache(key: str, plan: dict[str, Any]) -> None:
    import json

    data = json.dumps({name: plan[name] for name in ("steps", "left_out", "variables")}).encode()
    if len(data) > MAX_BYTES:
        return
    draft = f".{key}.{os.getpid()}"
    try:
        with _Directory(make=True) as directory:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            file = os.open(draft, flags, 0o600, dir_fd=directory.fd)
            try:
                os.write(file, data)
                os.rename(draft, key, src_dir_fd=directory.fd, dst_dir_fd=directory.fd)
            except OSError:
                os.unlink(draft, dir_fd=directory.fd)
            finally:
                os.close(file)
            directory.prune()
    except OSError:
        return


class _Directory:
    """The open cache directory; OSError unless it belongs to this user alone."""

    def __init__(self, make: bool = False) -> None:
        environ = os.environ
        base = environ.get("XDG_CACHE_HOME") or os.path.join(environ.get("HOME") or "/nowhere", ".cache")
        if not base.startswith("/"):
            raise FileNotFoundError(base)
        path = os.path.join(base, "ripstop")
        if make:
            os.makedirs(base, 0o700, exist_ok=True)
            if not os.path.lexists(path):
                os.mkdir(path, 0o700)
        self.fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        found = os.fstat(self.fd)
        if found.st_uid != os.geteuid() or found.st_mode & 0o022:
            os.close(self.fd)
            raise PermissionError(path)

    def __enter__(self) -> _Directory:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.fd)

    def prune(self) -> None:
        """Remove old entries, and the oldest of too many."""
        oldest = time.time() - MAX_AGE_S
        ages = sorted(
            (os.stat(name, dir_fd=self.fd, follow_symlinks=False).st_mtime, name) for name in os.listdir(self.fd)
        )
        for number, (age, name) in enumerate(ages):
            if age < oldest or number < len(ages) - MAX_ENTRIES:
                os.unlink(name, dir_fd=self.fd)
