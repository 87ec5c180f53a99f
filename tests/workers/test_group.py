"""A group of workers ends completely: no survivor, no orphan, no zombie."""

import asyncio
import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from ripstop.model.config import Script, StartMethod
from ripstop.model.errors import UnkillableError
from ripstop.system import linux
from ripstop.workers import group
from ripstop.workers.group import Exit, Group
from ripstop.workers.processes import Children
from ripstop.workers.spawner import ProcessSpec, Spawner

DEADLINE = 120.0

# For a worker that reports that it runs.
PREAMBLE = """
import os, signal, subprocess, sys, time
def up(*words):
    with open(os.environ["UP"] + os.environ["RANK"], "w") as file:
        file.write(" ".join(map(str, words)) + "\\n")
"""
LEAVE_A_DAEMON = """
def daemon(ignore=False):
    "A grandchild in its own session, whose parent has exited."
    read, write = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            if ignore:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            os.write(write, str(os.getpid()).encode())
            os.closerange(0, 100)
            time.sleep(600)
        os._exit(0)
    os.wait()
    return int(os.read(read, 20))
"""


class Scene:
    """A group, the reports of its workers, and their exits."""

    def __init__(self, stage, text: str, workers: int, start: StartMethod = StartMethod.ZYGOTE) -> None:
        self.directory: Path = stage.directory
        self.entry = Script(str(stage.script(PREAMBLE + LEAVE_A_DAEMON + text)))
        self.exits: list[Exit] = []
        self.ended: asyncio.Queue[Exit] = asyncio.Queue()
        env = {**stage.env, "UP": str(stage.directory / "up")}
        self.specs = [
            ProcessSpec(
                {**env, "RANK": str(rank)}, self.entry, self.directory / f"{rank}.out", self.directory / f"{rank}.err"
            )
            for rank in range(workers)
        ]
        self.children = Children().open()
        self.spawner = Spawner(self.children, self.entry, env, start, ())
        self.group = Group(self.children, self.spawner, self.specs, self._on_exit)

    def _on_exit(self, end: Exit) -> None:
        self.exits.append(end)
        self.ended.put_nowait(end)

    async def report(self, rank: int) -> list[str]:
        """What the worker has passed to `up`."""
        file = self.directory / f"up{rank}"
        end = time.monotonic() + DEADLINE
        while not (file.exists() and file.read_text().endswith("\n")):
            assert time.monotonic() < end, (self.directory / f"{rank}.err").read_text()
            await asyncio.sleep(0.005)
        return file.read_text().split()


def run_scenario(stage, text: str, scenario: Callable[[Scene], Awaitable[None]], workers: int = 1) -> None:
    async def run() -> None:
        scene = Scene(stage, text, workers)
        try:
            async with asyncio.timeout(DEADLINE):
                await scene.group.start()
                await scenario(scene)
        finally:
            await scene.group.stop(0)
            scene.spawner.close()
            scene.children.close()

    asyncio.run(run())


def exists(pid: int | str) -> bool:
    return Path(f"/proc/{pid}").exists()


def test_every_exit_is_reported(stage):
    async def scenario(scene: Scene) -> None:
        for _ in range(3):
            await scene.ended.get()
        assert [(e.local_rank, e.exitcode, e.signal) for e in sorted(scene.exits, key=lambda e: e.local_rank)] == [
            (0, 0, None),
            (1, 7, None),
            (2, None, signal.SIGKILL),
        ]
        assert [e.pid for e in sorted(scene.exits, key=lambda e: e.local_rank)] == list(scene.group.pids)
        assert all(abs(e.at - time.time()) < DEADLINE for e in scene.exits)

    text = "r = int(os.environ['RANK'])\nif r == 2: os.kill(os.getpid(), 9)\nsys.exit(r * 7)"
    run_scenario(stage, text, scenario, workers=3)


def test_stop_sends_the_given_signal_to_live_workers(stage):
    async def scenario(scene: Scene) -> None:
        for rank in range(2):
            await scene.report(rank)
        await scene.group.stop(DEADLINE, signal.SIGHUP)
        assert [e.signal for e in scene.exits] == [signal.SIGHUP] * 2
        assert not any(map(exists, scene.group.pids))

    run_scenario(stage, "up(); time.sleep(600)", scenario, workers=2)


