"""File descriptors that the agent keeps for a recovery, which needs a few: for the files of /proc, pidfds and pipes."""

import logging
import os
import resource

log = logging.getLogger("ripstop.system")

RESERVED = 16
ENOUGH = 4  # are free: the reserve is not needed


class DescriptorReserve:
    """Some open descriptors.  `ensure` is called when a recovery begins, and frees them if there are no others."""

    def __init__(self) -> None:
        self._held: list[int] = []

    def ensure(self) -> None:
        """Let this process open files again, if it has reached its limit.

        It raises its own soft limit to the hard limit, if that is higher.  Otherwise it uses the reserve.
        """
        try:
            self._fill()
        except OSError as error:
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            if soft != hard:
                resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
                log.warning(
                    "too few file descriptors were free: the limit is raised from %d to %d (ulimit -n)", soft, hard
                )
            elif self._held:
                self.close()
                log.warning("too few file descriptors are free: %s, limit %d; raise `ulimit -Hn`", error.strerror, hard)

    def _fill(self) -> None:
        """OSError if there are not enough descriptors beside the reserve."""
        spare: list[int] = []
        try:
            while len(self._held) < RESERVED:
                self._held.append(_open())
            while len(spare) < ENOUGH:
                spare.append(_open())
        finally:
            for descriptor in spare:
                os.close(descriptor)

    def close(self) -> None:
        while self._held:
            os.close(self._held.pop())


def _open() -> int:
    return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
