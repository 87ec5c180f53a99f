"""Looks at this very machine, and the user's command with real processes."""

import asyncio
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ripstop.agent.health import probe
from ripstop.agent.health.assessment import Facts, GpuHealth, Ran
from ripstop.agent.health.command import HealthCommand, die_with
from ripstop.agent.health.gpu import read
from ripstop.agent.health.probe import HealthProbe
from ripstop.model.config import HealthLimits
from ripstop.system import linux

DEADLINE = 20.0


def within_time(work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    async def scenario() -> Any:
        async with asyncio.timeout(DEADLINE):
            return await work()

    return asyncio.run(scenario())


def ran(*command: str, patience: float = DEADLINE, **environ: str) -> Ran:
    env = {**os.environ, **environ}
    found: Ran = within_time(lambda: HealthCommand(command, env).run(patience))
    return found


def looked(limits: HealthLimits, logs: Path, **environ: str) -> Facts:
    found: Facts = within_time(lambda: HealthProbe(limits, str(logs), environ).look(None))
    return found


# the user's command ---------------------------------------------------------------------------------------------------


def test_a_command_ends_with_its_code_and_its_last_line() -> None:
    assert ran("sh", "-c", "echo fine") == Ran(0, "fine")
    assert ran("sh", "-c", "echo one; echo two >&2; echo; exit 3") == Ran(3, "two")
    assert ran("sh", "-c", "kill -9 $$") == Ran(-9)


def test_a_command_that_cannot_be_started_says_why(tmp_path: Path) -> None:
    assert ran(str(tmp_path / "gone")) == Ran(None, error="No such file or directory")


def test_a_command_has_the_workers_environment_and_no_shell() -> None:
    assert ran("sh", "-c", "echo $WORD", WORD="heard") == Ran(0, "heard")
    assert ran("echo", "$WORD", WORD="heard") == Ran(0, "$WORD")


def test_a_command_that_hangs_is_killed_with_all_its_group(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    script = f"sleep 1000 & echo $$ $! > {pids}.new; mv {pids}.new {pids}; echo thinking; wait"
    for patience in (0.5, 2.0, DEADLINE / 2):  # a machine under load may need longer until the command hangs
        answer = ran("sh", "-c", script, patience=patience)
        if answer.last_line:
            break
    assert answer == Ran(None, "thinking")
    _all_gone(pids)


def test_what_a_command_leaves_in_its_group_is_killed(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    assert ran("sh", "-c", f"sleep 1000 & echo $! > {pids}; exit 0") == Ran(0)
    _all_gone(pids)


def test_a_check_that_is_broken_off_leaves_no_process(tmp_path: Path) -> None:
    pids = tmp_path / "pids"

    async def scenario() -> None:
        script = f"sleep 1000 & echo $$ $! > {pids}.new; mv {pids}.new {pids}; wait"
        check = asyncio.create_task(HealthCommand(("sh", "-c", script), os.environ).run(DEADLINE))
        while not pids.exists():  # noqa: ASYNC110  # it is another process that makes it
            await asyncio.sleep(0.01)
        check.cancel()
        await asyncio.wait([check])

    within_time(scenario)
    _all_gone(pids)


def test_a_command_whose_agent_died_before_it_could_ask_for_a_signal_does_not_begin(tmp_path: Path) -> None:
    mark = tmp_path / "began"
    orphan = subprocess.call(["touch", mark], preexec_fn=die_with(os.getppid()))  # as if another had adopted it
    child = subprocess.call(["true"], preexec_fn=die_with(os.getpid()))
    assert (orphan, mark.exists(), child) == (1, False, 0)


def test_a_talkative_command_is_heard_to_its_end() -> None:
    lines = "import sys; sys.stdout.write('x' * 3_000_000 + '\\nlast words\\n')"
    assert ran(sys.executable, "-c", lines) == Ran(0, "last words")


def test_a_command_that_does_not_even_start_stops_nothing_and_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one on a file server that hangs: the loop goes on, and there is no second thread that waits for it."""
    go, started, start = threading.Event(), [], subprocess.Popen

    def hangs(*args: Any, **more: Any) -> Any:
        started.append(threading.current_thread())
        go.wait(DEADLINE)
        return start(*args, **more)

    monkeypatch.setattr(subprocess, "Popen", hangs)

    async def scenario() -> tuple[Ran, Ran, int, Ran]:
        check = HealthCommand(("echo", "fine"), os.environ)
        first, second, before = await check.run(0.05), await check.run(0.05), len(started)
        go.set()
        return first, second, before, await check.run(DEADLINE)

    assert within_time(scenario) == (Ran(None), Ran(None), 1, Ran(0, "fine"))
    assert threading.main_thread() not in started


def test_an_agent_without_a_descriptor_left_goes_by_what_it_saw_before(tmp_path: Path) -> None:
    """Neither the command nor the agent can help it."""

    async def scenario() -> tuple[Facts, Facts, Facts]:
        check = HealthProbe(HealthLimits(command=("sh", "-c", "echo sick; exit 3"), min_disk=1), str(tmp_path), {})
        first, hoard = await check.look(None), []
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 256), hard))
        try:
            with suppress(OSError):
                while True:
                    hoard.append(os.open("/dev/null", os.O_RDONLY))
            second = await check.look(None)
            os.close(hoard.pop())
            os.close(hoard.pop())  # enough for its output
            third = await check.look(None)
        finally:
            for fd in hoard:
                os.close(fd)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        return first, second, third

    first, second, third = within_time(scenario)
    assert first.ran == second.ran == third.ran == Ran(3, "sick")


def test_without_a_thread_left_what_was_seen_before_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def scenario() -> tuple[Facts, Facts, Facts]:
        check = HealthProbe(HealthLimits(command=("true",), min_disk=1), "/tmp", {"CUDA_VISIBLE_DEVICES": ""})
        first = await check.look(None)
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuses)
            second = await check.look(None)
        return first, second, await check.look(None)

    first, second, third = within_time(scenario)
    assert (second.silent, second.ran) == ((), first.ran)
    assert second.disks == first.disks and third.silent == ()


def _all_gone(pids: Path) -> None:
    end = time.monotonic() + DEADLINE
    for pid in map(int, pids.read_text().split()):
        while (process := linux.read_process(pid)) is not None and not process.dead:
            assert time.monotonic() < end, f"{pid} is still there"
            time.sleep(0.01)


# disks ----------------------------------------------------------------------------------------------------------------


def test_the_file_systems_of_logs_and_temporary_files_are_looked_at(tmp_path: Path) -> None:
    facts = looked(HealthLimits(min_disk=1), tmp_path, TMPDIR=str(tmp_path))
    (disk,) = facts.disks  # one file system, one look
    assert (disk.path, disk.use) == (str(tmp_path), "logs")
    room = os.statvfs(tmp_path)
    assert abs(disk.free - room.f_bavail * room.f_frsize) < 1 << 30


def test_no_limit_is_no_look(tmp_path: Path) -> None:
    assert looked(HealthLimits(min_disk=0), tmp_path).disks == ()


def test_a_look_that_hangs_is_not_waited_for_and_there_is_no_second_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "PATIENCE", 0.05)
    hang, calls = threading.Event(), []

    def hangs(places: object) -> tuple[()]:
        calls.append(places)
        hang.wait(DEADLINE)
        return ()

    monkeypatch.setattr(probe, "read_disks", hangs)

    async def scenario() -> tuple[Facts, Facts, int, Facts]:
        look = HealthProbe(HealthLimits(), "/", {"CUDA_VISIBLE_DEVICES": ""}).look
        first, second = await look(None), await look(None)
        before = len(calls)
        hang.set()
        monkeypatch.setattr(probe, "PATIENCE", DEADLINE)
        return first, second, before, await look(None)

    first, second, before, third = within_time(scenario)
    assert (first.silent, second.silent, before) == (("disks",), ("disks",), 1)
    assert third.silent == ()


# GPUs -----------------------------------------------------------------------------------------------------------------


class _Error(Exception):
    pass


def fake_nvml(rows: dict[int, Any], ecc: int = 0) -> Any:
    """NVML for machines without: `rows` are the answers about remapped rows by GPU, or errors."""
    kinds = (
        "LibraryNotFound",
        "DriverNotLoaded",
        "GpuIsLost",
        "ResetRequired",
        "Unknown",
        "NotSupported",
        "NoPermission",
    )
    errors = {f"NVMLError_{kind}": type(kind, (_Error,), {}) for kind in kinds}
    nvml = SimpleNamespace(NVMLError=_Error, **errors)

    def answer(index: int) -> Any:
        if isinstance(rows[index], str):
            raise getattr(nvml, f"NVMLError_{rows[index]}")(rows[index])
        return rows[index]

    def handle(index: int) -> int:
        if rows[index] == "GpuIsLost":
            answer(index)
        return index

    def no_mig(handle: int) -> int:
        raise nvml.NVMLError_NotSupported

    nvml.nvmlDeviceGetCount = lambda: len(rows)
    nvml.nvmlDeviceGetHandleByIndex = handle
    nvml.nvmlDeviceGetUUID = lambda index: f"GPU-{index}"
    nvml.nvmlDeviceGetMaxMigDeviceCount = no_mig
    nvml.nvmlDeviceGetRemappedRows = answer
    nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC = 1, 0
    nvml.nvmlDeviceGetTotalEccErrors = lambda index, kind, counter: ecc
    return nvml


def test_broken_gpus_are_known_by_what_nvml_says() -> None:
    good, pending, failed = (0, 0, 0, 0), (0, 1, 1, 0), (0, 1, 0, 1)
    found = read(fake_nvml({0: good, 1: pending, 2: failed, 3: "GpuIsLost", 4: "NoPermission"}), None)
    assert [(gpu.index, gpu.uuid) for gpu in found] == [(0, "GPU-0"), (1, "GPU-1"), (2, "GPU-2"), (3, ""), (4, "GPU-4")]
    assert [gpu.trouble.split(";")[0] for gpu in found] == [
        "",
        "a bad row of its memory is to be replaced",
        "a bad row of its memory could not be replaced",
        "NVML says: GpuIsLost",
        "",
    ]


def test_older_gpus_are_known_by_their_uncorrectable_errors() -> None:
    (gpu,) = read(fake_nvml({0: "NotSupported"}, ecc=2), None)
    assert gpu.trouble == "2 uncorrectable memory errors; reset the GPU"


def test_gpus_are_known_from_the_first_look_that_finds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([None, (GpuHealth(0, "GPU-0"), GpuHealth(1, "GPU-1")), (GpuHealth(0, "GPU-0"),)])

    def busy(choice: str | None) -> tuple[GpuHealth, ...]:
        if (answer := next(answers)) is None:
            raise OSError("busy")
        return answer

    monkeypatch.setattr(probe, "read_gpus", busy)

    async def scenario() -> list[tuple[str, ...]]:
        check = HealthProbe(HealthLimits(min_disk=0), "/", {})
        return [(await check.look(None)).known for _ in range(3)]

    assert within_time(scenario) == [(), ("GPU-0", "GPU-1"), ("GPU-0", "GPU-1")]


def test_only_gpus_that_workers_see_are_looked_at() -> None:
    nvml = fake_nvml(dict.fromkeys(range(4), (0, 0, 0, 0)))
    assert [gpu.index for gpu in read(nvml, "1,GPU-3")] == [1, 3]


def test_a_node_for_which_no_gpu_is_visible_has_none(tmp_path: Path) -> None:
    assert looked(HealthLimits(), tmp_path, CUDA_VISIBLE_DEVICES="").gpus == ()


def test_real_gpus_are_found_and_good(tmp_path: Path) -> None:
    """Where there are any: `pip install nvidia-ml-py` and run this file on a machine with a GPU."""
    pynvml = pytest.importorskip("pynvml")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        pytest.skip(str(error))
    count = pynvml.nvmlDeviceGetCount()
    pynvml.nvmlShutdown()
    facts = looked(HealthLimits(), tmp_path)
    assert len(facts.gpus) == len(facts.known) == count
    assert facts.gpus == tuple(GpuHealth(index, uuid) for index, uuid in enumerate(facts.known))