def test_some_workers_are_replaced_and_the_others_go_on(stage):
    async def scenario(scene: Scene) -> None:
        child = (await scene.report(1))[0]
        await scene.report(0)
        first, second = scene.group.pids
        (scene.directory / "up1").unlink()
        await scene.group.replace({1: scene.specs[1]}, 0.1)
        assert scene.group.pids[0] == first
        assert scene.group.live == {0: first, 1: scene.group.pids[1]}
        assert not exists(second)
        assert not exists(child)
        assert scene.exits == []  # nobody needs to know that the old one has ended
        await scene.report(1)
        os.kill(scene.group.pids[1], signal.SIGKILL)
        assert (await scene.ended.get()).local_rank == 1

    text = "signal.signal(signal.SIGTERM, signal.SIG_IGN); up(subprocess.Popen(['sleep', '600']).pid); time.sleep(600)"
    run_scenario(stage, text, scenario, workers=2)


def test_a_worker_can_exit_by_itself_within_the_grace(stage):
    async def scenario(scene: Scene) -> None:
        await scene.report(0)
        await scene.group.stop(DEADLINE)
        assert [e.exitcode for e in scene.exits] == [3]

    run_scenario(stage, "signal.signal(signal.SIGTERM, lambda *_: sys.exit(3)); up(); time.sleep(600)", scenario)


def test_a_worker_that_ignores_the_signal_is_killed_after_the_grace(stage):
    async def scenario(scene: Scene) -> None:
        await scene.report(0)
        await scene.group.stop(0.1)
        assert [e.signal for e in scene.exits] == [signal.SIGKILL]

    run_scenario(stage, "signal.signal(signal.SIGTERM, signal.SIG_IGN); up(); time.sleep(600)", scenario)


PTRACE_SEIZE, PTRACE_DETACH, PTRACE_O_TRACEEXIT = 0x4206, 17, 0x40


def trace(request: int, pid: int, data: int = 0) -> None:
    ptrace = ctypes.CDLL(None, use_errno=True).ptrace
    ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    if ptrace(request, pid, 0, data) != 0:
        pytest.skip(f"needs the right to trace processes: {os.strerror(ctypes.get_errno())}")


def test_a_worker_that_sigkill_does_not_end_is_waited_for_once_and_the_others_end(stage, monkeypatch):
    async def scenario(scene: Scene) -> None:
        (child,), _ = await scene.report(0), await scene.report(1)
        stuck = scene.group.pids[1]
        trace(PTRACE_SEIZE, stuck, PTRACE_O_TRACEEXIT)  # like one in D state: killed, and not dead before it is let go
        try:
            with pytest.raises(UnkillableError, match=rf"workers still exist 1 s after SIGKILL: pid={stuck}; "):
                await scene.group.stop(0.0)
            assert [e.local_rank for e in scene.exits] == [0]
            assert not exists(child)
            monkeypatch.setattr(group, "KILL_TIMEOUT_S", DEADLINE)
            with pytest.raises(UnkillableError):
                await scene.group.stop(0.0)
        finally:
            os.waitpid(stuck, 0x40000000)  # noqa: ASYNC222 - __WALL: it has stopped, so this does not wait
            trace(PTRACE_DETACH, stuck)
        await scene.ended.get()
        assert (await scene.ended.get()).local_rank == 1

    monkeypatch.setattr(group, "KILL_TIMEOUT_S", 1.0)
    text = "up(subprocess.Popen(['sleep', '600']).pid); time.sleep(600)"
    run_scenario(stage, text, scenario, workers=2)


def test_a_suspended_worker_takes_the_signal_at_once(stage):
    async def scenario(scene: Scene) -> None:
        await scene.report(0)
        os.kill(scene.group.pids[0], signal.SIGSTOP)
        await scene.group.stop(DEADLINE * 10)
        assert [e.signal for e in scene.exits] == [signal.SIGTERM]

    run_scenario(stage, "up(); time.sleep(600)", scenario)


