"""Progress reports of workers, over a real socket."""

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from ripstop.workers.report_socket import (
    MAX_BURST,
    MAX_SOCKET_PATH_BYTES,
    CheckpointReport,
    CommitReport,
    ReportSocket,
    RestoreReport,
    WorkerHeartbeat,
    WorkerReport,
    parse_report_datagram,
)
from ripstop.workers.state_memory import PATH_SUFFIX

DEADLINE = 120.0


def received(folder: Path, count: int, send: Callable[[str], None]) -> list[tuple[int, WorkerReport]]:
    """The reports that arrive while `send` runs, at least `count`."""

    async def listen() -> list[tuple[int, WorkerReport]]:
        found: list[tuple[int, WorkerReport]] = []
        enough = asyncio.Event()

        def on_report(pid: int, report: WorkerReport) -> None:
            found.append((pid, report))
            if len(found) >= count:
                enough.set()

        reports = ReportSocket({"TMPDIR": str(folder)}, on_report)
        try:
            await asyncio.get_running_loop().run_in_executor(None, send, reports.path)
            async with asyncio.timeout(DEADLINE):
                await enough.wait()
            for _ in range(20):  # turns of the loop: it reads the rest of what has arrived
                await asyncio.sleep(0)
        finally:
            reports.close()
        paths.append(reports.path)
        return found

    paths: list[str] = []
    found = asyncio.run(listen())
    assert not Path(paths[0]).exists()
    return found


def worker(code: str, path: str) -> int:
    """Run a script as a worker; return its pid."""
    process = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "RIPSTOP_SOCKET": path})
    assert process.wait(DEADLINE) == 0
    return process.pid


def test_a_heartbeat_arrives_with_the_senders_pid_and_without_torch(tmp_path: Path) -> None:
    pids: list[int] = []
    code = "import sys; from ripstop import train; train.heartbeat(7); assert 'torch' not in sys.modules"
    assert received(tmp_path, 1, lambda path: pids.append(worker(code, path))) == [(pids[0], WorkerHeartbeat(7, 1))]


def test_a_thousand_heartbeats_are_a_few_datagrams_and_the_last_step_is_sent(tmp_path: Path) -> None:
    code = "from ripstop import train\nfor n in range(1000): train.heartbeat(n)\ntrain.checkpoint_saved(999, 'x')"
    found = [report for _, report in received(tmp_path, 3, lambda path: worker(code, path) and None)]
    assert found[0] == WorkerHeartbeat(0, 1)
    assert found[-2:] == [CheckpointReport(999, "x"), WorkerHeartbeat(999, 1000)]
    assert len(found) < 20


def test_a_forked_child_reports_under_its_own_pid(tmp_path: Path) -> None:
    code = (
        "import os; from ripstop import train; train.heartbeat(1)\n"
        "if (child := os.fork()) == 0: train.heartbeat(2); os._exit(0)\n"
        "os.waitpid(child, 0)"
    )
    (first, one), (second, two) = received(tmp_path, 2, lambda path: worker(code, path) and None)
    assert (one, two) == (WorkerHeartbeat(1, 1), WorkerHeartbeat(2, 2))
    assert first != second


@pytest.mark.parametrize("path", ["", "/nonexistent/socket"])
def test_without_an_agent_nothing_happens(path: str) -> None:
    worker("from ripstop import train; train.heartbeat(); train.checkpoint_saved(3)", path)


