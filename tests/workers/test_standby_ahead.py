"""Standbys that run the script up to its training function, with a real zygote.

`WAIT` is what a function with `train.elastic` does first; it needs no torch.
"""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ripstop.model import events
from ripstop.model.config import Executable, Standby, StandbyUntil
from ripstop.system import linux
from ripstop.workers import standby, standby_policy
from ripstop.workers.spawner import ProcessSpec
from ripstop.workers.zygote import run_ahead, warmups
from tests.worker_fixtures import Stage
from tests.workers.test_standby import TELLS_ALL, Pool, Pools, descriptors

WAIT = "from ripstop.train import standby_gate; standby_gate.wait_at_standby_gate()\n"
TELLS = f"import os; print('start', os.environ['RANK'])\n{WAIT}print('enter', os.environ['RANK'], os.getpid())"
BEFORE_SCRIPT = "ripstop replaces this standby with one that waits before the script"


@asynccontextmanager
async def opened(stage: Stage, script: str, **more: Any) -> AsyncIterator[Pool]:
    async with Pools(stage).open(script, until=StandbyUntil.ELASTIC, **more) as pool:
        yield pool


def log(pool: Pool, rank: int = 0) -> str:
    return (pool.directory / f"standby_{rank}.log").read_text()


async def until_true(what: Callable[[], object]) -> None:
    """Wait for another process."""
    while not what():  # noqa: ASYNC110
        await asyncio.sleep(0.01)


async def begin(pool: Pool, marker: Path) -> int:
    """Make a standby, and wait until its script has made this file; its pid."""
    pool.begin_round()
    await until_true(marker.exists)
    (pid,) = pool.pids()
    return pid


def test_a_worker_that_was_a_standby_goes_on_where_the_script_waits(stage):
    async def scenario() -> None:
        async with opened(stage, TELLS, count=2) as pool:
            for number in (1, 2):
                await pool.make()
                waiting = pool.pids()
                assert [each.until for each in pool.standbys.samples()] == ["elastic"] * 2
                pids = await pool.run(pool.spec(0), pool.spec(1))
                assert sorted(pids) == waiting and pool.standbys.taken_run_ahead == 2
                lines = [pool.output(rank).splitlines() for rank in (0, 1)]
                assert [found[-1] for found in lines] == [f"enter {10 + rank} {pids[rank]}" for rank in (0, 1)]
                assert [len(found) for found in lines] == [number] * 2
                assert [log(pool, rank) for rank in (0, 1)] == ["start 99\n" * number] * 2

    asyncio.run(scenario())


def test_it_does_not_differ_from_a_worker_that_ran_the_script_itself(stage):
    async def scenario() -> None:
        async with opened(stage, WAIT + TELLS_ALL) as pool:
            await pool.run()
            forked = json.loads(pool.output(0))
            (pool.directory / "0.out").unlink()
            await pool.make()
            waiting = pool.pids()
            assert await pool.run() == waiting
            assert json.loads(pool.output(0)) == forked

    asyncio.run(scenario())


CHANGES = f"""
import logging, os, sys, threading, time
logging.basicConfig(stream=sys.stdout, format='%(message)s')
os.environ['SET'] = 'by the script'; del os.environ['REMOVED']; os.environ['PATH'] += ':/more'
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
logging.warning('before')
{WAIT}
logging.warning('after')
logging.warning([os.environ['SET'], 'REMOVED' in os.environ, os.environ['PATH'][-6:], os.environ['NEW']])
logging.warning([os.environ.get('RIPSTOP_STANDBY'), os.environ['RANK'], threading.active_count()])
"""


def test_what_the_script_changed_is_kept_and_only_the_variables_of_the_round_change(stage):
    stage.env["REMOVED"] = "x"

    async def scenario() -> None:
        async with opened(stage, CHANGES) as pool:
            await pool.make()
            spec = pool.spec(0)
            env = {**spec.env, "NEW": "of the round"}
            await pool.run(ProcessSpec(env, spec.entry, spec.stdout, spec.stderr, local_rank=0))
            assert log(pool) == "before\n"
            assert pool.output(0).splitlines() == [
                "after",
                "['by the script', False, ':/more', 'of the round']",
                "[None, '10', 2]",
            ]

    asyncio.run(scenario())


