"""The locations of workers, and the odd ranks of a hang."""

import faulthandler
import json
import threading

import pytest

from ripstop.diagnostics.failure_report import order, render, root_cause
from ripstop.diagnostics.stacks import (
    CodeLocation,
    Frame,
    Thread,
    as_text,
    code_location,
    from_faulthandler,
    from_py_spy,
    in_words,
    main_frames,
    odd_ones,
)
from ripstop.model.failure import Failure, Hang, JobReport
from ripstop.model.round import Outcome

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
    assert code_location(frames) == expected


def waiting(call: str = "all_reduce", where: str = "train.py:41", state: str = "S") -> Hang:
    return Hang(90.0, "no heartbeat", call, where, True, state)


def busy(call: str = "load_batch", where: str = "data.py:17", state: str = "S", sign: str = "no heartbeat") -> Hang:
    return Hang(90.0, sign, call, where, False, state)


@pytest.mark.parametrize(
    ("hangs", "odd"),
    [
        ([waiting(), waiting(), busy(), waiting()], {2}),
        ([waiting(), busy()], {1}),
        ([busy(), busy(), waiting(), busy()], {0, 1, 3}),  # one was early, the others never came
        ([waiting(), waiting(), waiting("broadcast", "train.py:60")], {2}),
        ([busy(), busy("step", "train.py:3"), busy()], {1}),
        ([waiting(), waiting(state="T"), waiting()], {1}),
        ([waiting(), busy(where=""), busy()], {2}),  # nothing is known of rank 1
        ([waiting(), waiting("broadcast", "train.py:60")], set()),
        ([waiting(), waiting()], set()),
        ([busy(sign=""), busy("step", "train.py:3")], {1}),
        ([busy(), busy("step", "train.py:3")], set()),
        ([busy()], set()),
        ([], set()),
    ],
)
def test_the_odd_ranks_are_those_that_the_others_wait_for(hangs: list[Hang], odd: set[int]) -> None:
    assert odd_ones(dict(enumerate(hangs))) == odd


def test_a_hang_in_words_has_the_location_of_every_rank() -> None:
    hangs = dict(enumerate([waiting(), waiting(), busy(), waiting()]))
    assert in_words(hangs) == "ranks 0,1,3 wait in all_reduce (train.py:41); rank 2 is in load_batch (data.py:17)"


def test_many_ranks_are_shown_as_ranges_and_many_locations_are_counted() -> None:
    hangs = dict(enumerate([waiting()] * 1000 + [busy(where=f"data.py:{line}") for line in range(9)]))
    text = in_words(hangs)
    assert text.startswith("ranks 0-999 wait in all_reduce (train.py:41); rank 1006 is in load_batch (data.py:6); ")
    assert text.endswith("; 6 more elsewhere")


def test_a_stopped_process_is_reported_as_stopped() -> None:
    assert in_words({3: busy(state="T")}) == "rank 3 is in load_batch (data.py:17), stopped by a signal"


def hung(rank: int, hang: Hang, at: float = 100.0) -> Failure:
    return Failure(rank, 0, 1, "host", at, pid=70 + rank, message="m", traceback="thread Main\n  f (x.py:1)", hang=hang)


def test_the_report_of_a_hang_names_the_odd_rank_and_shows_its_stack() -> None:
    failures = (hung(0, waiting(), 99.0), hung(1, waiting(), 98.0), hung(2, busy(), 100.0))
    cause = root_cause(failures)
    assert cause is not None and cause.rank == 2
    text = render(JobReport("job", Outcome.FAILED, "it hangs", 1, 0, failures))
    assert "hang: ranks 0,1 wait in all_reduce (train.py:41); rank 2 is in load_batch (data.py:17)" in text
    assert "root cause: rank 2 on host" in text
    assert "how      made no progress for 90 s (no heartbeat)" in text
    assert "  stack\n    thread Main\n      f (x.py:1)\n" in text


def test_a_worker_that_died_comes_before_workers_that_wait() -> None:
    death = Failure(5, 0, 1, "host", 101.0, exitcode=1, message="ValueError: no", traceback="ValueError: no")
    assert [f.rank for f in order([hung(0, waiting()), hung(1, waiting()), death])] == [5, 0, 1]


# what tools print -----------------------------------------------------------------------------------------------------


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
    assert as_text([own, main]) == "thread MainThread\n  step (/train.py:3)"