def test_a_worker_never_waits_for_an_agent_that_does_not_read(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as unread:
        unread.bind(str(tmp_path / "unread"))
        worker("from ripstop import train\nfor n in range(2_000): train.checkpoint_saved(n)", str(tmp_path / "unread"))


def reports_after_a_full_queue(tmp_path: Path, code: str, count: int) -> list[WorkerReport | None]:
    """Run `code`, which fills the queue, prints a line and reads one; return what it sends to the emptied queue."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as slow:
        slow.bind(str(tmp_path / "slow"))
        env = {**os.environ, "RIPSTOP_SOCKET": str(tmp_path / "slow")}
        pipe = subprocess.PIPE
        with subprocess.Popen([sys.executable, "-c", code], env=env, stdin=pipe, stdout=pipe) as process:
            assert process.stdin and process.stdout
            process.stdout.readline()  # it did not wait
            slow.setblocking(False)
            with suppress(BlockingIOError):
                while True:
                    slow.recv(4096)
            process.stdin.write(b"\n")
            process.stdin.close()
            assert process.wait(DEADLINE) == 0
        return [parse_report_datagram(slow.recv(4096)) for _ in range(count)]


def test_the_latest_checkpoint_is_sent_when_the_queue_has_space_again(tmp_path: Path) -> None:
    code = (
        "from ripstop import train\n"
        "for n in range(1000): train.checkpoint_saved(n)\n"
        "print(flush=True); input(); train.heartbeat(1)"
    )
    assert reports_after_a_full_queue(tmp_path, code, 2) == [CheckpointReport(999, ""), WorkerHeartbeat(1, 1)]


def test_a_removed_socket_is_created_again_and_reported_as_unusable_until_then(short_tmp_path: Path) -> None:
    def lose(path: str) -> None:
        Path(path).unlink()
        Path(path).parent.rmdir()

    async def scenario() -> tuple[list[bool], WorkerReport]:
        report_received: asyncio.Future[WorkerReport] = asyncio.get_running_loop().create_future()
        reports = ReportSocket({"TMPDIR": str(short_tmp_path)}, lambda pid, report: report_received.set_result(report))
        try:
            before = reports.ensure_socket()
            lose(reports.path)
            found = [before, reports.ensure_socket(), reports.ensure_socket()]
            code = "from ripstop import train; train.heartbeat(3)"
            await asyncio.get_running_loop().run_in_executor(None, worker, code, reports.path)
            async with asyncio.timeout(DEADLINE):
                return found, await report_received
        finally:
            reports.close()

    assert asyncio.run(scenario()) == ([True, False, True], WorkerHeartbeat(3, 1))
    assert list(short_tmp_path.iterdir()) == []


def test_a_removed_socket_that_cannot_be_created_again_stays_unusable(
    short_tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = short_tmp_path / "run"
    folder.mkdir()

    async def scenario() -> list[bool]:
        reports = ReportSocket({"XDG_RUNTIME_DIR": str(folder)}, lambda pid, report: None)
        try:
            shutil.rmtree(folder)
            return [reports.ensure_socket(), reports.ensure_socket()]
        finally:
            reports.close()

    assert asyncio.run(scenario()) == [False, False]
    assert len(caplog.messages) == 1


def test_the_next_agent_removes_only_the_sockets_of_killed_agents(short_tmp_path: Path) -> None:
    code = (
        "import asyncio, os, sys; from ripstop.workers.report_socket import ReportSocket\n"
        "async def main():\n"
        "    print(ReportSocket(os.environ, print).path, flush=True)\n"
        "    sys.stdin.read()\n"
        "asyncio.run(main())"
    )

    def agent() -> subprocess.Popen[str]:
        env = {**os.environ, "TMPDIR": str(short_tmp_path), "XDG_RUNTIME_DIR": ""}
        return subprocess.Popen(
            [sys.executable, "-c", code], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def path(agent: subprocess.Popen[str]) -> Path:
        assert agent.stdout is not None
        return Path(agent.stdout.readline().strip())

    async def next_one() -> None:
        ReportSocket({"TMPDIR": str(short_tmp_path)}, lambda pid, report: None).close()

    with agent() as killed, agent() as alive:
        dead, other = path(killed), path(alive)
        killed.kill()
        killed.wait()
        pid, _, end = dead.name.split("-")
        elsewhere = dead.with_name(f"{pid}-01234567-{end}")  # another machine's
        os.link(dead, elsewhere)
        unseen = dead.with_name(dead.name + "0")  # a socket with a process that is not visible here
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
            listening.bind(str(unseen))
            asyncio.run(next_one())
        assert sorted(dead.parent.iterdir()) == sorted([elsewhere, other, unseen])
        alive.kill()


def test_a_flood_is_read_in_bursts(tmp_path: Path) -> None:
    def flood(path: str) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            for number in range(3 * MAX_BURST):
                sender.sendto(json.dumps({"beat": number, "step": None}).encode(), path)  # waits while it is full

    found = received(tmp_path, 3 * MAX_BURST, flood)
    assert [report for _, report in found] == [WorkerHeartbeat(None, number) for number in range(3 * MAX_BURST)]


@pytest.mark.parametrize(
    "data",
    [
        b"", b"x", b"[]", b"{}", b'{"beat": 1}', b'{"beat": -1, "step": 1}', b'{"beat": true, "step": 1}',
        b'{"beat": 1, "step": 1.5}', b'{"beat": 1, "step": 99999999999999999999}', b'{"saved": 1}',
        b'{"saved": 1, "path": 2}', b"\xff", b"[" * 4000, b'{"saved": 1, "path": "' + b"x" * 5000 + b'"}',
    ],
)  # fmt: skip
def test_an_invalid_datagram_is_no_report(data: bytes) -> None:
    assert parse_report_datagram(data) is None


@pytest.mark.parametrize("length", range(60, 108, 3))
def test_the_sockets_beside_it_can_be_bound_however_long_the_temporary_directory_is(
    short_tmp_path: Path, length: int
) -> None:
    folder = short_tmp_path / ("x" * (length - len(str(short_tmp_path)) - 1))
    folder.mkdir()

    async def paths() -> list[str]:
        reports = ReportSocket({"TMPDIR": str(folder)}, lambda pid, report: None)
        try:
            return [reports.path + PATH_SUFFIX, *reports.renew_recorder_sockets(1_000_000, 99)[-1:]]
        finally:
            reports.close()

    assert max(len(path) for path in asyncio.run(paths())) <= MAX_SOCKET_PATH_BYTES


def test_a_path_too_long_for_a_socket_is_not_used(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    found = received(long, 1, lambda path: worker("from ripstop import train; train.heartbeat()", path) and None)
    assert [report for _, report in found] == [WorkerHeartbeat(None, 1)]


def test_a_thousand_commits_are_a_few_datagrams_and_the_last_totals_are_sent(tmp_path: Path) -> None:
    code = (
        "from ripstop.train import reports\n"
        "reports.state_restored('memory', 4, 0.5)\n"
        "for n in range(5, 1005): reports.state_committed('a', 10, 0.25); reports.commit_called(n)\n"
        "reports.state_committed('b', 7, 0.0); reports.commit_called(1005)"
    )
    found = [report for _, report in received(tmp_path, 3, lambda path: worker(code, path) and None)]
    assert found[0] == RestoreReport("memory", 4, 0.5)
    first, *_, last = found[1:]
    assert isinstance(first, CommitReport) and isinstance(last, CommitReport)
    assert (first.step, first.commits, first.size, first.stall) == (5, 1, 10, 0.25)
    assert (last.step, last.commits, last.size, last.stall) == (1005, 1001, 17, 250.0)
    assert len(found) < 20


def test_a_restore_is_reported_when_the_queue_has_space_again(tmp_path: Path) -> None:
    code = (
        "from ripstop.train import reports\n"
        "for n in range(1000): reports.checkpoint_saved(n)\n"
        "reports.state_restored('disk', 1, 1.0)\n"
        "for n in range(1000): reports.commit_called(n)\n"
        "print(flush=True); input()"
    )
    found = reports_after_a_full_queue(tmp_path, code, 3)
    assert found[:2] == [CheckpointReport(999, ""), RestoreReport("disk", 1, 1.0)]
    assert isinstance(found[2], CommitReport) and found[2].step == 999


@pytest.mark.parametrize(
    "bad",
    [
        {"restored": "the moon", "step": 1, "seconds": 1.0},
        {"restored": "memory", "step": -1, "seconds": 1.0},
        {"restored": "memory", "step": 1, "seconds": float("nan")},
        {"restored": "memory", "step": 1, "seconds": -1.0},
        {"commits": 1, "step": 1, "bytes": -1, "stall": 0.0, "age": 0.0},
        {"commits": True, "step": 1, "bytes": 1, "stall": 0.0, "age": 0.0},
        {"commits": 1, "step": 2**62, "bytes": 1, "stall": 0.0, "age": 0.0},
        {"commits": 1, "step": 1, "bytes": 1, "stall": float("inf"), "age": 0.0},
        {"commits": 1, "step": 1, "bytes": 1, "stall": 0.0},
    ],
)
def test_an_invalid_report_of_state_is_ignored(bad: dict[str, object]) -> None:
    assert parse_report_datagram(json.dumps(bad).encode()) is None
