"""Stacks of real workers, with py-spy and without."""

import asyncio
import json
import os
import signal
import time
from pathlib import Path

import pytest

from ripstop.agent.gpu_usage import GpuUsageReader
from ripstop.agent.log_followers import LogFollowers
from ripstop.agent.queries import QueriedNode, Workers, reply
from ripstop.diagnostics import stack_dump
from ripstop.diagnostics.hang_monitor import HangMonitor, Subject
from ripstop.diagnostics.stacks import MOST_FRAMES
from ripstop.logs.directory import RoundLogs
from ripstop.model.config import Logs, Script, StartMethod
from ripstop.model.errors import QueryFailed
from ripstop.model.events import Event, WorkerHangs
from ripstop.model.failure import Failure
from ripstop.model.round import Address, Place
from ripstop.system import linux
from ripstop.workers.processes import Children
from ripstop.workers.reports import WorkerHeartbeat
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


class Asleep:
    """Two workers of a real zygote that sleep in a function of theirs."""

    def __init__(self, stage, start: StartMethod = StartMethod.ZYGOTE) -> None:
        self.stage, self.start = stage, start
        self.logs = RoundLogs(stage.directory, Logs(), PLACE, "default", terminal=False)

    async def __aenter__(self) -> Workers:
        self.logs.prepare()
        entry = Script(str(self.stage.script(WORKER)))
        self.children = Children().open()
        self.spawner = Spawner(self.children, entry, self.stage.env, self.start, ())
        outs = [self.stage.directory / f"{rank}.out" for rank in range(2)]
        files = [(int(stack_dump.SIGNAL), self.logs.stack_file(rank)) for rank in range(2)]
        specs = [ProcessSpec(self.stage.env, entry, outs[rank], None, None, files[rank]) for rank in range(2)]
        self.pids = await self.spawner.spawn(specs)
        await asyncio.to_thread(wait_until, lambda: all("asleep" in out.read_text() for out in outs) or None)
        return Workers(PLACE, tuple(self.pids), self.logs, {})

    async def __aexit__(self, *_: object) -> None:
        for pid in self.pids:
            os.kill(pid, signal.SIGKILL)
            self.children.reap(pid)
        self.spawner.close()
        self.children.close()


def asked(stage, details: dict[str, object], start: StartMethod = StartMethod.ZYGOTE) -> list[dict[str, object]]:
    async def ask() -> list[dict[str, object]]:
        async with Asleep(stage, start) as workers:
            found = json.loads(
                await reply("stacks", json.dumps(details), QueriedNode(GpuUsageReader(), workers, LogFollowers()))
            )["ranks"]
            assert [one["pid"] for one in found] == [workers.pids[one["rank"] - 4] for one in found]
            return found

    return asyncio.run(ask())


def test_py_spy_tells_where_all_workers_are(stage) -> None:
    if not can_spy():
        pytest.skip("py-spy is not installed, or may not look")
    found = asked(stage, {})
    assert [(one["rank"], one["source"], one["state"]) for one in found] == [(4, "py-spy", "S"), (5, "py-spy", "S")]
    assert all("sleep_well" in one["stack"] and "nanosleep" in one["wchan"] for one in found)


def test_without_py_spy_a_forked_worker_tells_itself(stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack_dump, "py_spy", lambda: None)
    (found,) = asked(stage, {"rank": 5})
    assert (found["source"], "sleep_well" in found["stack"]) == ("faulthandler", True)


def test_without_either_the_kernel_knows_something_and_nobody_is_hurt(stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack_dump, "py_spy", lambda: None)
    found = asked(stage, {}, StartMethod.EXEC)
    assert {one["source"] for one in found} == {"kernel"}
    assert all(one["stack"].startswith("S (sleeping) in ") for one in found)


def test_a_tool_that_fails_gives_its_reason(stage, monkeypatch: pytest.MonkeyPatch) -> None:
    tool_that(stage, monkeypatch, "echo 'Permission denied: no ptrace' >&2; exit 1")

    async def look() -> stack_dump.ProcessStack:
        async with Asleep(stage) as workers:
            return await stack_dump.look(workers.pids[0])

    found = asyncio.run(look())
    assert (found.source, found.why) == ("kernel", "py-spy: Permission denied: no ptrace")


def tool_that(stage, monkeypatch: pytest.MonkeyPatch, does: str) -> None:
    tool = stage.script(f"#!/bin/sh\n{does}\n", "py-spy")
    tool.chmod(0o755)
    monkeypatch.setattr(stack_dump, "py_spy", lambda: str(tool))


def test_a_stack_larger_than_a_message_is_read_whole_and_cut_afterwards(stage, monkeypatch: pytest.MonkeyPatch) -> None:
    frame = {"name": "deep", "filename": f"/{'x' * 1000}.py", "line": 1}
    dump = stage.directory / "dump.json"
    dump.write_text(json.dumps([{"thread_name": "main", "os_thread_id": os.getpid(), "frames": [frame] * 1000}]))
    assert dump.stat().st_size > stack_dump.LARGEST
    tool_that(stage, monkeypatch, f"cat {dump}")
    found = asyncio.run(stack_dump.look(os.getpid()))
    assert (found.source, len(found.frames)) == ("py-spy", MOST_FRAMES)
    tool_that(stage, monkeypatch, "echo 'Thread 1 (idle)'")
    assert asyncio.run(stack_dump.look(os.getpid())).why == "py-spy printed something that is no stack"


