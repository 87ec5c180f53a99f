"""Workers started by both methods, and a zygote that is unfit or dies."""

import asyncio
import json
import os
import signal
import sys

import pytest

from ripstop.model.config import Executable, Module, Script, StartMethod
from ripstop.model.errors import StartError
from ripstop.workers.processes import Children, ProcessExit
from ripstop.workers.spawner import ProcessSpec, Spawner
from tests.worker_fixtures import new_spawner

HELLO = "import os, sys; print('hello', os.environ['RANK'], *sys.argv[1:])"


@pytest.mark.parametrize("start", list(StartMethod))
def test_workers_start_in_the_order_of_ranks(stage, start):
    outcome = stage.run(stage.script(HELLO), workers=3, start=start)
    assert outcome.out == ["hello 0\n", "hello 1\n", "hello 2\n"]
    assert [end.exitcode for end in outcome.exits] == [0, 0, 0]
    assert outcome.ready.start is start
    assert all(end.max_rss > 1 << 20 for end in outcome.exits)


def test_an_executed_python_is_unbuffered_and_has_the_arguments(stage):
    path = stage.script("import sys; print(sys.orig_argv[1:], sys.stdout.write_through)")
    outcome = stage.run(Script(str(path), ("a b",)), start=StartMethod.EXEC)
    assert outcome.out == [f"{['-u', str(path), 'a b']} True\n"]


@pytest.mark.parametrize("start", list(StartMethod))
def test_a_command_is_looked_up_on_path(stage, start):
    tool = stage.script("#!/bin/sh\necho tool $RANK $1; trap - PIPE; exit 5\n", "bin/tool")
    tool.chmod(0o755)
    outcome = stage.run(Executable(("tool", "x")), start=start, env={"PATH": f"{tool.parent}:/bin:/usr/bin"})
    assert outcome.out == ["tool 0 x\n"]
    assert outcome.exits[0].exitcode == 5


def test_a_command_inherits_no_ignored_signal_and_no_descriptor(stage):
    outcome = stage.run(Executable(("sh", "-c", "grep SigIgn /proc/self/status; echo /proc/self/fd/*")))
    ignored, fds = outcome.out[0].splitlines()
    assert int(ignored.split()[1], 16) & ~(3 << 31) == 0  # less the C library's own two
    assert fds.split() == [f"/proc/self/fd/{n}" for n in (0, 1, 2, 3)]  # the last is the listing's own


@pytest.mark.parametrize(("name", "code"), [("no-such-program", 127), ("/etc/hostname", 126)])
def test_a_command_that_cannot_run_exits_like_in_a_shell(stage, name, code):
    outcome = stage.run(Executable((name,)))
    assert outcome.exits[0].exitcode == code
    assert outcome.err[0].startswith(f"ripstop: cannot execute '{name}': ")
    assert outcome.err[0].count("\n") == 1


def test_processes_with_other_arguments_or_another_script_share_a_zygote(stage):
    one, two = stage.script(HELLO), stage.script("print('another')", "two.py")

    async def scenario() -> None:
        with new_spawner(Script(str(one), ("a",)), stage.env) as spawner:
            ended: asyncio.Queue[ProcessExit] = asyncio.Queue()
            entries = [Script(str(one), ("a",)), Script(str(one), ("b", "c")), Script(str(two)), Module("this")]
            specs = [
                ProcessSpec({**stage.env, "RANK": str(n)}, entry, stage.directory / f"{n}.out")
                for n, entry in enumerate(entries)
            ]
            for pid in await spawner.spawn(specs):
                spawner.children.watch(pid, ended.put_nowait)
            for _ in entries:
                assert (await ended.get()).exitcode == 0

    asyncio.run(scenario())
    texts = [(stage.directory / f"{n}.out").read_text() for n in range(4)]
    assert texts[:3] == ["hello 0 a\n", "hello 1 b c\n", "another\n"]
    assert texts[3].startswith("The Zen of Python")