def test_children_of_a_worker_end_with_it(stage):
    async def scenario(scene: Scene) -> None:
        (child, ignoring) = await scene.report(0)
        await scene.group.stop(DEADLINE)
        assert not exists(child)
        assert not exists(ignoring)

    text = """
child = subprocess.Popen(["sleep", "600"])
ignoring = subprocess.Popen([sys.executable, "-c",
    "import signal, time; signal.signal(15, signal.SIG_IGN); print(flush=True); time.sleep(600)"],
    stdout=subprocess.PIPE)
ignoring.stdout.read(1)
up(child.pid, ignoring.pid); time.sleep(600)
"""
    run_scenario(stage, text, scenario)


@pytest.mark.parametrize("end", ["time.sleep(600)", "os.kill(os.getpid(), 9)", "sys.exit(1)", "sys.exit(0)"])
def test_a_daemon_of_a_worker_ends_with_the_group(stage, end):
    async def scenario(scene: Scene) -> None:
        (daemon,) = await scene.report(0)
        assert exists(daemon)
        if "600" not in end:
            await scene.ended.get()
        await scene.group.stop(DEADLINE)
        assert not exists(daemon)

    run_scenario(stage, f"up(daemon()); {end}", scenario)


def test_subprocesses_of_a_successful_worker_get_the_grace_too(stage):
    async def scenario(scene: Scene) -> None:
        (pid,) = await scene.report(0)
        await scene.ended.get()
        assert exists(pid)
        await scene.group.stop(DEADLINE)
        assert (scene.directory / "saved").read_text() == "all of it"
        assert not exists(pid)

    text = """
uploader = '''
import signal, sys, time
def save(*_):
    open(sys.argv[1], "w").write("all of it")
    sys.exit()
signal.signal(signal.SIGTERM, save)
print(flush=True)
time.sleep(600)
'''
child = subprocess.Popen([sys.executable, "-c", uploader, os.environ["UP"][:-2] + "saved"], stdout=subprocess.PIPE)
child.stdout.read(1)
up(child.pid)
"""
    run_scenario(stage, text, scenario)


def test_a_leftover_that_ignores_the_grace_is_killed(stage):
    async def scenario(scene: Scene) -> None:
        (pid,) = await scene.report(0)
        await scene.ended.get()
        await scene.group.stop(0.1)
        assert not exists(pid)

    run_scenario(stage, "up(daemon(ignore=True))", scenario)


def test_orphans_do_not_stay_as_zombies(stage):
    async def scenario(scene: Scene) -> None:
        (daemon,) = await scene.report(0)
        os.kill(int(daemon), signal.SIGKILL)
        end = time.monotonic() + DEADLINE
        while exists(daemon):
            assert time.monotonic() < end
            await asyncio.sleep(0.01)

    run_scenario(stage, "up(daemon()); time.sleep(600)", scenario)


def test_the_agents_own_subprocesses_are_left_alone(stage):
    with subprocess.Popen(["sleep", "600"]) as mine, subprocess.Popen(["false"]) as dead:

        async def scenario(scene: Scene) -> None:
            await scene.report(0)
            await scene.group.stop(DEADLINE)

        try:
            run_scenario(stage, "up(); time.sleep(600)", scenario)
            assert mine.poll() is None
            assert dead.wait() == 1
        finally:
            mine.kill()


def test_stop_may_be_called_again_and_concurrently(stage):
    async def scenario(scene: Scene) -> None:
        await scene.report(0)
        await asyncio.gather(scene.group.stop(DEADLINE * 10), scene.group.stop(0.05))
        await scene.group.stop(1)
        assert [e.signal for e in scene.exits] == [signal.SIGKILL]

    run_scenario(stage, "signal.signal(signal.SIGTERM, signal.SIG_IGN); up(); time.sleep(600)", scenario)


def test_a_group_stopped_during_its_start_leaves_no_process(stage):
    async def run() -> None:
        for pause in (0.0, 0.001, 0.002, 0.004, 0.008):
            scene = Scene(stage, "time.sleep(600)", 2)
            try:
                await scene.spawner.wait_ready()
                start = asyncio.ensure_future(scene.group.start())
                await asyncio.sleep(pause)
                await scene.group.stop(0)
                await asyncio.wait([start])
                assert len(scene.exits) in (0, 2)
                assert not any(map(exists, scene.group.pids))
            finally:
                scene.spawner.close()
                scene.children.close()

    asyncio.run(run())