def test_a_worker_without_log_files_writes_to_the_agent_s_streams(stage, capfd):
    async def scenario() -> None:
        async with opened(stage, TELLS) as pool:
            await pool.make()
            (pid,) = await pool.run(ProcessSpec(pool.spec(0).env, pool.entry, local_rank=0))
            assert log(pool) == "start 99\n"
            assert capfd.readouterr().out == f"enter 10 {pid}\n"

    asyncio.run(scenario())


def test_a_stream_that_the_script_has_redirected_or_closed_stays_so(stage):
    redirect = "import os; os.dup2(os.open('own.log', os.O_WRONLY | os.O_CREAT), 1); os.close(2)\n"
    check = "print('after')\nassert os.open('other', os.O_WRONLY | os.O_CREAT) == 2"

    async def scenario() -> None:
        async with opened(stage, f"import os; os.chdir({str(stage.directory)!r})\n{redirect}{WAIT}{check}") as pool:
            await pool.make()
            waiting = pool.pids()
            assert await pool.run() == waiting
            assert (pool.directory / "own.log").read_text() == "after\n"
            assert pool.output(0) == log(pool) == ""

    asyncio.run(scenario())


def test_priority_is_low_while_it_runs_ahead_and_while_it_waits(stage):
    tell = "print(os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0), file=sys.stderr)"
    child = "child = subprocess.Popen(['sleep', '600'])"
    of_child = "print(os.getpriority(os.PRIO_PROCESS, child.pid), file=sys.stderr); child.kill(); child.wait()"
    can_raise = os.geteuid() == 0

    async def scenario() -> None:
        async with opened(stage, f"import os, subprocess, sys; {tell}; {child}\n{WAIT}{tell}\n{of_child}") as pool:
            await pool.make()
            (waiting,) = pool.pids()
            low = standby_nice = 19 if can_raise else os.getpriority(os.PRIO_PROCESS, 0)
            assert os.getpriority(os.PRIO_PROCESS, waiting) == standby_nice
            assert log(pool).split() == [str(low), str(os.SCHED_BATCH)]
            await pool.run()
            nice = str(os.getpriority(os.PRIO_PROCESS, 0))
            assert pool.output(0, "err").split() == [nice, str(os.sched_getscheduler(0)), nice]

    asyncio.run(scenario())


def test_it_holds_its_socket_and_the_agent_s_streams_and_nothing_else(stage):
    async def scenario() -> None:
        async with opened(stage, TELLS) as pool:
            await pool.make()
            (pid,) = pool.pids()
            others = [kind for fd, kind in descriptors(pid) if fd > 2]
            assert others.count("socket") == 1 and len(others) == 3
            assert str(pool.directory) not in "".join(others)

    asyncio.run(scenario())


def test_a_fork_of_a_standby_is_no_standby(stage):
    fork = "child = os.fork()\nif not child: os._exit(standby_gate.find_gate() is None)\n"
    check = "assert os.waitpid(child, 0)[1] == 1 << 8 and standby_gate.find_gate() is not None\n"
    script = "import os\nfrom ripstop.train import standby_gate\nif 'RIPSTOP_STANDBY' in os.environ:\n"
    script += f"    exec({fork + check!r})\n"

    async def scenario() -> None:
        async with opened(stage, script + TELLS) as pool:
            await pool.make()
            await pool.run()

    asyncio.run(scenario())


# files ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["script.py", "late.py"])
def test_a_standby_whose_script_or_module_was_edited_is_not_taken(stage, name):
    async def scenario() -> None:
        stage.script("VERSION = 1\n", "late.py")
        text = f"__import__('late')\n{WAIT}print('old')"
        async with opened(stage, text) as pool:
            await pool.make()
            (waiting,) = pool.pids()
            stage.script("import late; print('new', late.VERSION)", "script.py")
            if name == "late.py":
                stage.script(text, "script.py")
                os.utime(pool.directory / "script.py", (1, 1))
                stage.script("VERSION = 22\n", name)
            assert await pool.run() != [waiting]
            assert "has changed since it was imported" in (await pool.wait_for(events.StandbyDiscarded)).why

    asyncio.run(scenario())


def test_a_standby_whose_script_is_edited_while_it_runs_fails(stage):
    edit = "import pathlib; path = pathlib.Path(__file__); path.write_text(path.read_text() + '#')\n"

    async def scenario() -> None:
        async with opened(stage, edit + WAIT) as pool:
            assert "script.py has changed since the script was started" in await pool.fail()

    asyncio.run(scenario())


