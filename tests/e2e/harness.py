"""Runs real `ripstop run` agents on this machine, and waits for events of the agents and their workers.

`Job` is a context manager: at its end it kills every process it started.  It fails the test if an agent that has ended
left a process behind.
"""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Self, TypeVar

from ripstop.diagnostics import stack_dump

SCRIPTS = Path(__file__).parent / "scripts"
TRAIN = SCRIPTS / "train.py"
TIMEOUT_S = 120.0

T = TypeVar("T")
WorkerEvent = dict[str, Any]


def _ports() -> Iterator[int]:
    """Ports below the kernel's own range, from a block that no other process of tests on this machine has."""
    for first in range(10_500, 32_000, 500):  # browsers open no page at port 10080
        claim = socket.socket(socket.AF_UNIX)  # its abstract name is taken until this process ends
        try:
            claim.bind(f"\0ripstop-tests-ports-{first}")
        except OSError:
            claim.close()
            continue
        while claim:
            yield from range(first, first + 500)
    raise AssertionError("43 processes of tests have all the ports")


_PORTS = _ports()


def free_port() -> int:
    """A port that nobody listens on, and nobody gets by chance before the caller uses it."""
    for port in _PORTS:
        with socket.socket() as s, suppress(OSError):
            s.bind(("", port))
            return port
    raise AssertionError("unreachable")


