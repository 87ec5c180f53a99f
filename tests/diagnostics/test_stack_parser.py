"""What py-spy and faulthandler print, and the locations of workers."""

import faulthandler
import json
import threading

import pytest

from ripstop.diagnostics.stack_parser import (
    CodeLocation,
    Frame,
    Thread,
    from_faulthandler,
    from_py_spy,
    main_frames,
    parsed_stacks_text,
    stack_location,
)

SITE = "/venv/lib/python3.11/site-packages/"
TORCH = f"{SITE}torch/distributed/distributed_c10d.py"
WRAPPER = Frame("_exception_logger.<locals>.wrapper", f"{SITE}torch/distributed/c10d_logger.py", 83)
BARE_WRAPPER = Frame("wrapper", f"{SITE}torch/distributed/c10d_logger.py", 83)  # as faulthandler writes it
STEP, SCRIPT = Frame("step", "/home/me/train.py", 41), Frame("<module>", "/home/me/train.py", 50)


@pytest.mark.parametrize(
    ("frames", "expected"),
    [
        ((Frame("all_reduce", TORCH, 3252), WRAPPER, STEP, SCRIPT), CodeLocation("all_reduce", "train.py:41", True)),
        ((Frame("all_reduce", TORCH, 3252), BARE_WRAPPER, STEP), CodeLocation("all_reduce", "train.py:41", True)),
        ((Frame("_wait", TORCH, 9), Frame("barrier", TORCH, 3), STEP), CodeLocation("barrier", "train.py:41", True)),
        ((Frame("load_batch", "/home/me/data.py", 17), STEP, SCRIPT), CodeLocation("load_batch", "data.py:17", False)),
        ((Frame("get", "/usr/lib/python3.12/queue.py", 171), STEP), CodeLocation("get", "train.py:41", False)),
        ((Frame("run", f"{SITE}tool/main.py", 7),), CodeLocation("run", "main.py:7", False)),
        ((), CodeLocation("", "", False)),
    ],
)
def test_the_location_of_a_worker_is_in_the_users_code(frames: tuple[Frame, ...], expected: CodeLocation) -> None:
    assert stack_location(frames) == expected


def test_a_dump_of_py_spy_is_parsed() -> None:
    frames = [{"name": "f", "filename": "/x/a.py", "line": 3}, {"name": "<module>", "filename": "/x/a.py", "line": 9}]
    dump = [
        {"thread_name": None, "os_thread_id": 8, "frames": []},
        {"thread_name": "MainThread", "os_thread_id": 7, "frames": frames},
    ]
    threads = from_py_spy(json.dumps(dump), pid=7)
    assert [thread.name for thread in threads] == ["8", "MainThread"]
    assert main_frames(threads) == (Frame("f", "/x/a.py", 3), Frame("<module>", "/x/a.py", 9))


@pytest.mark.parametrize("text", ["", "no", "{}", "[1]", '[{"frames": 1}]', '[{"thread_name": "x"}]'])
def test_other_text_is_no_dump(text: str) -> None:
    assert from_py_spy(text, pid=7) == ()
    assert from_faulthandler(text) == ()


def test_a_dump_of_faulthandler_is_parsed(tmp_path) -> None:
    ended = threading.Event()
    other = threading.Thread(target=ended.wait)
    other.start()
    try:
        with (tmp_path / "dump").open("w+") as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            threads = from_faulthandler(file.read())
    finally:
        ended.set()
        other.join()
    assert main_frames(threads)[0].function == "test_a_dump_of_faulthandler_is_parsed"
    assert any("wait" in frame.function for thread in threads if not thread.main for frame in thread.frames)


def test_the_thread_of_ripstop_in_a_worker_is_not_shown() -> None:
    from ripstop.workers.zygote import process

    own = Thread("recorder", (Frame("serve", process.__file__, 1),), main=False)
    main = Thread("MainThread", (Frame("step", "/train.py", 3),), main=True)
    assert parsed_stacks_text([own, main]) == "thread MainThread\n  step (/train.py:3)"
