"""What `ps` and /proc show of a process: its name, its command line and its environment.

The kernel shows the memory in which it placed command line and environment at exec.  A fork shares its parent's, so the
zygote, its workers and the store process overwrite that memory.
"""

# Pathlib is slow to import.
# ruff: noqa: PTH123

from __future__ import annotations

import os

PENDING = b"ripstop-pending"  # a worker that the agent has not claimed yet
ZYGOTE = b"ripstop-zygote"
STORE = b"ripstop-store"
STANDBY = b"ripstop-standby"
SAVER = b"ripstop-saver"
PR_SET_NAME = 15
# fields of /proc/PID/stat, counted from the third
START_TIME, ARG_START, ARG_END, ENV_START, ENV_END = 19, 45, 46, 47, 48


def title_stat_fields(pid: int | str) -> list[bytes]:
    """Return the fields of /proc/PID/stat from the third on."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()


def rename_process(title: bytes) -> None:
    """Show this process under one name in `ps`."""
    import ctypes

    fields = title_stat_fields("self")
    start, size = int(fields[ARG_START]), int(fields[ARG_END]) - int(fields[ARG_START])
    ctypes.memmove(start, title[: max(0, size - 1)].ljust(size, b"\0"), size)
    ctypes.CDLL(None).prctl(PR_SET_NAME, title, 0, 0, 0)


class ProcessTitle:
    """The zygote's original name, command line and environment memory, which its workers show again."""

    def __init__(self) -> None:
        import ctypes

        fields = title_stat_fields("self")
        self.write = ctypes.memmove
        self.prctl = ctypes.CDLL(None).prctl
        self.arg_start = int(fields[ARG_START])
        self.arguments = ctypes.string_at(self.arg_start, int(fields[ARG_END]) - self.arg_start)
        self.env_start, self.env_size = int(fields[ENV_START]), int(fields[ENV_END]) - int(fields[ENV_START])
        with open("/proc/self/comm", "rb") as file:
            self.name = file.read().strip()

    def show(self, argv: list[str]) -> None:
        """Show this command line, or the original one if there is not enough space."""
        arguments = b"".join(os.fsencode(word) + b"\0" for word in argv)
        size = len(self.arguments)
        self.write(self.arg_start, (arguments if len(arguments) <= size else self.arguments).ljust(size, b"\0"), size)
        self.prctl(PR_SET_NAME, self.name, 0, 0, 0)

    def detach_environment(self) -> None:
        """Have libc copy every variable, so that no pointer leads to the memory that `show_environment` overwrites."""
        for name, value in os.environ.items():
            if name:  # libc cannot look up a variable without a name
                os.putenv(name, value)

    def show_environment(self) -> None:
        """Show the current environment, or leave the zygote's if there is not enough space."""
        block = b"".join(b"%s=%s\0" % item for item in os.environb.items())
        if len(block) <= self.env_size:
            self.write(self.env_start, block.ljust(self.env_size, b"\0"), self.env_size)