ENVIRONMENTS = """
import ctypes, json, os, subprocess
libc = ctypes.CDLL(None)
libc.getenv.restype = ctypes.c_char_p
def parsed(block):
    return dict(line.partition("=")[::2] for line in block.rstrip("\\0").split("\\0"))
print(json.dumps({
    "proc": parsed(subprocess.run(["sh", "-c", "cat /proc/$PPID/environ"], capture_output=True, text=True).stdout),
    "python": dict(os.environ),
    "libc": {name: value.decode() for name in os.environ if (value := libc.getenv(name.encode())) is not None},
    "child": parsed(subprocess.run(["env", "-0"], capture_output=True, text=True).stdout),
    "removed": libc.getenv(b"REMOVED"),
    "cmdline": open("/proc/self/cmdline").read(),
}))
"""


@pytest.mark.parametrize("long", ["", "x" * 100_000])
@pytest.mark.parametrize("start", list(StartMethod))
def test_a_worker_has_its_own_environment_in_proc_python_libc_and_its_children(stage, start, long):
    """Except in /proc, if the zygote's is too small for it."""
    script = stage.script(ENVIRONMENTS)
    path = {"PATH": os.environ["PATH"]}
    zygotes = path | {"RANK": "7 of an outer job", "REMOVED": "1", "KEPT": "é", "OMP_NUM_THREADS": "16"}
    own = {"KEPT": "é", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "OMP_NUM_THREADS": "1", "LONG": long}

    async def scenario() -> list[int]:
        with new_spawner(Script(str(script), ("${local_rank}",)), zygotes, start) as spawner:
            ended: asyncio.Queue[ProcessExit] = asyncio.Queue()
            specs = [
                ProcessSpec(
                    path | own | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                    Script(str(script), (str(rank),)),
                    stage.directory / f"{rank}.out",
                )
                for rank in range(2)
            ]
            async with asyncio.timeout(120):
                for pid in await spawner.spawn(specs):
                    spawner.children.watch(pid, ended.put_nowait)
                return [(await ended.get()).exitcode for _ in specs]

    assert asyncio.run(scenario()) == [0, 0]
    for rank in range(2):
        seen = json.loads((stage.directory / f"{rank}.out").read_text())
        wanted = path | own | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        ours = {"LC_CTYPE"}  # set by Python in the C locale
        views = {view: {k: v for k, v in seen[view].items() if k not in ours} for view in ("python", "libc", "child")}
        assert views == dict.fromkeys(views, wanted)
        assert seen["removed"] is None
        if start is StartMethod.EXEC or not long:
            assert {k: v for k, v in seen["proc"].items() if k not in ours} == wanted
        else:
            assert seen["proc"]["RANK"] == "7 of an outer job"
        words = [sys.executable, "-u", str(script), str(rank)]
        assert seen["cmdline"].rstrip("\0").split("\0") == words


def test_output_is_appended_to_an_existing_file(stage):
    (stage.directory / "0.out").write_text("before\n")
    assert stage.run(stage.script(HELLO)).out == ["before\nhello 0\n"]


def test_an_output_file_that_cannot_be_opened_is_a_start_error(stage):
    path = stage.script(HELLO)

    async def scenario() -> None:
        with new_spawner(Script(str(path)), stage.env) as spawner:
            specs = [
                ProcessSpec({**stage.env, "RANK": "0"}, Script(str(path)), stage.directory / "0.out"),
                ProcessSpec({**stage.env, "RANK": "1"}, Script(str(path)), stage.directory / "absent" / "out"),
            ]
            with pytest.raises(StartError, match=r"No such file or directory: .*absent/out"):
                await spawner.spawn(specs)
            specs[1] = ProcessSpec({**stage.env, "RANK": "1"}, Script(str(path)), stage.directory / "1.out")
            pids = await spawner.spawn(specs)  # the zygote still works
            for pid in pids:
                assert spawner.children.reap(pid)[:2] == (0, None)

    asyncio.run(scenario())
    assert (stage.directory / "0.out").read_text() == "hello 0\n"


UNFIT = {
    "raises": ("raise OSError('no licence')", "preloading unfit failed: OSError: no licence"),
    "is not there": (None, "preloading unfit failed: No module named 'unfit'"),
    "exits": ("raise SystemExit(3)", "preloading unfit failed: SystemExit: 3"),
    "starts a thread": (
        "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()",
        "what was imported left 1 thread running",
    ),
    "crashes": ("import ctypes; ctypes.string_at(0)", "the zygote died of SIGSEGV while it was preloading"),
    "kills the process": ("import os; os._exit(9)", "the zygote exited with code 9 while it was preloading"),
}


