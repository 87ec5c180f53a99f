"""Stacks of real workers, with py-spy and without."""

import asyncio
import json
import os
import signal
import time
from pathlib import Path

import pytest

from ripstop.agent.query_handler import QueriedWorkers, QueryHandler
from ripstop.diagnostics import hang_monitor, stack_dump
from ripstop.diagnostics.hang_monitor import HangMonitor, MonitoredWorkers
from ripstop.diagnostics.stack_parser import MAX_FRAMES
from ripstop.logs.directory import RoundLogs
from ripstop.model.config import Logs, Script, StartMethod
from ripstop.model.errors import QueryFailed
from ripstop.model.events import Event, WorkerHangs
from ripstop.model.failure import Failure
from ripstop.model.round import Address, Place
from ripstop.system import linux
from ripstop.workers.processes import Children
from ripstop.workers.report_socket import WorkerHeartbeat
from ripstop.workers.spawner import ProcessSpec, Spawner
from tests.e2e.harness import spied as can_spy
from tests.e2e.harness import wait_until

WORKER = """
import time
def sleep_well():
    print("asleep", flush=True)
    time.sleep(1000)
sleep_well()
"""
PLACE = Place(1, 0, 1, 4, 6, 2, 0, 2, Address("127.0.0.1", 1), 0)


def is_asleep(pid: int) -> bool:
    process = linux.read_linux_process(pid)
    return process is not None and process.state == "S"


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """py-spy may take long."""
    for name in ("DUMP_TIMEOUT_S", "ALL_DUMPS_TIMEOUT_S", "NATIVE_TIMEOUT_S"):
        monkeypatch.setattr(stack_dump, name, 30.0)
    monkeypatch.setattr(hang_monitor, "INSPECTION_TIMEOUT_S", 30.0)


class Asleep:
    """Two workers of a real zygote that sleep in a function."""

    def __init__(self, stage, start: StartMethod = StartMethod.ZYGOTE) -> None:
        self.stage, self.start = stage, start
        self.logs = RoundLogs(stage.directory, Logs(), PLACE, "default", terminal=False)

    async def __aenter__(self) -> QueriedWorkers:
        self.logs.prepare()
        entry = Script(str(self.stage.script(WORKER)))
        self.children = Children().open()
        self.spawner = Spawner(self.children, entry, self.stage.env, self.start, ())
        outs = [self.stage.directory / f"{rank}.out" for rank in range(2)]
        files = [(int(stack_dump.DUMP_SIGNAL), self.logs.stack_file(rank)) for rank in range(2)]
        births = [ProcessSpec(self.stage.env, entry, outs[rank], None, None, files[rank]) for rank in range(2)]
        self.pids = await self.spawner.spawn(births)
        await asyncio.to_thread(wait_until, lambda: all("asleep" in out.read_text() for out in outs) or None)
        await asyncio.to_thread(wait_until, lambda: all(map(is_asleep, self.pids)) or None)
        return QueriedWorkers(PLACE, tuple(self.pids), self.logs, {})

    async def __aexit__(self, *_: object) -> None:
        for pid in self.pids:
            os.kill(pid, signal.SIGKILL)
            self.children.reap(pid)
        self.spawner.close()
        self.children.close()


def asked(stage, details: dict[str, object], start: StartMethod = StartMethod.ZYGOTE) -> list[dict[str, object]]:
    async def query() -> list[dict[str, object]]:
        async with Asleep(stage, start) as workers:
            reply = await QueryHandler(lambda: workers).reply("stacks", json.dumps(details))
            found = json.loads(reply)["ranks"]
            assert [one["pid"] for one in found] == [workers.pids[one["rank"] - 4] for one in found]
            return found

    return asyncio.run(query())


@pytest.mark.usefixtures("patient")
def test_py_spy_shows_the_stacks_of_all_workers(stage) -> None:
    if not can_spy():
        pytest.skip("py-spy is not installed, or is forbidden")
    found = asked(stage, {})
    assert [(one["rank"], one["source"], one["state"]) for one in found] == [(4, "py-spy", "S"), (5, "py-spy", "S")]
    assert all("sleep_well" in one["stack"] and "nanosleep" in one["wchan"] for one in found)


