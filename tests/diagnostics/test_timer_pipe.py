"""The agent's watch on the pipe: what is missed is told once, what is cleared in time is not."""

import asyncio
import json
import os
import re
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from ripstop.diagnostics import timer_pipe
from ripstop.diagnostics.timer_pipe import Missed, Pipe, Watchdog, in_use, reason
from ripstop.model.errors import UsageError

PATIENCE = 20.0

Events = asyncio.Queue[tuple[int, str, int]]


def watched(path: Path, play: Callable[[Events], Awaitable[None]]) -> None:
    async def main() -> None:
        told: Events = asyncio.Queue()
        watchdog = Watchdog(path, lambda *missed: told.put_nowait(missed))
        try:
            async with asyncio.timeout(PATIENCE):
                await play(told)
        finally:
            watchdog.close()

    asyncio.run(main())
    assert not path.exists()


def ask(path: Path, scope: str, after: float, *, pid: int = 77, signum: int = 9) -> None:
    """A negative time clears."""
    expires = time.time() + after if after >= 0 else -1
    said = json.dumps({"pid": pid, "scope_id": scope, "expiration_time": expires, "signal": signum})
    write(path, f"{said}\n".encode())


def write(path: Path, data: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    os.write(fd, data)
    os.close(fd)


def test_a_missed_timer_is_told_once_with_its_scope_and_signal(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"

    async def play(told: Events) -> None:
        ask(pipe, "slow", 60)
        ask(pipe, "load data", 0.05)
        pid, why, signum = await told.get()
        assert (pid, signum) == (77, 9)
        assert re.fullmatch(r"timer expired: 'load data' \(0\.\d s\); ripstop sent SIGKILL", why)
        ask(pipe, "next", 0.0, pid=78, signum=0)
        assert (await told.get())[2] == 0
        assert told.empty(), "the timers of 77 are forgotten with what was told of it"

    watched(pipe, play)


def test_what_is_cleared_before_the_agent_looks_is_not_missed(tmp_path: Path) -> None:
    """An agent that was held up finds a deadline long gone, and behind it in the pipe the word that it was kept."""
    pipe = tmp_path / "pipe"

    async def play(told: Events) -> None:
        ask(pipe, "kept", 0.05)
        await asyncio.sleep(0)  # the agent has read it
        await asyncio.sleep(0)
        time.sleep(0.1)  # noqa: ASYNC251 - the loop stands still
        ask(pipe, "kept", -1)
        ask(pipe, "missed", 0.0, pid=78)
        assert (await told.get())[0] == 78
        assert told.empty()

    watched(pipe, play)


def test_timers_of_a_round_that_is_over_are_forgotten(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"

    async def main() -> None:
        told: Events = asyncio.Queue()
        watchdog = Watchdog(pipe, lambda *missed: told.put_nowait(missed))
        ask(pipe, "old", 0.0)
        watchdog.new_round()
        ask(pipe, "new", 0.0, pid=78)
        assert (await asyncio.wait_for(told.get(), PATIENCE))[0] == 78
        assert told.empty()
        watchdog.close()

    asyncio.run(main())


def test_rubbish_is_said_once_and_hides_no_request(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pipe = tmp_path / "pipe"

    async def play(told: Events) -> None:
        write(pipe, b'rubbish\n{"pid": 1}\n\n')
        for _ in range(3):  # a line longer than any, in pieces
            write(pipe, b"x" * 60_000)
            await asyncio.sleep(0.01)
        write(pipe, b"\n")
        ask(pipe, "real", 0.0)
        assert "'real'" in (await told.get())[1]

    watched(pipe, play)
    assert caplog.text.count("is passed over") == 1


def test_more_timers_than_any_job_has_are_refused_and_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timer_pipe, "MOST", 2)
    pipe = tmp_path / "pipe"

    async def play(told: Events) -> None:
        for scope in ("a", "b", "c", "d"):
            ask(pipe, scope, 60)
        ask(pipe, "b", 0.0)  # one that is there may be set again
        assert "'b'" in (await told.get())[1]

    watched(pipe, play)
    assert caplog.text.count("more have no effect") == 1


def test_the_first_signal_that_a_missed_timer_names_is_sent() -> None:
    assert reason([Missed("a", 1, 0), Missed("b", 2, 15), Missed("c", 3, 9)])[1] == 15
    why, signum = reason([Missed(f"s{n}\x1b[31m", n, 0) for n in range(9)])
    assert signum == 0 and "no signal was asked for" in why
    assert "and 4 more" in why and "\x1b" not in why


def test_the_pipe_is_the_users_own_and_a_stale_one_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path, 0o666)
    pipe = Pipe(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert in_use(path)
    with pytest.raises(UsageError, match="another agent reads this pipe; name another place"):
        Pipe(path)
    pipe.close()


def test_what_is_no_pipe_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    with pytest.raises(UsageError, match="is there and no pipe"):
        Pipe(tmp_path / "file")
    with pytest.raises(UsageError, match="is no directory; make it"):
        Pipe(tmp_path / "nowhere" / "pipe")
    with pytest.raises(UsageError, match="no pipe can be there"):
        Pipe(tmp_path / "file" / "pipe")
    with pytest.raises(
        UsageError, match=r"cannot be written to|no pipe for timers can be made"
    ):  # root may, and cannot
        Pipe(Path("/proc/pipe"))
    assert (tmp_path / "file").read_text() == "precious"
