"""Monitoring of one idle process while parts of the system fail."""

import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from ripstop.diagnostics import hang_monitor, stack_dump
from ripstop.diagnostics.hang_monitor import HangMonitor, MonitoredWorkers
from ripstop.logs.directory import RoundLogs
from ripstop.model.config import Logs
from ripstop.model.events import CheckpointSaved, Event, FirstStep, StateRestored, StepsDone
from ripstop.model.failure import Failure
from ripstop.model.round import Address, Place
from ripstop.system import linux
from ripstop.workers.report_socket import CheckpointReport, CommitReport, RestoreReport, WorkerHeartbeat

PLACE = Place(1, 0, 1, 0, 1, 1, 0, 1, Address("127.0.0.1", 1), 0)
DEADLINE = 120.0
TIMEOUT = 0.4


@pytest.fixture
def idle() -> Iterator[int]:
    pid = os.posix_spawn("/bin/sleep", ["sleep", "1000"], {}, setsid=True)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@pytest.fixture(autouse=True)
def no_tool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack_dump, "py_spy", lambda: None)
    monkeypatch.setattr(hang_monitor, "RETRY_DELAY_S", 0.1)


Hung = asyncio.Future[tuple[Failure, ...]]


class Scene:
    """A monitor, the events that it records, and the hang that it finds."""

    def __init__(self, folder: Path, pid: int) -> None:
        self.recorded: list[Event] = []
        self.can_report = True
        self._folder, self._pid = folder, pid

    def play(self, script: Callable[[HangMonitor, Hung], Coroutine[Any, Any, None]], timeout: float = TIMEOUT) -> None:
        async def scenario() -> None:
            hung: Hung = asyncio.get_running_loop().create_future()
            logs = RoundLogs(self._folder, Logs(), PLACE, "default", terminal=False)
            workers = MonitoredWorkers(PLACE, "here", (self._pid,), logs)
            monitor = HangMonitor(
                workers,
                timeout,
                lambda event, level: self.recorded.append(event),
                lambda found, _: hung.set_result(found),
                lambda: self.can_report,
            )
            try:
                async with asyncio.timeout(DEADLINE):
                    await script(monitor, hung)
            finally:
                monitor.close()

        asyncio.run(scenario())


@pytest.fixture
def scene(tmp_path: Path, idle: int) -> Scene:
    return Scene(tmp_path, idle)


def fails_once(function: Callable[..., Any], error: Exception) -> Callable[..., Any]:
    left = [error]

    def call(*args: Any) -> Any:
        if left:
            raise left.pop()
        return function(*args)

    return call


def test_a_failed_sample_is_taken_again(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken = fails_once(linux.usage_of_sessions, OSError(24, "Too many open files"))
    monkeypatch.setattr(linux, "usage_of_sessions", broken)

    async def script(monitor: HangMonitor, hung: Hung) -> None:
        assert len(await hung) == 1

    with caplog.at_level(logging.ERROR):
        scene.play(script)
    assert ["Too many open files" in line for line in caplog.messages] == [True]


def test_stacks_are_written_after_the_log_directory_was_removed(tmp_path: Path, idle: int) -> None:
    async def script(monitor: HangMonitor, hung: Hung) -> None:
        await monitor.inspect()

    Scene(tmp_path / "removed" / "job7", idle).play(script)
    assert len(list(tmp_path.glob("removed/job7/*/hang/rank_*.txt"))) == 1


def test_a_failed_inspection_is_repeated(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        hang_monitor, "stack_location", fails_once(hang_monitor.stack_location, RuntimeError("can't start new thread"))
    )

    async def script(monitor: HangMonitor, hung: Hung) -> None:
        with pytest.raises(RuntimeError, match="new thread"):
            await monitor.inspect()
        assert len(await hung) == 1

    scene.play(script)


def test_a_paused_machine_is_no_hang_but_silence_afterwards_is(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hang_monitor, "MAX_TIMER_DELAY_S", TIMEOUT)

    async def script(monitor: HangMonitor, hung: Hung) -> None:
        monitor.on_report(0, WorkerHeartbeat(1, 1))
        time.sleep(3 * TIMEOUT)  # the agent and its workers are paused  # noqa: ASYNC251
        resumed = time.monotonic()
        await hung
        assert time.monotonic() - resumed >= TIMEOUT

    scene.play(script)


def test_workers_that_could_not_send_heartbeats_do_not_hang(scene: Scene) -> None:
    async def script(monitor: HangMonitor, hung: Hung) -> None:
        scene.can_report = False
        monitor.on_report(0, WorkerHeartbeat(1, 1))
        await asyncio.sleep(2.5 * TIMEOUT)
        assert not hung.done()
        scene.can_report = True
        (failure,) = await hung
        assert failure.hang and failure.hang.sign == "no heartbeat"

    scene.play(script)


def test_checkpoints_are_recorded_at_most_once_a_second_and_the_last_one_always(scene: Scene) -> None:
    async def script(monitor: HangMonitor, hung: Hung) -> None:
        for step in range(1000):
            monitor.on_report(0, CheckpointReport(step, "x"))

    scene.play(script, timeout=0.0)
    recorded = [event.step for event in scene.recorded if isinstance(event, CheckpointSaved)]
    assert recorded == [0, 999]


def test_commits_are_counted_and_only_the_first_restore_of_each_source_is_an_event(scene: Scene) -> None:
    async def script(monitor: HangMonitor, hung: Hung) -> None:
        for source in ("memory", "memory", "peer", "peer"):
            monitor.on_report(0, RestoreReport(source, 4, 0.5))
        for step in range(5, 1000):
            monitor.on_report(0, CommitReport(step, step - 4, 10, 0.25, 0.0))
        progress = monitor.worker_progress()[0]
        assert progress.commits is not None
        assert (progress.step, progress.commits.count, progress.commits.stall) == (999, 995, 0.25)

    scene.play(script, timeout=0.0)
    first, *last = [event for event in scene.recorded if not isinstance(event, StateRestored)]
    assert isinstance(first, FirstStep) and first.step == 5
    assert [(event.first, event.last) for event in last if isinstance(event, StepsDone)] == [(5, 999)]
    assert len(last) == 1
    restored = [event for event in scene.recorded if isinstance(event, StateRestored)]
    assert restored == [StateRestored(1, 0, "memory", 4, 0.5), StateRestored(1, 0, "peer", 4, 0.5)]