@cache
def spied() -> bool:
    """Whether py-spy is installed and may read other processes."""
    waits = [sys.executable, "-c", "print(flush=True); input()"]
    with subprocess.Popen(waits, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        tries = (asyncio.run(stack_dump.dump_stack(process.pid)) for _ in range(3))  # one may take too long
        found = any(stack.source == "py-spy" for stack in tries)
        process.kill()
    return found


def hurried(flags: Sequence[str], nnodes: str) -> list[str]:
    """The flags of a node whose job waits only 2 s for more nodes before its first round."""
    conf = next((flag for flag in flags if flag.startswith("--rdzv-conf=")), "")
    if ":" not in nnodes or "last_call_timeout" in conf:
        return list(flags)
    hurry = f"{conf},last_call_timeout=2" if conf else "--rdzv-conf=last_call_timeout=2"
    return [*(flag for flag in flags if flag != conf), hurry]


def wait_until(what: Callable[[], T | None], timeout: float = TIMEOUT_S, why: Callable[[], str] = str) -> T:
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        before = time.thread_time()
        if (found := what()) is not None:
            return found
        time.sleep(0.01 + 4 * (time.thread_time() - before))  # the job needs the CPU more than we do
    raise AssertionError(f"did not happen within {timeout:g} s\n{why()}")


class Agent:
    """One `ripstop` process and its output."""

    def __init__(self, argv: list[str], env: dict[str, str], wrap: list[str]) -> None:
        self.process = subprocess.Popen(
            [*wrap, sys.executable, "-m", "ripstop", *argv],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self.pid = self.process.pid
        self._out: list[bytes] = []
        self._err: list[bytes] = []
        assert self.process.stdout and self.process.stderr
        self._threads = [
            threading.Thread(target=_collect, args=(self.process.stdout, self._out), daemon=True),
            threading.Thread(target=_collect, args=(self.process.stderr, self._err), daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    @property
    def out(self) -> str:
        return b"".join(self._out).decode(errors="replace")

    @property
    def err(self) -> str:
        return b"".join(self._err).decode(errors="replace")

    def wait(self, timeout: float = TIMEOUT_S) -> int:
        """The exit code, after all output has been read."""
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"agent {self.pid} did not end within {timeout:g} s\n{self.err}") from None
        for thread in self._threads:
            thread.join(30)
        return code

    def signal(self, signum: int) -> None:
        self.process.send_signal(signum)

    def wait_for_log(self, pattern: str, timeout: float = TIMEOUT_S) -> re.Match[str]:
        """Wait for a match on stderr."""
        return wait_until(
            lambda: re.search(pattern, self.err), timeout, lambda: f"never logged {pattern!r}:\n{self.err}"
        )


def _collect(pipe: Any, into: list[bytes]) -> None:
    with suppress(ValueError, OSError):
        while data := os.read(pipe.fileno(), 65536):
            into.append(data)


class Job:
    """The agents of one job on this machine, and the events that their workers wrote."""

    def __init__(self, folder: Path, **env: str) -> None:
        self.folder = folder
        self.log = folder / "worker-events.jsonl"
        self._log_position = 0
        self._worker_events: list[WorkerEvent] = []
        self.logs = folder / "logs"
        self.port = free_port()
        self.mark = f"ripstop-e2e-{os.getpid()}-{time.monotonic_ns()}"
        base = {k: v for k, v in os.environ.items() if not k.startswith(("PET_", "RIPSTOP_", "TORCHELASTIC_"))}
        self.env = {**base, "TRAIN_LOG": str(self.log), "OMP_NUM_THREADS": "1", "E2E_MARK": self.mark, **env}
        self.agents: list[Agent] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        ended = all(a.process.poll() is not None for a in self.agents)
        if kind is None and ended and any(a.process.returncode == -signal.SIGKILL for a in self.agents):
            with suppress(AssertionError):  # the check below fails
                wait_until(lambda: not self.leftovers() or None)  # they exit after a killed agent
        left = self.leftovers()
        for agent in self.agents:
            if agent.process.poll() is None:
                agent.signal(signal.SIGCONT)
                agent.process.kill()
        for agent in self.agents:
            agent.wait()
        wait_until(lambda: None if self.leftovers(kill=True) else True, why=lambda: "processes cannot be killed")
        if kind is None and ended:
            assert not left, f"agents ended and left processes behind: {left}"

    def run(self, *argv: str, env: dict[str, str] | None = None, wrap: list[str] | None = None) -> Agent:
        """Start `ripstop run argv…`."""
        return self.ripstop("run", f"--log-dir={self.logs}", *argv, env=env, wrap=wrap)

    def ripstop(self, *argv: str, env: dict[str, str] | None = None, wrap: list[str] | None = None) -> Agent:
        agent = Agent(list(argv), {**self.env, **(env or {})}, wrap or [])
        self.agents.append(agent)
        return agent

    def node(
        self,
        *flags: str,
        nnodes: str = "1:3",
        script: Path = TRAIN,
        endpoint: str = "",
        env: dict[str, str] | None = None,
        wrap: list[str] | None = None,
        hurry: bool = True,
    ) -> Agent:
        """Start one node, with one worker, of a job of several nodes."""
        return self.run(
            f"--nnodes={nnodes}",
            "--nproc-per-node=1",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={endpoint or f'127.0.0.1:{self.port}'}",
            "--rdzv-id=e2e",
            *(hurried(flags, nnodes) if hurry else flags),
            str(script),
            env=env,
            wrap=wrap,
        )

    # events that the workers wrote

    def worker_events(self, **like: Any) -> list[WorkerEvent]:
        with suppress(FileNotFoundError), self.log.open("rb") as file:
            file.seek(self._log_position)  # of what is new: we are called a hundred times a second
            lines, end, _ = file.read().rpartition(b"\n")
            self._log_position += len(lines + end)
            for line in lines.splitlines():
                with suppress(ValueError):  # truncated by a SIGKILL
                    self._worker_events.append(json.loads(line))
        return [h for h in self._worker_events if all(h.get(k) == v for k, v in like.items())]

    def wait_for(self, *, count: int = 1, after: float = 0.0, timeout: float = TIMEOUT_S, **like: Any) -> WorkerEvent:
        """Wait until `count` events match; return the last of them."""

        def find() -> WorkerEvent | None:
            found = [h for h in self.worker_events(**like) if h["t"] > after]
            return found[count - 1] if len(found) >= count else None

        return wait_until(find, timeout, lambda: f"no {count} x {like} after {after}\n{self.describe()}")

    def steps(self, world: int, *, after: float = 0.0, timeout: float = TIMEOUT_S) -> WorkerEvent:
        """Wait until every rank of a world of this size has completed the same step after this time."""

        def find() -> WorkerEvent | None:
            ranks: dict[int, set[int]] = {}
            for h in self.worker_events(event="step", world=world):
                if h["t"] > after:
                    ranks.setdefault(h["step"], set()).add(h["rank"])
                    if len(ranks[h["step"]]) == world:
                        return h
            return None

        return wait_until(find, timeout, lambda: f"no full step of {world} ranks\n{self.describe()}")

    def describe(self) -> str:
        tails = [f"--- agent {a.pid} ({a.process.poll()})\n{a.err[-3000:]}" for a in self.agents]
        return "\n".join([*tails, *map(str, self.worker_events()[-8:])])

    def leftovers(self, *, kill: bool = False) -> list[str]:
        """Processes of this job, found by its mark in their environment; without agents that still run."""
        agents = {a.pid for a in self.agents if a.process.poll() is None}
        found = []
        for pid, command in _marked(self.mark):
            if pid not in agents:
                found.append(f"{pid} {command}")
                if kill:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
        return found


def _marked(mark: str) -> Iterator[tuple[int, str]]:
    needle = f"E2E_MARK={mark}".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                if needle in (entry / "environ").read_bytes():
                    yield (
                        int(entry.name),
                        (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"),
                    )


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