# scripts that do not get there ----------------------------------------------------------------------------------------

BAD = {
    "raises": ("raise ValueError('no data')", "the script failed: ValueError: no data"),
    "exits": ("sys.exit(3)", "the script exited with code 3 before it called a function with @train.elastic"),
    "ends": ("pass", "the script exited with code 0 before it called a function with @train.elastic"),
    "is killed": ("os.kill(os.getpid(), 9)", "it was killed by SIGKILL (if memory ran out, the kernel's log says so)"),
    "crashes": ("os.kill(os.getpid(), 11)", "it was killed by SIGSEGV"),
    "reports a checkpoint": (
        "from ripstop import train; train.checkpoint_saved(3, 'model.pt')",
        "the script calls train.checkpoint_saved() before its function with @train.elastic; call it in the function",
    ),
    "reports a step without a stderr": (
        "from ripstop import train; os.close(2); train.heartbeat(step=3)",
        "the script calls train.heartbeat(step) before its function with @train.elastic; call it in the function",
    ),
    "reports a step": (
        "from ripstop import train; train.heartbeat(step=3)",
        "the script calls train.heartbeat(step) before its function with @train.elastic; call it in the function",
    ),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_script_that_does_not_reach_its_function_costs_the_standby_and_another_kind_takes_its_place(stage, kind):
    body, message = BAD[kind]
    script = "import os, subprocess, sys\nif 'RIPSTOP_STANDBY' in os.environ:\n    subprocess.Popen(['sleep', '600'])\n"
    script += f"    {body}\nelse:\n    print('worker')\n"

    async def scenario() -> None:
        async with opened(stage, script) as pool:
            why = await pool.fail()
            output = f"(its output is in {pool.directory / 'standby_0.log'})"
            assert why == f"{message} {output}; {BEFORE_SCRIPT}"
            ready = await pool.wait_for(events.StandbysReady)
            assert ready.until == ("script",)
            waiting = pool.pids()
            assert await pool.run() == waiting and pool.standbys.taken_run_ahead == 0
            assert pool.output(0) == "worker\n"
            await until_true(
                lambda: not [p for p in linux.linux_processes() if p.name == "sleep" and p.parent == os.getpid()]
            )
            if kind == "raises":
                assert "ValueError: no data" in log(pool)

    asyncio.run(scenario())


def test_after_three_failures_all_standbys_wait_before_the_script(stage):
    script = "import os\nif 'RIPSTOP_STANDBY' in os.environ: raise ValueError('no data')\n"

    async def scenario() -> None:
        async with opened(stage, script) as pool:
            ends = []
            for _ in range(3):
                ends.append((await pool.fail()).rpartition("; ")[2])
                await pool.wait_for(events.StandbysReady)
                await pool.run()
            assert ends == [BEFORE_SCRIPT, BEFORE_SCRIPT, "from now on, standbys wait before the script"]
            await pool.make()
            assert [each.until for each in pool.standbys.samples()] == ["script"]
            assert pool.recorded == []

    asyncio.run(scenario())


def test_a_script_that_never_gets_there_is_ended_with_its_children(stage, monkeypatch, tmp_path):
    monkeypatch.setattr(standby_policy, "RUN_AHEAD_TIMEOUT_S", 1.0)
    monkeypatch.setattr(standby_policy, "WARM_UP_TIMEOUT_S", 60.0)
    marker = tmp_path / "child"
    script = f"import subprocess\nsubprocess.run(['sh', '-c', 'echo $$ > {marker}; exec sleep 600'], process_group=0)"

    async def scenario() -> None:
        async with opened(stage, script) as pool:
            why = await pool.fail()
            assert why == f"the script called no function with @train.elastic within 1 s; {BEFORE_SCRIPT}"
            await pool.wait_for(events.StandbysReady)
            await until_true(lambda: not (marker.exists() and linux.read_linux_process(int(marker.read_text()))))

    asyncio.run(scenario())


@pytest.mark.parametrize("moment", ["while it runs", "while it waits"])
def test_a_standby_that_is_killed_is_replaced_by_the_other_kind(stage, tmp_path, moment):
    marker = tmp_path / "runs"
    pause = "import signal; signal.pause()\n" if moment == "while it runs" else ""
    script = f"import os\nif 'RIPSTOP_STANDBY' in os.environ: open({str(marker)!r}, 'w')\n{pause}{WAIT}print('worker')"
    script = script.replace("import signal;", "'RIPSTOP_STANDBY' in os.environ and __import__('signal').pause() #")

    async def scenario() -> None:
        async with opened(stage, script) as pool:
            if moment == "while it runs":
                pid = await begin(pool, marker)
            else:
                await pool.make()
                (pid,) = pool.pids()
            os.kill(pid, signal.SIGKILL)
            assert "it was killed by SIGKILL" in (await pool.wait_for(events.StandbyDiscarded)).why
            assert (await pool.wait_for(events.StandbysReady)).until == ("script",)
            waiting = pool.pids()
            assert waiting != [pid] and await pool.run() == waiting
            assert pool.output(0) == "worker\n"

    asyncio.run(scenario())


def test_a_log_that_cannot_be_made_costs_the_standby(stage, monkeypatch):
    async def scenario() -> None:
        async with opened(stage, TELLS) as pool:
            missing = pool.directory / "no" / "file"
            env = pool.spec(0).env
            spec = ProcessSpec(env, pool.entry, missing, missing)
            monkeypatch.setattr(pool.standbys, "_shadowed_spec", lambda rank: spec)
            assert f"No such file or directory: {missing}" in await pool.fail()
            await pool.wait_for(events.StandbysReady)

    asyncio.run(scenario())


def test_with_auto_it_must_leave_gpu_memory_for_the_worker(stage, monkeypatch):
    free = iter([3 << 30, 1 << 30, 3 << 30])
    monkeypatch.setattr(standby, "free_gpu_memory", lambda visible, index: next(free))

    async def scenario() -> None:
        async with opened(stage, TELLS) as pool:
            pool.standbys._config = Standby(1, auto=True, until=StandbyUntil.ELASTIC)
            why = await pool.fail()
            assert why.startswith(
                "it has run the script, and now a standby needs 2.0 GiB of free GPU memory, and 1.0 GiB"
            )
            assert (await pool.wait_for(events.StandbysReady)).until == ("script",)

    asyncio.run(scenario())


@pytest.mark.parametrize(("visible", "device"), [(8, 3), (1, 0)])
def test_a_script_may_make_only_its_own_gpu_visible(monkeypatch, visible, device):
    used = []
    cuda = SimpleNamespace(
        is_initialized=lambda: True,
        device_count=lambda: visible,
        current_device=lambda: 0,
        synchronize=used.append,
        memory_reserved=lambda device: used.append(device) or 7,
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert run_ahead.run_ahead_gpu_memory() == 7
    warmups.check_warmed_gpu()
    assert used == [device, device]


def test_an_orphan_of_a_standby_lives_when_workers_stop_and_ends_with_its_worker(stage, tmp_path):
    marker = tmp_path / "orphan"
    script = f"import os, subprocess\nsubprocess.run(['sh', '-c', 'sleep 600 & echo $! > {marker}'])\n{WAIT}"

    async def scenario() -> None:
        async with opened(stage, script) as pool:
            await pool.make()
            (waiting,) = pool.pids()
            orphan = int(marker.read_text())
            assert linux.read_linux_process(orphan).parent == os.getpid()
            other = ProcessSpec(pool.env, Executable(("true",)))
            assert await pool.run(other) != [waiting]
            assert linux.read_linux_process(orphan) is not None
            assert await pool.run() == [waiting]
            assert linux.read_linux_process(orphan) is None

    asyncio.run(scenario())


def test_stop_ends_it_with_its_children(stage, tmp_path):
    marker = tmp_path / "child"
    script = f"import subprocess; subprocess.run(['sh', '-c', 'echo $$ > {marker}; exec sleep 600'], process_group=0)"

    async def scenario() -> None:
        async with opened(stage, script) as pool:
            await begin(pool, marker)
            await until_true(marker.read_text)
            await pool.standbys.stop()
            assert pool.pids() == [] and linux.read_linux_process(int(marker.read_text())) is None

    asyncio.run(scenario())


def test_on_a_node_without_a_round_standbys_wait_before_the_script(stage, monkeypatch):
    monkeypatch.setattr(standby_policy, "MAKE_DELAY_S", 0.1)

    async def scenario() -> None:
        async with opened(stage, TELLS) as pool:
            assert (await pool.wait_for(events.StandbysReady)).until == ("script",)

    asyncio.run(scenario())
