"""Decides from measurements whether this node is fit for the job, and lists its problems.  Pure.

A problem's text has the rule, the value seen and the remedy, in one line.  Clock skew counts only before a node joins:
it is no reason to interrupt training.
"""

from typing import TYPE_CHECKING

from msgspec import Struct

from ripstop.model.config import HealthLimits
from ripstop.model.text_formatting import format_bytes

if TYPE_CHECKING:
    from ripstop.system.gpus import GpuHealth

MAX_OUTPUT_CHARS = 300  # of the health command's last line


class Disk(Struct, frozen=True):
    """The file system of one directory; `use` is what ripstop stores there."""

    path: str
    use: str
    free: int  # bytes


class CommandResult(Struct, frozen=True):
    """The result of the user's health command; `code` is negative for a signal, None after a timeout."""

    code: int | None
    last_line: str = ""
    error: str = ""  # why it could not be started


class HealthFacts(Struct, frozen=True):
    """The measurements of one health check.

    `timed_out` names the measurements that hang; `known_gpus` are the UUIDs of the GPUs that the first check found.
    """

    disks: tuple[Disk, ...] = ()
    gpus: "tuple[GpuHealth, ...]" = ()
    known_gpus: tuple[str, ...] = ()
    skew: float | None = None  # seconds that this clock is ahead of the coordinator's; None: unknown
    command: CommandResult | None = None
    timed_out: tuple[str, ...] = ()


class HealthProblem(Struct, frozen=True):
    """A reason why the job should not use this node.  `key` identifies the problem while its text may change."""

    key: str
    text: str


def assess_health(facts: HealthFacts, limits: HealthLimits, *, joining: bool) -> tuple[HealthProblem, ...]:
    """All problems of this node."""
    found = [_health_problem_of_full_disk(disk, limits.min_disk) for disk in facts.disks if disk.free < limits.min_disk]
    found += [
        HealthProblem(f"timeout {what}", f"the check of the {what} timed out: a driver or a file server hangs")
        for what in facts.timed_out
    ]
    found += [
        HealthProblem(f"gpu {gpu.index}", f"GPU {gpu.index} {gpu.uuid}".rstrip() + f": {gpu.error}")
        for gpu in facts.gpus
        if gpu.error
    ]
    found += [
        HealthProblem(f"gpu {uuid}", f"GPU {uuid} has disappeared; look for Xid errors in the kernel's log")
        for uuid in _missing_gpus(facts)
    ]
    if joining and limits.max_skew and facts.skew is not None and abs(facts.skew) > limits.max_skew:
        found.append(_health_problem_of_clock_skew(facts.skew, limits.max_skew))
    if facts.command is not None and facts.command.code != 0:
        found.append(_health_problem_of_failed_command(facts.command, limits))
    return tuple(found)


def _health_problem_of_full_disk(disk: Disk, min_free: int) -> HealthProblem:
    return HealthProblem(
        f"disk {disk.use}",
        f"{disk.path} ({disk.use}) needs {format_bytes(min_free)} free and has {format_bytes(disk.free)}; "
        "free some space, or lower min_disk",
    )


def _missing_gpus(facts: HealthFacts) -> list[str]:
    """The known GPUs that are missing.  A GPU without a UUID is one of them, and is reported by its index already."""
    present = {gpu.uuid for gpu in facts.gpus}
    missing = [uuid for uuid in facts.known_gpus if uuid not in present]
    return missing[sum(not gpu.uuid for gpu in facts.gpus) :]


def _health_problem_of_clock_skew(skew: float, max_skew: float) -> HealthProblem:
    side = "ahead of" if skew > 0 else "behind"
    return HealthProblem(
        "clock",
        f"the clock is {abs(skew):.3g} s {side} the coordinator's, more than {max_skew:g} s; "
        "synchronize both (chrony, ntpd), or raise max_clock_skew",
    )


def _health_problem_of_failed_command(result: CommandResult, limits: HealthLimits) -> HealthProblem:
    name = limits.command[0]
    if result.error:
        return HealthProblem("command", f"--health-check {name} cannot be started: {result.error}")
    if result.code is None:
        how = f"did not end in {limits.interval:g} s (--health-interval) and was killed"
    elif result.code < 0:
        how = f"was ended by signal {-result.code}"
    else:
        how = f"exited with code {result.code}"
    output = result.last_line.strip()[:MAX_OUTPUT_CHARS]
    return HealthProblem("command", f"--health-check {name} {how}" + (f": {output}" if output else ""))
