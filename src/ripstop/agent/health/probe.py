"""Looks at this node: free disk, GPUs, the clock's distance to the coordinator's, and the user's own check.

Nothing is judged here (`health.py`).  A look that may hang keeps nobody waiting (`system/blocking_calls.py`).
"""

import asyncio
import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from ripstop.agent.health.assessment import Disk, Facts, GpuHealth, Ran
from ripstop.agent.health.command import HealthCommand
from ripstop.model.config import HealthLimits
from ripstop.system.blocking_calls import ExclusiveCall

log = logging.getLogger("ripstop.agent")

PATIENCE = 30.0  # seconds for a look at disks or GPUs: a driver that keeps nothing in mind needs seconds for each


class HealthProbe:
    """One node's looks at itself; made and used in its event loop."""

    def __init__(self, limits: HealthLimits, logs: str, environ: Mapping[str, str]) -> None:
        self._limits = limits
        self._command = HealthCommand(limits.command, environ)
        self._ran: Ran | None = None  # how the user's check ended last
        self._failed = False
        places = ((logs, "logs"), (environ.get("TMPDIR") or "/tmp", "temporary files"))
        self._disks = ExclusiveCall[tuple[Disk, ...]](partial(read_disks, places if limits.min_disk else ()), ())
        self._gpus = ExclusiveCall[tuple[GpuHealth, ...]](partial(read_gpus, environ.get("CUDA_VISIBLE_DEVICES")), ())
        self._known: tuple[str, ...] = ()  # the GPUs of the first look that found any

    async def look(self, skew: float | None) -> Facts:
        """All there is to know now; `skew` is known to the caller."""
        disks, gpus, ran = await asyncio.gather(
            self._disks.call(PATIENCE), self._gpus.call(PATIENCE), self._ask_the_user()
        )
        if gpus and not self._known:
            self._known = tuple(gpu.uuid for gpu in gpus if gpu.uuid)
        silent = (("disks", disks), ("GPUs", gpus))
        return Facts(
            disks=disks or (),
            gpus=gpus or (),
            known=() if gpus is None else self._known,
            skew=skew,
            ran=ran,
            silent=tuple(what for what, found in silent if found is None),
        )

    async def _ask_the_user(self) -> Ran | None:
        if self._limits.command:
            try:
                self._ran = await self._command.run(self._limits.interval)
            except (OSError, RuntimeError) as error:  # no descriptor or no thread left, which says nothing of the node
                if not self._failed:
                    log.warning("--health-check cannot be run, and how it ended before stands (said once): %s", error)
                self._failed = True
        return self._ran


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


def read_gpus(choice: str | None) -> tuple[GpuHealth, ...]:
    """The GPUs that workers see; none where there is no NVML."""
    if choice is not None and not choice.strip():
        return ()
    from ripstop.system import nvml

    try:
        with nvml.opened() as found:
            from ripstop.agent.health.gpu import read  # most machines have come to their end before

            return read(found, choice)
    except nvml.NoNvml:
        return ()
