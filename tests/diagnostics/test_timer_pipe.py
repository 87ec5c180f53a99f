"""The agent's watchdog: an expired timer is reported once; a timer that is cleared in time is not."""

import asyncio
import json
import os
import re
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from ripstop.diagnostics import timer_pipe
from ripstop.diagnostics.timer_pipe import (
    ExpiredTimer,
    Pipe,
    TimerPipeWatchdog,
    is_pipe_in_use,
    timer_pipe_watchdog_reason,
)
from ripstop.model.errors import UsageError

DEADLINE_S = 120.0

Events = asyncio.Queue[tuple[int, str, int]]


def watched(path: Path, play: Callable[[Events], Awaitable[None]]) -> None:
    async def main() -> None:
        reported: Events = asyncio.Queue()
        watchdog = TimerPipeWatchdog(path, lambda *missed: reported.put_nowait(missed))
        try:
            async with asyncio.timeout(DEADLINE_S):
                await play(reported)
        finally:
            watchdog.close()

    asyncio.run(main())
    assert not path.exists()


def ask(path: Path, scope: str, after: float, *, pid: int = 77, signum: int = 9) -> None:
    """A negative time clears."""
    expires = time.time() + after if after >= 0 else -1
    line = json.dumps({"pid": pid, "scope_id": scope, "expiration_time": expires, "signal": signum})
    write(path, f"{line}\n".encode())


def write(path: Path, data: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    os.write(fd, data)
    os.close(fd)


def test_an_expired_timer_is_reported_once_with_its_scope_and_signal(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"

    async def play(reported: Events) -> None:
        ask(pipe, "slow", 60)
        ask(pipe, "load data", 0.05)
        pid, why, signum = await reported.get()
        assert (pid, signum) == (77, 9)
        assert re.fullmatch(r"timer expired: 'load data' \(0\.\d s\); ripstop sent SIGKILL", why)
        ask(pipe, "next", 0.0, pid=78, signum=0)
        assert (await reported.get())[2] == 0
        assert reported.empty(), "the timers of 77 are discarded with the report"

    watched(pipe, play)


def test_a_timer_that_is_cleared_before_the_agent_reads_the_pipe_does_not_expire(tmp_path: Path) -> None:
    """An agent that was delayed finds an old deadline, and after it in the pipe the request that clears it."""
    pipe = tmp_path / "pipe"

    async def play(reported: Events) -> None:
        ask(pipe, "kept", 0.5)
        await asyncio.sleep(0)  # the agent has read it
        await asyncio.sleep(0)
        time.sleep(0.6)  # noqa: ASYNC251 - the loop stands still
        ask(pipe, "kept", -1)
        ask(pipe, "missed", 0.0, pid=78)
        assert (await reported.get())[0] == 78
        assert reported.empty()

    watched(pipe, play)


def test_timers_of_an_earlier_round_are_discarded(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"

    async def main() -> None:
        reported: Events = asyncio.Queue()
        watchdog = TimerPipeWatchdog(pipe, lambda *missed: reported.put_nowait(missed))
        ask(pipe, "old", 0.0)
        watchdog.new_round()
        ask(pipe, "new", 0.0, pid=78)
        assert (await asyncio.wait_for(reported.get(), DEADLINE_S))[0] == 78
        assert reported.empty()
        watchdog.close()

    asyncio.run(main())


def test_invalid_lines_are_logged_once_and_hide_no_request(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pipe = tmp_path / "pipe"

    async def play(reported: Events) -> None:
        write(pipe, b'rubbish\n{"pid": 1}\n\n')
        for _ in range(3):  # a line longer than any, in pieces
            write(pipe, b"x" * 60_000)
            await asyncio.sleep(0.01)
        write(pipe, b"\n")
        ask(pipe, "real", 0.0)
        assert "'real'" in (await reported.get())[1]

    watched(pipe, play)
    assert caplog.text.count("ignoring a line") == 1


def test_timers_above_the_limit_are_rejected_and_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timer_pipe, "MAX_TIMERS", 2)
    pipe = tmp_path / "pipe"

    async def play(reported: Events) -> None:
        for scope in ("a", "b", "c", "d"):
            ask(pipe, scope, 60)
        ask(pipe, "b", 0.0)  # an existing timer may be set again
        assert "'b'" in (await reported.get())[1]

    watched(pipe, play)
    assert caplog.text.count("additional timers have no effect") == 1


def test_the_first_signal_that_an_expired_timer_requests_is_sent() -> None:
    assert (
        timer_pipe_watchdog_reason([ExpiredTimer("a", 1, 0), ExpiredTimer("b", 2, 15), ExpiredTimer("c", 3, 9)])[1]
        == 15
    )
    why, signum = timer_pipe_watchdog_reason([ExpiredTimer(f"s{n}\x1b[31m", n, 0) for n in range(9)])
    assert signum == 0 and "no signal was requested" in why
    assert "and 4 more" in why and "\x1b" not in why


def test_the_pipe_is_private_and_a_stale_one_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path, 0o666)
    pipe = Pipe(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert is_pipe_in_use(path)
    with pytest.raises(UsageError, match="another agent uses this pipe; choose another path"):
        Pipe(path)
    pipe.close()


def test_a_file_that_is_not_a_pipe_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    with pytest.raises(UsageError, match="exists and is not a pipe"):
        Pipe(tmp_path / "file")
    with pytest.raises(UsageError, match="is not a directory; create it"):
        Pipe(tmp_path / "nowhere" / "pipe")
    with pytest.raises(UsageError, match="a pipe cannot be created there"):
        Pipe(tmp_path / "file" / "pipe")
    with pytest.raises(
        UsageError, match=r"is not writable|cannot be created"
    ):  # root may write there, but not create a pipe
        Pipe(Path("/proc/pipe"))
    assert (tmp_path / "file").read_text() == "precious"