@pytest.mark.parametrize("what", UNFIT)
def test_workers_are_executed_if_a_preloaded_module(stage, what):
    text, why = UNFIT[what]
    if text is not None:
        stage.script(text, "unfit.py")
    outcome = stage.run(stage.script(HELLO), preload=("json", "unfit"), workers=2)
    assert (outcome.ready.start, outcome.ready.preloaded, outcome.ready.fallback_reason) == (StartMethod.EXEC, (), why)
    assert outcome.out == ["hello 0\n", "hello 1\n"]


def test_workers_are_executed_if_the_users_sitecustomize_starts_a_thread(stage):
    text, why = UNFIT["starts a thread"]
    stage.script(text, "lib/sitecustomize.py")
    outcome = stage.run(stage.script(HELLO), env={"PYTHONPATH": str(stage.directory / "lib")})
    assert (outcome.ready.start, outcome.ready.fallback_reason) == (StartMethod.EXEC, why)
    assert outcome.out == ["hello 0\n"]


def test_torch_is_not_preloaded_for_a_script_without_it(stage):
    path = stage.script("import sys; print('torch' in sys.modules, 'numpy' in sys.modules)")
    outcome = stage.run(path, preload=None)
    assert outcome.ready.preloaded == ()
    assert outcome.out == ["False False\n"]


def test_torch_is_preloaded_if_the_script_imports_it_anywhere(stage):
    path = stage.script("""
import sys
assert "torch" in sys.modules
def main():
    import torch
    assert torch.ones(3).sum() == 3 and not torch.cuda.is_initialized()
    (torch.ones(64, 64) @ torch.ones(64, 64)).sum()  # uses the thread pools that did not survive the fork
    import numpy
    numpy.ones((300, 300)) @ numpy.ones((300, 300))
main()
""")
    outcome = stage.run(path, preload=None, workers=2)
    assert outcome.ready.preloaded == ("numpy", "torch")
    assert outcome.ready.start is StartMethod.ZYGOTE, outcome.ready.fallback_reason
    assert [end.exitcode for end in outcome.exits] == [0, 0], outcome.err


def test_the_preload_uses_the_scripts_path(stage):
    stage.script("where = 'beside the script'", "numpy.py")
    path = stage.script("import numpy; print(numpy.where)")
    outcome = stage.run(path, preload=None)
    assert outcome.ready.preloaded == ("numpy",)
    assert outcome.out == ["beside the script\n"]


def test_an_edited_script_is_read_again_at_the_next_start(stage):
    path = stage.script("print('old')")

    async def scenario() -> None:
        with new_spawner(Script(str(path)), stage.env) as spawner:
            for text in ("print('old')", "import helper; print(helper.text)"):
                path.write_text(text)
                stage.script("text = 'new'", "helper.py")
                (pid,) = await spawner.spawn([ProcessSpec(stage.env, Script(str(path)), stage.directory / "out")])
                assert spawner.children.reap(pid)[:2] == (0, None)

    asyncio.run(scenario())
    assert (stage.directory / "out").read_text() == "old\nnew\n"


def test_files_that_never_stop_changing_are_an_error_with_a_remedy(stage, monkeypatch):
    module = stage.script("value = 0", "restless.py")
    entry = Script(str(stage.script("import restless")))

    async def scenario() -> None:
        problem = pytest.raises(StartError, match=r"have changed \d times in a row; use --preload=none")
        with new_spawner(entry, stage.env, preload=None) as spawner, problem:
            wait_ready = spawner.wait_ready

            async def wait_ready_and_edit() -> None:
                await wait_ready()
                module.write_text(module.read_text() + "#")

            monkeypatch.setattr(spawner, "wait_ready", wait_ready_and_edit)
            await spawner.spawn([ProcessSpec(stage.env, entry)])

    asyncio.run(scenario())