def test_many_workers_whom_no_tool_reaches_are_looked_at_within_one_time(
    stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool_that(stage, monkeypatch, "exec sleep 1000")
    monkeypatch.setattr(stack_dump, "TOGETHER", 0.4)
    monkeypatch.setattr(stack_dump, "LAST", 0.2)
    began = time.monotonic()
    found = asyncio.run(stack_dump.look_at([(os.getpid(), None)] * 12))
    assert time.monotonic() - began < 2 * stack_dump.PATIENCE  # three turns take longer
    assert {(one.source, one.why, one.state != "") for one in found} == {
        ("kernel", "not within 0.4 s for all workers", True)
    }


def test_a_look_for_which_the_agent_has_no_means_says_so(stage, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuses(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread")

    tool_that(stage, monkeypatch, "true")
    monkeypatch.setattr(asyncio, "create_subprocess_exec", refuses)
    assert "can't start new thread" in asyncio.run(stack_dump.look(os.getpid())).why


def test_nobody_looks_at_the_pid_of_a_worker_that_has_ended(stage) -> None:
    logs = RoundLogs(stage.directory, Logs(), PLACE, "default", terminal=False)
    workers = Workers(PLACE, (os.getpid(), os.getpid()), logs, {}, ended=frozenset({0, 1}))
    (found, _) = json.loads(asyncio.run(reply("stacks", "{}", QueriedNode(GpuUsageReader(), workers, LogFollowers()))))[
        "ranks"
    ]
    assert (found["stack"], found["state"]) == ("? (gone)", "")


@pytest.mark.parametrize(
    ("details", "why"), [({"rank": 6}, "rank 6 is not on this node"), ({"rank": "x"}, "rank must be an integer")]
)
def test_a_rank_that_is_not_here_has_no_stack(stage, details: dict[str, object], why: str) -> None:
    logs = RoundLogs(stage.directory, Logs(), PLACE, "default", terminal=False)
    with pytest.raises(QueryFailed, match=why):
        asyncio.run(
            reply(
                "stacks",
                json.dumps(details),
                QueriedNode(GpuUsageReader(), Workers(PLACE, (1, 2), logs, {}), LogFollowers()),
            )
        )


def test_a_process_that_is_gone_is_said_to_be() -> None:
    pid = os.posix_spawn("/bin/true", ["true"], {})
    os.waitpid(pid, 0)
    assert asyncio.run(stack_dump.look(pid)).doing == "? (gone)"


def test_the_work_of_a_session_is_that_of_all_its_processes(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("spied", [True, False])
def test_who_sleeps_without_a_word_is_found_out_and_stacks_are_on_disk(
    stage, spied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not spied:
        monkeypatch.setattr(stack_dump, "py_spy", lambda: None)
    elif not can_spy():
        pytest.skip("py-spy is not installed, or may not look")
    recorded: list[Event] = []

    async def watch() -> tuple[Failure, ...]:
        async with Asleep(stage) as workers:
            hung: asyncio.Future[tuple[Failure, ...]] = asyncio.get_running_loop().create_future()
            subject = Subject(PLACE, "here", workers.pids, workers.logs)
            watch = HangMonitor(
                subject, 0.8, lambda event, level: recorded.append(event), lambda found, _: hung.set_result(found)
            )
            try:
                async with asyncio.timeout(30):
                    failures = await hung
                assert await watch.inspect() == failures  # one look a hang
                await watch.settle()
            finally:
                watch.close()
            return failures

    failures = asyncio.run(watch())
    assert [(f.rank, f.hang.call) for f in failures if f.hang] == [(4, "sleep_well"), (5, "sleep_well")]
    assert [event.rank for event in recorded if isinstance(event, WorkerHangs)] == [4, 5]
    text = (stage.directory / "round_1" / "hang" / "rank_4.txt").read_text()
    assert ("time_sleep" in text) if spied else ("no native stack: py-spy is not installed" in text)
    assert f"Python stacks ({'py-spy' if spied else 'faulthandler; '}" in text


def test_what_a_worker_says_of_its_pace_is_known_until_it_ends(stage) -> None:
    async def watch() -> None:
        logs = RoundLogs(stage.directory, Logs(), PLACE, "default", terminal=False)
        subject = Subject(PLACE, "here", (1, 2), logs)
        watch = HangMonitor(subject, 0.0, lambda event, level: None, lambda found, seconds: None)
        assert watch.paces() == {}
        watch.report(1, WorkerHeartbeat(7, 3))
        assert [(rank, pace.step, pace.beats) for rank, pace in watch.paces().items()] == [(1, 7, 3)]
        watch.gone(1)
        assert watch.paces() == {}
        watch.close()

    asyncio.run(watch())
