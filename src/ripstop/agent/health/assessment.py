"""Is this node good enough for the job?  What was found of it goes in, what is wrong with it comes out.  Pure.

`checkup.py` finds it out.  A problem says the rule, what was seen and the remedy, in one line.  Clocks count only while
a node has not been in the job: two that disagree are no reason to disturb its training.
"""

from msgspec import Struct

from ripstop.model.config import HealthLimits
from ripstop.model.text import format_bytes

LONGEST = 300  # characters of a user's words


class Disk(Struct, frozen=True):
    """A file system, by one of its directories; `use` says what it is for."""

    path: str
    use: str
    free: int  # bytes


class GpuHealth(Struct, frozen=True):
    """One GPU as NVML sees it; `trouble` is empty for a good one."""

    index: int
    uuid: str
    trouble: str = ""


class Ran(Struct, frozen=True):
    """The user's check; `code` None: it did not end in time, negative: the signal that ended it."""

    code: int | None
    last_line: str = ""
    error: str = ""  # why it could not be started


class Facts(Struct, frozen=True):
    """What was found.  `silent` are looks that did not come back; `known` are the UUIDs of the first look at GPUs."""

    disks: tuple[Disk, ...] = ()
    gpus: tuple[GpuHealth, ...] = ()
    known: tuple[str, ...] = ()
    skew: float | None = None  # seconds that this clock is ahead of the coordinator's; None: not known
    ran: Ran | None = None
    silent: tuple[str, ...] = ()


class HealthProblem(Struct, frozen=True):
    """Why a node should not be counted on.  `what` stays the same while the words may change."""

    what: str
    words: str


def problems(facts: Facts, limits: HealthLimits, *, joining: bool) -> tuple[HealthProblem, ...]:
    """All that is wrong with this node."""
    found = [_full(disk, limits.min_disk) for disk in facts.disks if disk.free < limits.min_disk]
    found += [_silent(look) for look in facts.silent]
    found += [
        HealthProblem(f"gpu {gpu.index}", f"GPU {gpu.index} {gpu.uuid}".rstrip() + f": {gpu.trouble}")
        for gpu in facts.gpus
        if gpu.trouble
    ]
    found += [_missing(uuid) for uuid in _lost(facts)]
    if joining and limits.max_skew and facts.skew is not None and abs(facts.skew) > limits.max_skew:
        found.append(_off(facts.skew, limits.max_skew))
    if facts.ran is not None and facts.ran.code != 0:
        found.append(_objection(facts.ran, limits))
    return tuple(found)


def _full(disk: Disk, least: int) -> HealthProblem:
    return HealthProblem(
        f"disk {disk.use}",
        f"{disk.path} ({disk.use}) needs {format_bytes(least)} free and has {format_bytes(disk.free)}; "
        "make room, or lower min_disk",
    )


def _silent(look: str) -> HealthProblem:
    return HealthProblem(f"silent {look}", f"a look at the {look} does not come back: a driver or a file server hangs")


def _lost(facts: Facts) -> list[str]:
    """GPUs that were there; one that cannot even be named any more explains one of them."""
    here = {gpu.uuid for gpu in facts.gpus}
    gone = [uuid for uuid in facts.known if uuid not in here]
    return gone[sum(not gpu.uuid for gpu in facts.gpus) :]


def _missing(uuid: str) -> HealthProblem:
    return HealthProblem(f"gpu {uuid}", f"GPU {uuid} was here and is gone; see the kernel's log for Xid errors")


def _off(skew: float, most: float) -> HealthProblem:
    side = "ahead of" if skew > 0 else "behind"
    return HealthProblem(
        "clock",
        f"the clock is {abs(skew):.3g} s {side} the coordinator's, more than {most:g} s; "
        "synchronize both (chrony, ntpd), or raise max_clock_skew",
    )


def _objection(ran: Ran, limits: HealthLimits) -> HealthProblem:
    name = limits.command[0]
    if ran.error:
        return HealthProblem("command", f"--health-check {name} cannot be started: {ran.error}")
    if ran.code is None:
        how = f"did not end in {limits.interval:g} s (--health-interval) and was killed"
    elif ran.code < 0:
        how = f"was ended by signal {-ran.code}"
    else:
        how = f"exited with code {ran.code}"
    said = ran.last_line.strip()[:LONGEST]
    return HealthProblem("command", f"--health-check {name} {how}" + (f": {said}" if said else ""))
