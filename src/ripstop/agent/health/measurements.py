"""Measures this node's health: free disk space, GPUs, clock skew, and the result of the user's own command.

`assessment.py` judges the measurements.  One that hangs does not block the agent (`system/blocking_calls.py`).
"""

import asyncio
import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ripstop.agent.health.assessment import CommandResult, Disk, HealthFacts
from ripstop.agent.health.command import HealthCommand
from ripstop.model.config import HealthLimits
from ripstop.system.blocking_calls import ExclusiveCall

if TYPE_CHECKING:
    from ripstop.system.gpus import GpuHealth

log = logging.getLogger("ripstop.agent")

MEASUREMENT_TIMEOUT_S = 30.0  # a driver without persistence mode needs seconds for each GPU


class HealthProbe:
    """The health measurements of one node; created and used in its event loop."""

    def __init__(self, limits: HealthLimits, log_directory: str, environ: Mapping[str, str]) -> None:
        self._limits = limits
        self._command = HealthCommand(limits.command, environ)
        self._command_result: CommandResult | None = None  # the latest
        self._has_failed = False
        places = ((log_directory, "logs"), (environ.get("TMPDIR") or "/tmp", "temporary files"))
        self._disks = ExclusiveCall[tuple[Disk, ...]](partial(measure_disks, places if limits.min_disk else ()), ())
        self._gpus = ExclusiveCall["tuple[GpuHealth, ...]"](
            partial(measure_gpus, environ.get("CUDA_VISIBLE_DEVICES")), ()
        )
        self._known_gpus: tuple[str, ...] = ()  # of the first read that found any

    async def read(self, skew: float | None) -> HealthFacts:
        """All measurements; the caller provides `skew`."""
        disks, gpus, result = await asyncio.gather(
            self._disks.call(MEASUREMENT_TIMEOUT_S), self._gpus.call(MEASUREMENT_TIMEOUT_S), self._measure_by_command()
        )
        if gpus and not self._known_gpus:
            self._known_gpus = tuple(gpu.uuid for gpu in gpus if gpu.uuid)
        return HealthFacts(
            disks=disks or (),
            gpus=gpus or (),
            known_gpus=() if gpus is None else self._known_gpus,
            skew=skew,
            command=result,
            timed_out=tuple(what for what, found in (("disks", disks), ("GPUs", gpus)) if found is None),
        )

    async def _measure_by_command(self) -> CommandResult | None:
        if self._limits.command:
            try:
                self._command_result = await self._command.run(self._limits.interval)
            except (OSError, RuntimeError) as error:  # the agent has no descriptor or thread left; the node may be fine
                if not self._has_failed:
                    log.warning("--health-check cannot be run; its last result stays valid (logged once): %s", error)
                self._has_failed = True
        return self._command_result


def measure_disks(places: tuple[tuple[str, str], ...]) -> tuple[Disk, ...]:
    """The file systems of these directories, each once; only writable directories count."""
    found: dict[int, Disk] = {}
    for path, use in places:
        with suppress(OSError):
            if os.access(path, os.W_OK):
                room = os.statvfs(path)
                found.setdefault(Path(path).stat().st_dev, Disk(path, use, room.f_bavail * room.f_frsize))
    return tuple(found.values())


def measure_gpus(visible: str | None) -> "tuple[GpuHealth, ...]":
    from ripstop.system.gpus import read_gpu_health  # in the thread: it is not needed to start workers

    return read_gpu_health(visible)