@pytest.mark.usefixtures("patient")
def test_without_py_spy_a_forked_worker_dumps_its_own_stack(stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack_dump, "py_spy", lambda: None)
    (found,) = asked(stage, {"rank": 5})
    assert (found["source"], "sleep_well" in found["stack"]) == ("faulthandler", True)


def test_without_both_the_kernel_state_is_used_and_no_worker_is_harmed(stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack_dump, "py_spy", lambda: None)
    found = asked(stage, {}, StartMethod.EXEC)
    assert {one["source"] for one in found} == {"kernel"}
    assert all(one["stack"].startswith("S (sleeping) in ") for one in found)


def test_if_py_spy_fails_its_error_is_reported(stage, monkeypatch: pytest.MonkeyPatch) -> None:
    tool_that(stage, monkeypatch, "echo 'Permission denied: no ptrace' >&2; exit 1")

    async def dump() -> stack_dump.StackDump:
        async with Asleep(stage) as workers:
            return await stack_dump.dump_stack(workers.pids[0])

    found = asyncio.run(dump())
    assert (found.source, found.why) == ("kernel", "py-spy: Permission denied: no ptrace")


def tool_that(stage, monkeypatch: pytest.MonkeyPatch, does: str) -> None:
    tool = stage.script(f"#!/bin/sh\n{does}\n", "py-spy")
    tool.chmod(0o755)
    monkeypatch.setattr(stack_dump, "py_spy", lambda: str(tool))


def test_a_large_stack_is_read_completely_and_truncated_afterwards(stage, monkeypatch: pytest.MonkeyPatch) -> None:
    frame = {"name": "deep", "filename": f"/{'x' * 1000}.py", "line": 1}
    dump = stage.directory / "dump.json"
    dump.write_text(json.dumps([{"thread_name": "main", "os_thread_id": os.getpid(), "frames": [frame] * 1000}]))
    assert dump.stat().st_size > stack_dump.MAX_DUMP_BYTES
    tool_that(stage, monkeypatch, f"cat {dump}")
    found = asyncio.run(stack_dump.dump_stack(os.getpid()))
    assert (found.source, len(found.frames)) == ("py-spy", MAX_FRAMES)
    tool_that(stage, monkeypatch, "echo 'Thread 1 (idle)'")
    assert asyncio.run(stack_dump.dump_stack(os.getpid())).why == "the output of py-spy cannot be parsed"


def test_all_workers_share_one_time_limit(stage, monkeypatch: pytest.MonkeyPatch) -> None:
    tool_that(stage, monkeypatch, "exec sleep 1000")
    monkeypatch.setattr(stack_dump, "DUMP_TIMEOUT_S", 60.0)
    monkeypatch.setattr(stack_dump, "ALL_DUMPS_TIMEOUT_S", 0.4)
    monkeypatch.setattr(stack_dump, "FAULTHANDLER_RESERVE_S", 0.2)
    began = time.monotonic()
    found = asyncio.run(stack_dump.dump_stacks([(os.getpid(), None)] * 12))
    assert time.monotonic() - began < stack_dump.DUMP_TIMEOUT_S
    assert {(one.source, one.why, one.state != "") for one in found} == {
        ("kernel", "not within 0.4 s for all workers", True)
    }