def test_a_zygote_that_died_is_replaced_and_its_workers_live_on(stage):
    path = stage.script("print('up'); input()")

    async def scenario() -> None:
        with new_spawner(Script(str(path)), stage.env, StartMethod.ZYGOTE, ("json",)) as spawner:
            ended: asyncio.Queue[ProcessExit] = asyncio.Queue()
            spec = ProcessSpec(stage.env, Executable(("sleep", "60")))
            first = await spawner.spawn([spec])
            spawner.children.watch(first[0], ended.put_nowait)
            zygote = spawner._pid
            os.kill(zygote, signal.SIGKILL)
            second = await spawner.spawn([spec])
            spawner.children.watch(second[0], ended.put_nowait)
            assert spawner._pid != zygote
            assert (await spawner.wait_ready()).preloaded == ("json",)
            assert ended.empty()
            for pid in first + second:
                os.kill(pid, signal.SIGTERM)
            assert {(await ended.get()).signal, (await ended.get()).signal} == {signal.SIGTERM}

    asyncio.run(scenario())


def test_a_zygote_killed_during_a_start_is_replaced_and_leaves_no_process(stage):
    path = stage.script("import time; time.sleep(600)")

    async def scenario() -> None:
        with new_spawner(Script(str(path)), stage.env) as spawner:
            ended: asyncio.Queue[ProcessExit] = asyncio.Queue()
            specs = [ProcessSpec(stage.env, Script(str(path)))] * 2
            for n in range(20):
                await spawner.wait_ready()
                zygote = spawner._pid
                spawn = asyncio.ensure_future(spawner.spawn(specs))
                await asyncio.sleep(n // 2 * 0.0005)
                if spawner._pid == zygote:  # otherwise the one killed before is being replaced
                    os.kill(zygote, signal.SIGKILL)
                pids = await spawn
                for pid in pids:
                    assert os.getsid(pid) == pid
                    spawner.children.watch(pid, ended.put_nowait)
                for pid in pids:
                    os.kill(pid, signal.SIGTERM)
                assert {(await ended.get()).signal for _ in pids} == {signal.SIGTERM}
            await spawner.children.end_trees((), 0)  # an intermediate process may have lost its zygote

    asyncio.run(scenario())


def test_a_start_cancelled_during_preloading_starts_nothing(stage):
    stage.script("import time; time.sleep(30)", "slow.py")
    path = stage.script("raise SystemExit('was started')")

    async def scenario() -> None:
        entry = Script(str(path))
        with new_spawner(entry, stage.env, preload=("slow",)) as spawner, pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await spawner.spawn([ProcessSpec(stage.env, entry)])

    asyncio.run(scenario())


def test_a_hundred_starts_leak_no_descriptor_in_the_agent_or_the_zygote(stage):
    path = stage.script("")

    async def scenario() -> None:
        spawner = Spawner(Children().open(), Script(str(path)), stage.env, StartMethod.ZYGOTE, ())
        children = spawner.children
        ended: asyncio.Queue[ProcessExit] = asyncio.Queue()

        async def round_trip() -> None:
            for pid in await spawner.spawn([ProcessSpec(stage.env, Script(str(path)))] * 4):
                children.watch(pid, ended.put_nowait)
            for _ in range(4):
                assert (await ended.get()).exitcode == 0

        def descriptors() -> list[int]:
            return [len(os.listdir(f"/proc/{pid}/fd")) for pid in ("self", spawner._pid)]  # noqa: PTH208

        try:
            await round_trip()
            before = descriptors()
            for _ in range(25):
                await round_trip()
            async with asyncio.timeout(120):
                while any(now > then for now, then in zip(descriptors(), before, strict=True)):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        finally:
            spawner.close()
            children.close()

    asyncio.run(scenario())


def test_workers_are_executed_if_another_sitecustomize_comes_before_ours(stage, monkeypatch):
    # The zygote would otherwise run the script itself.
    rival = stage.script("", "rival/sitecustomize.py")
    monkeypatch.setattr(sys, "path", ["", str(rival.parent), *sys.path])
    outcome = stage.run(stage.script(HELLO))
    assert (outcome.ready.start, outcome.ready.fallback_reason) == (StartMethod.EXEC, f"{rival} comes before ours")
    assert outcome.out == ["hello 0\n"]
