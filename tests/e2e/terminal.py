"""A real terminal (tmux) that runs a `ripstop` command."""

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.e2e.harness import Job, alive, wait_until

COLOR = re.compile(r"\x1b\[[\d;]*3[0-7][\d;]*m")


class Screen:
    """A terminal of this size; after the command it shows `exit code N`."""

    def __init__(self, job: Job, command: str, width: int, height: int, **env: str) -> None:
        self._tmux = [shutil.which("tmux") or "tmux", "-f", "/dev/null", "-S", str(job.folder / f"tmux-{width}")]
        size = ("-x", str(width), "-y", str(height))
        shell = f"{command}; echo exit code $?; exec cat"
        self._run("new-session", "-d", "-s", "job", *size, shell, env={**job.env, "TERM": "screen-256color", **env})

    def _run(self, *argv: str, env: dict[str, str] | None = None) -> str:
        done = subprocess.run([*self._tmux, *argv], capture_output=True, text=True, env=env, timeout=120, check=True)
        return done.stdout

    def press(self, *keys: str) -> None:
        self._run("send-keys", "-t", "job", *keys)

    def text(self, *flags: str) -> str:
        return self._run("capture-pane", "-p", "-t", "job", *flags)

    def lines(self) -> list[str]:
        """All lines since the start; one that the terminal has wrapped is joined."""
        return [line.rstrip() for line in self.text("-J", "-S", "-").splitlines()]

    def shows(self, pattern: str) -> re.Match[str]:
        return wait_until(lambda: re.search(pattern, self.text()), why=lambda: f"never {pattern!r}:\n{self.text()}")

    def close(self) -> None:
        pids = [int(pid) for pid in self._run("display-message", "-p", "-t", "job", "#{pid} #{pane_pid}").split()]
        self._run("kill-server")
        wait_until(lambda: not any(map(alive, pids)) or None)


@contextmanager
def terminal(job: Job, command: str, width: int = 80, height: int = 24, **env: str) -> Iterator[Screen]:
    if shutil.which("tmux") is None:
        pytest.skip("tmux is not installed (Debian: apt install tmux)")
    screen = Screen(job, command, width, height, **env)
    try:
        yield screen
    finally:
        screen.close()


def ripstop(*argv: object) -> str:
    """The command line for a shell."""
    return shlex.join([sys.executable, "-m", "ripstop", *map(str, argv)])