def test_a_dump_without_a_free_thread_has_a_reason(stage, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuses(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread")

    tool_that(stage, monkeypatch, "true")
    monkeypatch.setattr(asyncio, "create_subprocess_exec", refuses)
    assert "can't start new thread" in asyncio.run(stack_dump.dump_stack(os.getpid())).why


def test_the_pid_of_a_worker_that_has_ended_is_not_dumped(stage) -> None:
    logs = RoundLogs(stage.directory, Logs(), PLACE, "default", terminal=False)
    workers = QueriedWorkers(PLACE, (os.getpid(), os.getpid()), logs, {}, ended=frozenset({0, 1}))
    (found, _) = json.loads(asyncio.run(QueryHandler(lambda: workers).reply("stacks", "{}")))["ranks"]
    assert (found["stack"], found["state"]) == ("? (ended)", "")


@pytest.mark.parametrize(
    ("details", "why"), [({"rank": 6}, "rank 6 is not on this node"), ({"rank": "x"}, "rank must be an integer")]
)
def test_a_rank_of_another_node_has_no_stack(stage, details: dict[str, object], why: str) -> None:
    logs = RoundLogs(stage.directory, Logs(), PLACE, "default", terminal=False)
    workers = QueriedWorkers(PLACE, (1, 2), logs, {})
    with pytest.raises(QueryFailed, match=why):
        asyncio.run(QueryHandler(lambda: workers).reply("stacks", json.dumps(details)))


def test_a_process_that_has_ended_is_reported_as_such() -> None:
    pid = os.posix_spawn("/bin/true", ["true"], {})
    os.waitpid(pid, 0)
    assert asyncio.run(stack_dump.dump_stack(pid)).doing == "? (ended)"


def test_the_usage_of_a_session_includes_all_its_processes(tmp_path: Path) -> None:
    code = "head -c 1000 /dev/zero > $0; (while :; do :; done) & wait"
    pid = os.posix_spawn("/bin/sh", ["sh", "-c", code, str(tmp_path / "out")], {}, setsid=True)
    try:
        while not (used := linux.usage_of_sessions({pid}).get(pid)) or used.cpu < 0.05 or not used.written:
            os.sched_yield()
        assert linux.usage_of_sessions({pid + 1_000_000}) == {}
    finally:
        os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


# a watch over them ----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("spied", [True, False])
def test_a_sleeping_worker_is_detected_and_its_stacks_are_on_disk(
    stage, spied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not spied:
        monkeypatch.setattr(stack_dump, "py_spy", lambda: None)
    elif not can_spy():
        pytest.skip("py-spy is not installed, or is forbidden")
    recorded: list[Event] = []

    async def watch() -> tuple[Failure, ...]:
        async with Asleep(stage) as workers:
            hung: asyncio.Future[tuple[Failure, ...]] = asyncio.get_running_loop().create_future()
            subject = MonitoredWorkers(PLACE, "here", workers.pids, workers.logs)
            watch = HangMonitor(
                subject, 0.8, lambda event, level: recorded.append(event), lambda found, _: hung.set_result(found)
            )
            try:
                async with asyncio.timeout(120):
                    failures = await hung
                assert await watch.inspect() == failures  # one inspection for each hang
                await watch.finish_inspection()
            finally:
                watch.close()
            return failures

    failures = asyncio.run(watch())
    assert [(f.rank, f.hang.call) for f in failures if f.hang] == [(4, "sleep_well"), (5, "sleep_well")]
    assert [event.rank for event in recorded if isinstance(event, WorkerHangs)] == [4, 5]
    text = (stage.directory / "round_1" / "hang" / "rank_4.txt").read_text()
    assert ("(libc" in text) if spied else ("no native stack: py-spy is not installed" in text)
    assert f"Python stacks ({'py-spy' if spied else 'faulthandler; '}" in text


def test_the_progress_of_a_worker_is_known_until_it_ends(stage) -> None:
    async def watch() -> None:
        logs = RoundLogs(stage.directory, Logs(), PLACE, "default", terminal=False)
        subject = MonitoredWorkers(PLACE, "here", (1, 2), logs)
        watch = HangMonitor(subject, 0.0, lambda event, level: None, lambda found, seconds: None)
        assert watch.worker_progress() == {}
        watch.on_report(1, WorkerHeartbeat(7, 3))
        assert [(rank, pace.step, pace.beats) for rank, pace in watch.worker_progress().items()] == [(1, 7, 3)]
        watch.on_worker_ended(1)
        assert watch.worker_progress() == {}
        watch.close()

    asyncio.run(watch())
