"""Looks at this node: free disk, GPUs, the clock's distance to the coordinator's, and the user's own check.

Nothing is judged here (`health.py`).  Looks that may hang, at a file server or at a driver, are made in threads that
nobody waits for beyond their time; while one hangs there is no second one.
"""

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

from ripstop.agent import health_command
from ripstop.agent.health import Disk, Facts, Gpu, Ran
from ripstop.config import Health
from ripstop.workers.process import Children

log = logging.getLogger("ripstop.agent")

PATIENCE = 30.0  # seconds for a look at disks or GPUs: a driver that keeps nothing in mind needs seconds for each

T = TypeVar("T")


class Checkup:
    """One node's looks at itself; made and used in its event loop."""

    def __init__(self, limits: Health, logs: str, environ: Mapping[str, str], children: Children) -> None:
        self._limits = limits
        self._environ = environ
        self._children = children
        places = ((logs, "logs"), (environ.get("TMPDIR") or "/tmp", "temporary files"))
        self._disks = _Look(partial(read_disks, places if limits.min_disk else ()))
        self._gpus = _Look(partial(read_gpus, environ.get("CUDA_VISIBLE_DEVICES")))
        self._known: tuple[str, ...] | None = None  # the GPUs of the first look

    async def look(self, skew: float | None) -> Facts:
        """All there is to know now; `skew` is known to the caller."""
        disks, gpus, ran = await asyncio.gather(self._disks.take(), self._gpus.take(), self._ask_the_user())
        if self._known is None and gpus is not None:
            self._known = tuple(gpu.uuid for gpu in gpus if gpu.uuid)
        silent = (("disks", disks), ("GPUs", gpus))
        return Facts(
            disks=disks or (),
            gpus=gpus or (),
            known=() if gpus is None else self._known or (),
            skew=skew,
            ran=ran,
            silent=tuple(what for what, found in silent if found is None),
        )

    async def _ask_the_user(self) -> Ran | None:
        command, patience = self._limits.command, self._limits.interval
        return await health_command.run(command, self._environ, patience, self._children) if command else None


class _Look(Generic[T]):
    """A function that may hang: called in a thread, one at a time, and not waited for beyond its time.

    What it found last stands when it fails.
    """

    def __init__(self, look: Callable[[], tuple[T, ...]]) -> None:
        self._look = look
        self._last: tuple[T, ...] = ()
        self._failed = False
        self._pending: asyncio.Future[tuple[T, ...]] | None = None

    async def take(self) -> tuple[T, ...] | None:
        """What it found; None when it does not come back."""
        if self._pending is None:
            self._pending = asyncio.get_running_loop().create_future()
            threading.Thread(target=self._run, args=(self._pending,), name="ripstop-look", daemon=True).start()
        done, _ = await asyncio.wait([self._pending], timeout=PATIENCE)
        if not done:
            return None
        found, self._pending = self._pending, None
        return found.result()

    def _run(self, pending: asyncio.Future[tuple[T, ...]]) -> None:
        try:
            self._last = self._look()
        except Exception as defect:
            if not self._failed:
                log.warning("a look at this node failed, which says nothing of its health (said once): %r", defect)
            self._failed = True
        with suppress(RuntimeError):  # the loop is closed
            pending.get_loop().call_soon_threadsafe(_settle, pending, self._last)


def _settle(pending: asyncio.Future[T], found: T) -> None:
    if not pending.done():
        pending.set_result(found)


# what is looked at ----------------------------------------------------------------------------------------------------


def read_disks(places: tuple[tuple[str, str], ...]) -> tuple[Disk, ...]:
    """The file systems of these directories, each once.  What cannot be written to is nobody's room."""
    found: dict[int, Disk] = {}
    for path, use in places:
        with suppress(OSError):
            if os.access(path, os.W_OK):
                room = os.statvfs(path)
                found.setdefault(Path(path).stat().st_dev, Disk(path, use, room.f_bavail * room.f_frsize))
    return tuple(found.values())


def read_gpus(choice: str | None) -> tuple[Gpu, ...]:
    """The GPUs that workers see; none where there are no bindings of NVML."""
    if choice is not None and not choice.strip():
        return ()
    try:
        import pynvml
    except ImportError:
        return ()
    from ripstop.agent.nvml import read  # most machines have come to their end here

    return read(pynvml, choice)
