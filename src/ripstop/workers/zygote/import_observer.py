"""Watches what an import does to the process, apart from defining modules.

A forked worker has what the zygote imported.  That equals an import in the worker only if the import did not depend on
the worker and changed nothing that a fork does not keep.  So an import is unfit if it reads a variable that differs
between workers or rounds, leaves a thread, a process or a file descriptor, writes output, or changes the environment,
the signals, the working directory, the limits on processors, the beginning of sys.path or a random state.

Not noticed: variables that C code reads with getenv, and seeding in the same import that first loads `random`.
"""

# Pathlib is slow to import, and every worker would import it.
# ruff: noqa: PTH109, PTH115, PTH123, PTH208

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import gc
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

# What `workers/environment.py` sets for each worker or round.
WORKER_VARIABLES = frozenset(("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "CUDA_VISIBLE_DEVICES"))
WORKER_PREFIXES = ("GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "RIPSTOP_")
THREAD_LIBRARY_SIGNALS = 0b11 << 31  # 32 and 33 are the C library's own, for threads
PROCESS_STATE = {  # lines of /proc/self/status
    b"SigBlk": "it blocks signals",
    b"SigIgn": "it changes signal handlers",
    b"SigCgt": "it changes signal handlers",
    b"Umask": "it changes the umask",
    b"Cpus_allowed": "it changes the allowed processors",
}
ALLOCATOR_THREADS = (b"jemalloc_bg_thd",)  # pyarrow brings jemalloc
MAX_DRAWS = 2000
ENVIRON = type(os.environ)


class Unfit(Exception):
    """Why an import must be left to the workers; the variables that it sets; the packages that read a variable."""

    def __init__(self, why: str, variables: tuple[str, ...] = (), readers: tuple[str, ...] = ()) -> None:
        super().__init__(why)
        self.variables = variables
        self.readers = readers


class ImportObserver:
    """A context in which imports are watched; their output is kept from the terminal."""

    def __init__(self, variables: set[str]) -> None:
        self.variables = variables  # set by imports that were left out, so that reading them is unfit too
        self.added: dict[str, str] = {}  # variables that imports have added
        self.shown = 0  # bytes of output to a terminal
        self.read = ""  # the first such variable that was read
        self.readers: dict[str, None] = {}  # the packages whose modules were being imported meanwhile

    def __enter__(self) -> ImportObserver:
        observed = _observed_class(self._on_read)
        # a sitecustomize of the user's may have replaced them
        self.environs: list[Any] = [environ for environ in (os.environ, os.environb) if type(environ) is ENVIRON]
        for environ in self.environs:
            environ.__class__ = observed
        self.streams = [
            (fd, os.dup(fd), _open_import_observer_output(fd)) for fd in (1, 2) if can_observe_import_output(fd)
        ]
        for fd, _, (stand_in, *_) in self.streams:
            os.dup2(stand_in, fd)
        return self

    def __exit__(self, *_: object) -> None:
        for environ in self.environs:
            environ.__class__ = ENVIRON
        for fd, original, stand_ins in self.streams:
            os.dup2(original, fd)
            for other in (original, *stand_ins):
                os.close(other)

    def run(self, action: Callable[[], None]) -> None:
        """Do this import; raise `Unfit` if it must be left to the workers."""
        before = self._state()
        self.read = ""
        self.readers = {}
        try:
            action()
        except BaseException as error:
            if not self.read:
                raise Unfit(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}") from error
        if self.read:
            raise Unfit(f"it reads {self.read}", readers=tuple(self.readers))
        after = self._state()
        if len(after["descriptors"]) > len(before["descriptors"]):
            gc.collect()  # garbage may have kept a file open
            after = self._state()
        for why, value in after.items():
            old = before[why]
            if value == old or old is None:
                continue
            match why:
                case "environment":
                    self._check_variables(old, value)
                case "descriptors":
                    for path in (path for fd, path in value.items() if old.get(fd) != path):
                        raise Unfit(f"it opens {path}")
                case "it seeds random" if observed_import_drew_random_numbers(old, value):
                    continue  # it is seeded anew in every worker
                case _:
                    raise Unfit(why)

    def _check_variables(self, old: dict[bytes, bytes], new: dict[bytes, bytes]) -> None:
        """A variable that was added is given to the workers; a changed one is unfit, and so is one with our pid."""
        names = tuple(os.fsdecode(name) for name in {**old, **new} if old.get(name) != new.get(name))
        for name in names:
            value = os.environ.get(name, "")
            numbers = "".join(c if c.isdigit() else " " for c in value).split()
            if os.fsencode(name) in old or import_observer_rejects_variable(name) or str(os.getpid()) in numbers:
                raise Unfit(f"it sets {name}", names)
        self.added |= {name: os.environ[name] for name in names}

    def _on_read(self, name: str) -> None:
        if name not in self.variables and not import_observer_rejects_variable(name):
            return
        self.read = self.read or name
        frame = sys._getframe(1)
        while frame.f_code is not ImportObserver.run.__code__ and frame.f_back is not None:
            if frame.f_code.co_name == "<module>":
                self.readers[root_package(frame.f_globals["__name__"])] = None
            frame = frame.f_back

    def _state(self) -> dict[str, Any]:
        """By what an import is accused of if the value changes; None: not comparable."""
        state: dict[str, Any] = {}
        with open("/proc/self/status", "rb") as file:
            lines = dict(line.split(b":", 1) for line in file if b":" in line)
        for mask in (b"SigBlk", b"SigIgn", b"SigCgt"):
            lines[mask] = b"%x" % (int(lines[mask], 16) & ~THREAD_LIBRARY_SIGNALS)
        for key, why in PROCESS_STATE.items():
            state[why] = state.get(why, b"") + lines.get(key, b"")
        state["it starts a thread"] = threads_left_by_observed_imports() if int(lines[b"Threads"]) > 1 else 0
        state["it starts a process"] = observed_children()
        state["it writes output"] = [self._written(fd, *rest) for fd, _, (_, *rest) in self.streams]
        state["it changes the working directory"] = observed_working_directory()
        state["it changes the beginning of sys.path"] = sys.path[:1]
        state["it sets a handler of a signal"] = [_signal.getsignal(number) for number in _signal.valid_signals()]
        state |= observed_random_states()
        state["environment"] = dict(getattr(os.environ, "_data", {}))
        state["descriptors"] = observed_descriptors()
        return state

    def _written(self, fd: int, reader: int | None = None) -> int:
        """A number that grows with the output."""
        if reader is None:
            return os.fstat(fd).st_size
        try:
            self.shown += len(os.read(reader, 1 << 16))
        except BlockingIOError:  # nothing new
            return self.shown
        return self.shown


def root_package(name: str) -> str:
    """The package of this module."""
    return name.partition(".")[0]


def can_observe_import_output(fd: int) -> bool:
    try:
        os.fstat(fd)
        return True
    except OSError:
        return False


def import_observer_rejects_variable(name: str) -> bool:
    return name in WORKER_VARIABLES or name.startswith(WORKER_PREFIXES)


def _observed_class(on_read: Callable[[str], None]) -> Any:
    """os.environ keeps its identity, because modules refer to it: only its class is another meanwhile."""

    class ObservedEnviron(ENVIRON):  # type: ignore[valid-type,misc]
        def __getitem__(self, key: Any) -> Any:
            on_read(key if isinstance(key, str) else os.fsdecode(key))
            return super().__getitem__(key)

        # Libraries iterate over all variables to find those with their prefix.
        def items(self) -> Any:
            return dict.items({key: super(ObservedEnviron, self).__getitem__(key) for key in self})

    return ObservedEnviron


def _open_import_observer_output(fd: int) -> tuple[int, ...]:
    """An open file for this output, and the descriptor to read it from; a terminal stands in for a terminal."""
    if os.isatty(fd):
        try:
            reader, terminal = os.openpty()
            os.set_blocking(terminal, False)  # nobody reads: an import that fills the buffer fails, and is left out
            os.set_blocking(reader, False)
            return terminal, reader
        except OSError:  # no more terminals
            pass
    return (os.memfd_create("output"),)


def threads_left_by_observed_imports() -> int:
    """The threads besides this one that make a fork unsafe.

    BLAS libraries stop theirs before a fork.  An allocator does without its own in a forked process.
    """
    trial = os.fork()
    if trial == 0:
        os._exit(0)
    os.waitpid(trial, 0)
    return sum(not import_observer_ignores_thread(thread) for thread in os.listdir("/proc/self/task")) - 1


def import_observer_ignores_thread(thread: str) -> bool:
    try:
        with open(f"/proc/self/task/{thread}/comm", "rb") as file:
            return file.read().strip() in ALLOCATOR_THREADS
    except OSError:  # it has just ended
        return True


def observed_children() -> bytes:
    with open(f"/proc/self/task/{os.getpid()}/children", "rb") as file:
        return file.read()


def observed_working_directory() -> str:
    try:
        return os.getcwd()
    except OSError:  # it was removed
        return ""


def observed_descriptors() -> dict[str, str]:
    found: dict[str, str] = {}
    for fd in os.listdir("/proc/self/fd"):
        try:
            found[fd] = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:  # the descriptor of the listing itself
            continue
    return found


def observed_random_states() -> dict[str, Any]:
    """None for a generator that is not loaded yet."""
    states: dict[str, Any] = dict.fromkeys(("it seeds random", "it seeds numpy.random", "it seeds torch"))
    modules = sys.modules
    if hasattr(python := modules.get("random"), "getstate"):
        states["it seeds random"] = python.getstate()  # type: ignore[union-attr]
    if hasattr(numpy := modules.get("numpy.random"), "get_state"):
        states["it seeds numpy.random"] = numpy.get_state()[1].tobytes()  # type: ignore[union-attr]
    if hasattr(torch := modules.get("torch"), "default_generator"):
        states["it seeds torch"] = torch.default_generator.initial_seed()  # type: ignore[union-attr]
    return states


def observed_import_drew_random_numbers(old: Any, new: Any) -> bool:
    """Whether numbers were taken from `random`, but it was not seeded."""
    import random

    generator = random.Random()
    generator.setstate(old)
    for _ in range(MAX_DRAWS):
        if generator.getstate()[1] == new[1]:
            return True
        generator.getrandbits(32)
    return False
