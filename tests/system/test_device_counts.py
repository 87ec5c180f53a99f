"""Counting devices without torch."""

import os
import sys
from pathlib import Path

import pytest

from ripstop.system import gpus
from ripstop.system.linux import usable_cpu_count


@pytest.mark.parametrize(
    ("choice", "installed", "count"),
    [
        (None, 8, 8),
        (None, 0, 0),
        (None, None, 0),
        ("0,1", 8, 2),
        ("0, 1", 8, 2),
        ("", 8, 0),
        ("-1", 8, 0),
        ("NoDevFiles", 8, 0),
        ("0,-1,1", 8, 1),
        ("0,9,1", 8, 1),
        ("7", 8, 1),
        ("0,1", None, 2),
        ("0,1", 0, 0),
        ("GPU-aa,GPU-bb", 8, 2),
        ("MIG-aa,MIG-bb", 1, 2),
    ],
)
def test_devices_are_counted_up_to_the_first_invalid_one(choice: str | None, installed: int | None, count: int) -> None:
    assert gpus.count_visible_gpus(choice, installed) == count


def test_cpus_are_those_this_process_may_use() -> None:
    assert usable_cpu_count() == len(os.sched_getaffinity(0))


def test_the_driver_is_read_before_its_tool_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / name).mkdir()
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(gpus, "PROC_GPUS", tmp_path)
    assert gpus.visible_gpu_count({}) == 2
    assert gpus.visible_gpu_count({"CUDA_VISIBLE_DEVICES": "1"}) == 1


def test_the_drivers_tool_is_run_if_there_is_no_other_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'GPU 0: H200 (UUID: GPU-aa)'\necho 'GPU 1: H200 (UUID: GPU-bb)'\n")
    tool.chmod(0o755)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(gpus, "PROC_GPUS", tmp_path / "nothing")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpus.visible_gpu_count({}) == 2
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert gpus.visible_gpu_count({}) == 0
