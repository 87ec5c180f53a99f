"""Health measurements of this machine, and health commands as real processes."""

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

from ripstop.agent.health import measurements
from ripstop.agent.health.assessment import CommandResult, HealthFacts
from ripstop.agent.health.command import HealthCommand
from ripstop.agent.health.measurements import HealthProbe
from ripstop.model.config import HealthLimits
from ripstop.system import linux
from ripstop.system.gpus import GpuHealth, health_of_visible

DEADLINE = 120.0


def within_time(work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    async def scenario() -> Any:
        async with asyncio.timeout(DEADLINE):
            return await work()

    return asyncio.run(scenario())


def run(*command: str, timeout: float = DEADLINE, **environ: str) -> CommandResult:
    env = {**os.environ, **environ}
    found: CommandResult = within_time(lambda: HealthCommand(command, env).run(timeout))
    return found


def measured(limits: HealthLimits, logs: Path, **environ: str) -> HealthFacts:
    found: HealthFacts = within_time(lambda: HealthProbe(limits, str(logs), environ).read(None))
    return found


# the user's command ---------------------------------------------------------------------------------------------------


def test_a_command_ends_with_its_code_and_its_last_line() -> None:
    assert run("sh", "-c", "echo fine") == CommandResult(0, "fine")
    assert run("sh", "-c", "echo one; echo two >&2; echo; exit 3") == CommandResult(3, "two")
    assert run("sh", "-c", "kill -9 $$") == CommandResult(-9)


def test_a_command_that_cannot_be_started_has_an_error(tmp_path: Path) -> None:
    assert run(str(tmp_path / "missing")) == CommandResult(None, error="No such file or directory")


def test_a_command_has_the_workers_environment_and_no_shell() -> None:
    assert run("sh", "-c", "echo $NAME", NAME="value") == CommandResult(0, "value")
    assert run("echo", "$NAME", NAME="value") == CommandResult(0, "$NAME")


def test_a_command_that_hangs_is_killed_with_all_its_group(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    script = f"sleep 1000 & echo $$ $! > {pids}.new; mv {pids}.new {pids}; echo thinking; wait"
    for timeout in (0.5, 2.0, DEADLINE / 2):  # a machine under load may need longer until the command hangs
        result = run("sh", "-c", script, timeout=timeout)
        if result.last_line:
            break
    assert result == CommandResult(None, "thinking")
    _all_exited(pids)


def test_processes_that_a_command_leaves_in_its_group_are_killed(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    assert run("sh", "-c", f"sleep 1000 & echo $! > {pids}; exit 0") == CommandResult(0)
    _all_exited(pids)


def test_a_cancelled_command_leaves_no_process(tmp_path: Path) -> None:
    pids = tmp_path / "pids"

    async def scenario() -> None:
        script = f"sleep 1000 & echo $$ $! > {pids}.new; mv {pids}.new {pids}; wait"
        check = asyncio.create_task(HealthCommand(("sh", "-c", script), os.environ).run(DEADLINE))
        while not pids.exists():  # noqa: ASYNC110  # it is another process that makes it
            await asyncio.sleep(0.01)
        check.cancel()
        await asyncio.wait([check])

    within_time(scenario)
    _all_exited(pids)


def test_the_last_line_of_a_large_output_is_kept() -> None:
    lines = "import sys; sys.stdout.write('x' * 3_000_000 + '\\nlast line\\n')"
    assert run(sys.executable, "-c", lines) == CommandResult(0, "last line")


def test_a_command_that_hangs_at_its_start_does_not_block_the_loop_and_runs_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a file server that hangs: the event loop continues, and no second thread waits for the command."""
    go, started, start = threading.Event(), [], subprocess.Popen

    def hangs(*args: Any, **more: Any) -> Any:
        started.append(threading.current_thread())
        go.wait(DEADLINE)
        return start(*args, **more)

    monkeypatch.setattr(subprocess, "Popen", hangs)

    async def scenario() -> tuple[CommandResult, CommandResult, int, CommandResult]:
        check = HealthCommand(("echo", "fine"), os.environ)
        first, second = await check.run(0.05), await check.run(0.05)
        while not started:  # noqa: ASYNC110  # it is another thread
            await asyncio.sleep(0.01)
        before = len(started)
        go.set()
        return first, second, before, await check.run(DEADLINE)

    assert within_time(scenario) == (CommandResult(None), CommandResult(None), 1, CommandResult(0, "fine"))
    assert threading.main_thread() not in started


def test_an_agent_without_free_descriptors_keeps_its_last_measurements(tmp_path: Path) -> None:
    """Neither the command nor the agent can help it."""

    async def scenario() -> tuple[HealthFacts, HealthFacts, HealthFacts]:
        check = HealthProbe(HealthLimits(command=("sh", "-c", "echo sick; exit 3"), min_disk=1), str(tmp_path), {})
        first, hoard = await check.read(None), []
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 256), hard))
        try:
            with suppress(OSError):
                while True:
                    hoard.append(os.open("/dev/null", os.O_RDONLY))
            second = await check.read(None)
            os.close(hoard.pop())
            os.close(hoard.pop())  # enough for its output
            third = await check.read(None)
        finally:
            for fd in hoard:
                os.close(fd)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        return first, second, third

    first, second, third = within_time(scenario)
    assert first.command == second.command == third.command == CommandResult(3, "sick")


def test_an_agent_that_cannot_start_a_thread_keeps_its_last_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def scenario() -> tuple[HealthFacts, HealthFacts, HealthFacts]:
        check = HealthProbe(HealthLimits(command=("true",), min_disk=1), "/tmp", {"CUDA_VISIBLE_DEVICES": ""})
        first = await check.read(None)
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuses)
            second = await check.read(None)
        return first, second, await check.read(None)

    first, second, third = within_time(scenario)
    assert (second.timed_out, second.command) == ((), first.command)
    assert second.disks == first.disks and third.timed_out == ()


def _all_exited(pids: Path) -> None:
    end = time.monotonic() + DEADLINE
    for pid in map(int, pids.read_text().split()):
        while (process := linux.read_linux_process(pid)) is not None and not process.dead:
            assert time.monotonic() < end, f"{pid} is still there"
            time.sleep(0.01)


# disks ----------------------------------------------------------------------------------------------------------------


def test_the_file_systems_of_logs_and_temporary_files_are_measured(tmp_path: Path) -> None:
    facts = measured(HealthLimits(min_disk=1), tmp_path, TMPDIR=str(tmp_path))
    (disk,) = facts.disks  # one file system, one measurement
    assert (disk.path, disk.use) == (str(tmp_path), "logs")
    room = os.statvfs(tmp_path)
    assert abs(disk.free - room.f_bavail * room.f_frsize) < 1 << 30


def test_without_a_limit_disks_are_not_measured(tmp_path: Path) -> None:
    assert measured(HealthLimits(min_disk=0), tmp_path).disks == ()


def test_a_measurement_that_hangs_times_out_and_is_not_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurements, "MEASUREMENT_TIMEOUT_S", 0.5)
    hang, calls = threading.Event(), []

    def hangs(places: object) -> tuple[()]:
        calls.append(places)
        hang.wait(DEADLINE)
        return ()

    monkeypatch.setattr(measurements, "measure_disks", hangs)

    async def scenario() -> tuple[HealthFacts, HealthFacts, int, HealthFacts]:
        read = HealthProbe(HealthLimits(), "/", {"CUDA_VISIBLE_DEVICES": ""}).read
        first, second = await read(None), await read(None)
        before = len(calls)
        hang.set()
        monkeypatch.setattr(measurements, "MEASUREMENT_TIMEOUT_S", DEADLINE)
        return first, second, before, await read(None)

    first, second, before, third = within_time(scenario)
    assert (first.timed_out, second.timed_out, before) == (("disks",), ("disks",), 1)
    assert third.timed_out == ()


# GPUs -----------------------------------------------------------------------------------------------------------------


class _Error(Exception):
    pass


def fake_nvml(rows: dict[int, Any], ecc: int = 0) -> Any:
    """A fake NVML: `rows` are the remapped rows by GPU, or the name of an error."""
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

    def remapped_rows(index: int) -> Any:
        if isinstance(rows[index], str):
            raise getattr(nvml, f"NVMLError_{rows[index]}")(rows[index])
        return rows[index]

    def handle(index: int) -> int:
        if rows[index] == "GpuIsLost":
            remapped_rows(index)
        return index

    def no_mig(handle: int) -> int:
        raise nvml.NVMLError_NotSupported

    nvml.nvmlDeviceGetCount = lambda: len(rows)
    nvml.nvmlDeviceGetHandleByIndex = handle
    nvml.nvmlDeviceGetUUID = lambda index: f"GPU-{index}"
    nvml.nvmlDeviceGetMaxMigDeviceCount = no_mig
    nvml.nvmlDeviceGetRemappedRows = remapped_rows
    nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC = 1, 0
    nvml.nvmlDeviceGetTotalEccErrors = lambda index, kind, counter: ecc
    return nvml


def test_broken_gpus_are_found_by_nvmls_reports() -> None:
    good, pending, failed = (0, 0, 0, 0), (0, 1, 1, 0), (0, 1, 0, 1)
    found = health_of_visible(fake_nvml({0: good, 1: pending, 2: failed, 3: "GpuIsLost", 4: "NoPermission"}), None)
    assert [(gpu.index, gpu.uuid) for gpu in found] == [(0, "GPU-0"), (1, "GPU-1"), (2, "GPU-2"), (3, ""), (4, "GPU-4")]
    assert [gpu.error.split(";")[0] for gpu in found] == [
        "",
        "a bad memory row is waiting to be replaced",
        "a bad memory row could not be replaced",
        "NVML reports: GpuIsLost",
        "",
    ]


def test_older_gpus_are_judged_by_their_uncorrectable_errors() -> None:
    (gpu,) = health_of_visible(fake_nvml({0: "NotSupported"}, ecc=2), None)
    assert gpu.error == "2 uncorrectable memory errors; reset the GPU"


def test_gpus_are_known_from_the_first_measurement_that_finds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    results = iter([None, (GpuHealth(0, "GPU-0"), GpuHealth(1, "GPU-1")), (GpuHealth(0, "GPU-0"),)])

    def busy(choice: str | None) -> tuple[GpuHealth, ...]:
        if (result := next(results)) is None:
            raise OSError("busy")
        return result

    monkeypatch.setattr(measurements, "measure_gpus", busy)

    async def scenario() -> list[tuple[str, ...]]:
        check = HealthProbe(HealthLimits(min_disk=0), "/", {})
        return [(await check.read(None)).known_gpus for _ in range(3)]

    assert within_time(scenario) == [(), ("GPU-0", "GPU-1"), ("GPU-0", "GPU-1")]


def test_only_gpus_that_workers_see_are_measured() -> None:
    nvml = fake_nvml(dict.fromkeys(range(4), (0, 0, 0, 0)))
    assert [gpu.index for gpu in health_of_visible(nvml, "1,GPU-3")] == [1, 3]


def test_a_node_for_which_no_gpu_is_visible_has_none(tmp_path: Path) -> None:
    assert measured(HealthLimits(), tmp_path, CUDA_VISIBLE_DEVICES="").gpus == ()


def test_real_gpus_are_found_and_healthy(tmp_path: Path) -> None:
    """Where there are any: `pip install nvidia-ml-py` and run this file on a machine with a GPU."""
    pynvml = pytest.importorskip("pynvml")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        pytest.skip(str(error))
    count = pynvml.nvmlDeviceGetCount()
    pynvml.nvmlShutdown()
    facts = measured(HealthLimits(), tmp_path)
    assert len(facts.gpus) == len(facts.known_gpus) == count
    assert facts.gpus == tuple(GpuHealth(index, uuid) for index, uuid in enumerate(facts.known_gpus))
