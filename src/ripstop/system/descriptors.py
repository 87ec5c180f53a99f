"""The open file descriptors, and those that the agent keeps for a recovery.

A recovery needs a few: for the files of /proc, pidfds and pipes.
"""

import errno
import logging
import os
import resource
from pathlib import Path

log = logging.getLogger("ripstop.system")

RESERVED_DESCRIPTORS = 16
MIN_FREE_DESCRIPTORS = 4  # with fewer, a recovery needs the reserve


def open_descriptors() -> frozenset[int]:
    """Those of this process."""
    return frozenset(int(entry.name) for entry in Path("/proc/self/fd").iterdir())


class DescriptorReserve:
    """Some open descriptors.  `ensure` is called first to open them, and then whenever a child process has ended."""

    def __init__(self) -> None:
        self._held: list[int] = []
        self._has_warned = False

    def ensure(self) -> None:
        """Let this process open files again, if it cannot.  Raises nothing.

        It raises its own soft limit to the hard limit, if that is the cause and the kernel allows it.  Otherwise it
        frees the reserve.
        """
        try:
            self._fill()
        except OSError as error:
            if error.errno == errno.EMFILE and _raise_limit():
                return
            self.close()
            if not self._has_warned:
                log.warning("too few file descriptors are free: %s; %s", error.strerror, _descriptor_remedy(error))
            self._has_warned = True

    def _fill(self) -> None:
        """OSError if there are not enough descriptors beside the reserve."""
        spare: list[int] = []
        try:
            while len(self._held) < RESERVED_DESCRIPTORS:
                self._held.append(_open_reserve_descriptor())
            while len(spare) < MIN_FREE_DESCRIPTORS:
                spare.append(_open_reserve_descriptor())
        finally:
            for descriptor in spare:
                os.close(descriptor)

    def close(self) -> None:
        while self._held:
            os.close(self._held.pop())


def _raise_limit() -> bool:
    """Whether the soft limit could be raised."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return False
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError):  # the hard limit is above fs.nr_open
        return False
    log.warning("too few file descriptors were free: the limit is raised from %d to %d (ulimit -n)", soft, hard)
    return True


def _descriptor_remedy(error: OSError) -> str:
    if error.errno != errno.EMFILE:
        return "raise sysctl fs.file-max"
    return f"the limit is {resource.getrlimit(resource.RLIMIT_NOFILE)[0]}; raise it (ulimit -n)"


def _open_reserve_descriptor() -> int:
    return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