def test_a_group_that_was_stopped_does_not_start(stage):
    async def run() -> None:
        scene = Scene(stage, "", 1)
        try:
            await scene.group.stop(1)
            with pytest.raises(asyncio.CancelledError):
                await scene.group.start()
        finally:
            scene.spawner.close()
            scene.children.close()

    asyncio.run(run())


def test_signals_reach_the_workers_process_groups(stage):
    async def scenario(scene: Scene) -> None:
        await scene.report(0)
        scene.group.signal(signal.SIGUSR1)
        assert (await scene.ended.get()).exitcode == 0

    text = """
child = subprocess.Popen(["sleep", "600"])
signal.signal(signal.SIGUSR1, lambda *_: None)
up()
sys.exit(child.wait() != -signal.SIGUSR1)
"""
    run_scenario(stage, text, scenario)


AGENT = """
import asyncio, os, sys
from pathlib import Path
from ripstop.model.config import Script, StartMethod
from ripstop.workers.group import Group
from ripstop.workers.processes import Children
from ripstop.workers.spawner import ProcessSpec, Spawner

async def main():
    entry = Script(sys.argv[1])
    children = Children().open()
    spawner = Spawner(children, entry, dict(os.environ), StartMethod(sys.argv[2]), ())
    specs = [ProcessSpec({**os.environ, "RANK": str(rank)}, entry) for rank in range(2)]
    group = Group(children, spawner, specs, print)
    await group.start()
    print(spawner._pid, *group.pids, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.parametrize("start", list(StartMethod))
def test_no_process_outlives_a_killed_agent(stage, start):
    worker = stage.script(
        PREAMBLE
        + "child = subprocess.Popen(['sleep', '600'])\n"
        + "if os.environ['RANK'] == '1': signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        + "up(child.pid); time.sleep(600)",
        "worker.py",
    )
    linux.become_subreaper()  # this process adopts and reaps what the agent leaves
    env = {**stage.env, "UP": str(stage.directory / "up")}
    agent = subprocess.Popen(
        [sys.executable, "-c", AGENT, str(worker), start.value], env=env, stdout=subprocess.PIPE, text=True
    )
    pidfds: list[int] = []
    try:
        assert agent.stdout is not None
        pids = [int(word) for word in agent.stdout.readline().split()]
        for rank in range(2):
            file = stage.directory / f"up{rank}"
            end = time.monotonic() + DEADLINE
            while not (file.exists() and file.read_text().endswith("\n")):
                assert time.monotonic() < end
                time.sleep(0.01)
            pids.append(int(file.read_text()))
        assert len(pids) == 5
        pidfds = [os.pidfd_open(pid) for pid in pids]
        agent.kill()
        for pidfd in pidfds:
            assert select.select([pidfd], [], [], DEADLINE)[0], "a process outlived its agent"
        agent.wait()
        for pid in pids:
            os.waitpid(pid, 0)
    finally:
        agent.kill()
        agent.communicate()
        for pidfd in pidfds:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.close(pidfd)


def test_a_single_process_is_signalled_only_if_it_belongs_to_a_worker(stage) -> None:
    text = """
child = subprocess.Popen(["sleep", "600"])
apart = subprocess.Popen(["sleep", "600"], start_new_session=True)
up(child.pid, apart.pid, daemon())
sys.exit(7 if child.wait() == -signal.SIGTERM else 8)
"""
    unrelated = subprocess.Popen(["sleep", "600"])

    async def scenario(scene: Scene) -> None:
        child, apart, daemon = map(int, await scene.report(1))
        assert [scene.group.rank_of(pid) for pid in (*scene.group.pids, child, apart)] == [0, 1, 1, 1]
        for pid in (unrelated.pid, daemon, os.getpid(), 1, 1 << 22):
            assert scene.group.rank_of(pid) is None
            scene.group.send(pid, signal.SIGKILL)
        scene.group.send(child, signal.SIGTERM)
        assert (await scene.ended.get()).exitcode == 7
        scene.group.send(scene.group.pids[0], signal.SIGUSR1)
        assert (await scene.ended.get()).signal == signal.SIGUSR1
        assert scene.group.rank_of(scene.group.pids[0]) is None
        assert unrelated.poll() is None
        os.kill(daemon, 0)  # it exists

    try:
        run_scenario(stage, text, scenario, workers=2)
    finally:
        unrelated.kill()
        unrelated.wait()
