"""Whatever a worker leaves behind when it dies becomes a small, readable failure."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ripstop.diagnostics.evidence import (
    MemoryEvidence,
    error_file_evidence,
    evidence_of_failed_start,
    exception_evidence,
    gather_evidence,
    memory_evidence,
    oom_evidence,
    parse_error_evidence,
    tail_evidence,
)
from ripstop.model.failure import Failure, exit_reason
from ripstop.model.round import Address, Place
from ripstop.model.text_formatting import clean, truncate_bytes, truncate_middle
from ripstop.system.cgroup_memory import memory_cgroup_path

PLACE = Place(3, 1, 2, 4, 8, 4, 4, 8, Address("localhost", 29500), 2)
NOW = 1_800_000_000.0
GIB = 1 << 30

with_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch's own @record")


def evidence(directory: Path, returncode: int, before: MemoryEvidence | None = None, at: float = NOW) -> Failure:
    return gather_evidence(
        PLACE,
        1,
        host="node1",
        at=at,
        pid=4242,
        returncode=returncode,
        logs=directory,
        error_file=directory / "error.json",
        stderr=directory / "stderr.log",
        before=before or MemoryEvidence(),
    )


def run(script: str, directory: Path) -> int:
    """Run a real worker with its stderr and its error file in the directory."""
    with (directory / "stderr.log").open("ab") as stderr:
        return subprocess.run(
            [sys.executable, "-u", "-c", script],
            env=os.environ | {"TORCHELASTIC_ERROR_FILE": str(directory / "error.json")},
            stderr=stderr,
            timeout=120,
            check=False,
        ).returncode


# real ends


def test_an_exit_code_is_reported(tmp_path: Path) -> None:
    failure = evidence(tmp_path, run("raise SystemExit(3)", tmp_path))
    assert failure == Failure(
        rank=5,
        local_rank=1,
        round=3,
        host="node1",
        at=NOW,
        pid=4242,
        exitcode=3,
        message="exited with code 3",
        logs=str(tmp_path),
    )


def test_an_exception_is_found_without_record(tmp_path: Path) -> None:
    failure = evidence(tmp_path, run("print('step 1', file=__import__('sys').stderr)\n1 / 0", tmp_path))
    assert failure.message == "ZeroDivisionError: division by zero"
    assert failure.traceback.startswith("Traceback (most recent call last):\n")
    assert failure.log_tail[0] == "step 1"
    assert failure.error_file == ""


def test_an_exception_that_was_handled_is_not_the_reason_of_a_crash(tmp_path: Path) -> None:
    script = "import os, traceback\ntry: 1 / 0\nexcept Exception: traceback.print_exc()\nos.abort()"
    failure = evidence(tmp_path, run(script, tmp_path))
    assert (failure.signal, failure.exitcode) == ("SIGABRT", None)
    assert failure.message == "died of SIGABRT (aborted)"
    assert failure.log_tail[-1] == "ZeroDivisionError: division by zero"


def test_a_segmentation_fault_has_its_name(tmp_path: Path) -> None:
    failure = evidence(tmp_path, run("import os; os.kill(os.getpid(), 11)", tmp_path))
    assert (failure.signal, failure.message) == ("SIGSEGV", "died of SIGSEGV (segmentation fault)")


def test_a_kill_from_outside_is_reported_as_not_sent_by_ripstop() -> None:
    assert exit_reason(-signal.SIGKILL) == "killed by SIGKILL, which was not sent by ripstop"


def test_a_signal_without_a_name_has_its_number() -> None:
    assert exit_reason(-40).startswith("died of SIG40")


@with_torch
def test_an_error_file_of_torchs_record_is_parsed(tmp_path: Path) -> None:
    script = (
        "from torch.distributed.elastic.multiprocessing.errors import record\n"
        "@record\n"
        "def main():\n"
        "    raise ValueError('the loss is ∞')\n"
        "main()\n"
    )
    began = time.time()
    code = run(script, tmp_path)
    failure = evidence(tmp_path, code, at=time.time() + 100)
    assert failure.exitcode == 1
    assert failure.message == "ValueError: the loss is ∞"
    assert failure.traceback.startswith("Traceback (most recent call last):\n")
    assert failure.traceback.endswith("ValueError: the loss is ∞")
    assert failure.error_file == str(tmp_path / "error.json")
    assert began - 1 <= failure.at <= time.time()


@with_torch
def test_an_error_file_that_torch_copied_from_a_child_is_parsed(tmp_path: Path) -> None:
    child = {
        "message": {"message": "KeyError: 'x'", "extraInfo": {"py_callstack": "Trace\n", "timestamp": "1700000000"}}
    }
    (tmp_path / "child.json").write_text(json.dumps(child))
    script = (
        "from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure, record\n"
        "@record\n"
        "def main():\n"
        f"    failure = ProcessFailure(0, 99, -11, {str(tmp_path / 'child.json')!r})\n"
        "    raise ChildFailedError('trainer', {0: failure})\n"
        "main()\n"
    )
    failure = evidence(tmp_path, run(script, tmp_path))
    assert failure.message == "KeyError: 'x'"
    assert failure.traceback == "Trace"
    assert failure.at == 1_700_000_000.0


# error files


def parsed(data: Any) -> tuple[str, str, float | None]:
    text = json.dumps(data).encode()
    parsed = parse_error_evidence(text, len(text))
    return parsed.message, parsed.traceback, parsed.at


def test_a_message_may_be_a_string() -> None:
    assert parsed({"message": "it broke", "timestamp": 1700000000}) == ("it broke", "", 1_700_000_000.0)


def test_a_message_may_be_nested() -> None:
    inner = {"message": "deep", "extraInfo": {"py_callstack": "Trace", "timestamp": "1700000001"}}
    assert parsed({"message": {"message": inner, "errorCode": -11}}) == ("deep", "Trace", 1_700_000_001.0)


@pytest.mark.parametrize("timestamp", ["nan", "soon", -1, 0, None, [], 1e300, "1" * 400])
def test_an_invalid_timestamp_is_ignored(timestamp: Any) -> None:
    assert parsed({"message": "x", "timestamp": timestamp})[2] is None


@pytest.mark.parametrize(
    "data",
    [b"[1]", b"7", b"{}", b'{"message": {"message": "ValueError: cut he', b"\xff\xfe\x00", b"[" * 100_000, b"1" * 9999],
)
def test_a_broken_error_file_is_reported_as_broken(data: bytes) -> None:
    parsed = parse_error_evidence(data, len(data))
    assert parsed.message.startswith("the error file ")
    assert len(parsed.message.encode()) <= 2048


def test_the_beginning_of_a_truncated_error_file_is_shown() -> None:
    data = b'{"message": {"message": "ValueError: cut he'
    assert "ValueError: cut he" in parse_error_evidence(data, len(data)).message


@given(
    st.binary(max_size=300) | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(repr).map(str.encode)
)
def test_no_content_of_an_error_file_raises(data: bytes) -> None:
    parse_error_evidence(data, len(data)).message.encode()


@given(
    st.dictionaries(
        st.sampled_from(["message", "extraInfo", "timestamp", "py_callstack"]),
        st.recursive(
            st.none() | st.floats() | st.text(max_size=5),
            lambda inner: st.dictionaries(
                st.sampled_from(["message", "extraInfo", "timestamp", "py_callstack"]), inner
            ),
        ),
    )
)
def test_no_json_with_torchs_keys_raises(data: Any) -> None:
    text = json.dumps(data).encode()
    parse_error_evidence(text, len(text)).traceback.encode()


def test_only_a_part_of_a_huge_error_file_is_read(tmp_path: Path) -> None:
    with (tmp_path / "error.json").open("wb") as file:
        file.write(b'{"message": "' + b"x" * 3000)
        file.truncate(GIB)  # a hole: it takes no room on the disk
    failure = evidence(tmp_path, 1)
    assert failure.message.startswith('the error file is too long (1.0 GiB); it begins: {"message": "xxx')
    assert len(failure.message.encode()) <= 2048


def test_an_error_file_that_is_a_pipe_or_a_directory_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "error.json")
    assert evidence(tmp_path, 1).message.endswith("is not a file")
    (tmp_path / "d").mkdir()
    parsed = error_file_evidence(tmp_path / "d")
    assert parsed is not None
    assert parsed.message.endswith("is not a file")


def test_with_an_empty_error_file_the_exit_status_is_reported(tmp_path: Path) -> None:
    (tmp_path / "error.json").touch()
    assert evidence(tmp_path, 3).message == "exited with code 3"


def test_the_time_of_the_exception_is_more_precise_than_torchs_seconds(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    path.write_text(json.dumps({"message": "x", "timestamp": 1700000000}))
    os.utime(path, (1700000000.75, 1700000000.75))
    assert evidence(tmp_path, 1).at == 1700000000.75
    os.utime(path, (1600000000, 1600000000))  # a file server with a clock of its own
    assert evidence(tmp_path, 1).at == 1700000000.0


def test_long_messages_and_tracebacks_are_truncated() -> None:
    message, traceback, _ = parsed({"message": {"message": "é" * 9000, "extraInfo": {"py_callstack": "ä\n" * 9000}}})
    assert len(message.encode()) <= 2048
    assert message.endswith("…")
    assert len(traceback.encode()) <= 8192
    assert "…" in traceback


# stderr


def test_the_last_lines_are_those_at_the_end_of_a_large_file(tmp_path: Path) -> None:
    with (tmp_path / "stderr.log").open("w") as file:
        file.writelines(f"line {number}\n" for number in range(100_000))
        file.write("\n\n" + "w" * 5000)
    tail = evidence(tmp_path, 3).log_tail
    assert len(tail) == 20
    assert tail[-2] == "line 99999"
    assert len(tail[-1].encode()) <= 400


def test_binary_and_coloured_stderr_becomes_plain_text(tmp_path: Path) -> None:
    (tmp_path / "stderr.log").write_bytes(b"\x1b[31mred\x1b[0m \xff\xfe\x00\x07\r 10%\r 20%\r\ndone")
    assert evidence(tmp_path, 3).log_tail == ("red ��", " 10%", " 20%", "done")


def test_a_missing_stderr_file_is_no_error(tmp_path: Path) -> None:
    assert evidence(tmp_path / "missing", 3).log_tail == ()


def test_an_exception_is_found_after_torchs_rank_prefix() -> None:
    text = (
        "some warning\n"
        "[rank0]: Traceback (most recent call last):\n"
        '[rank0]:   File "train.py", line 9, in <module>\n'
        "[rank0]:     dist.all_reduce(x)\n"
        "[rank0]: torch.distributed.DistBackendError: NCCL error\n"
        "[rank0]: Last error:\n"
        "[rank0]: remote process exited\n"
        "[rank0]:[W1] Warning: destroy_process_group() was not called\n"
    )
    message, traceback = exception_evidence(text)
    assert message == "torch.distributed.DistBackendError: NCCL error"
    assert "remote process exited" in traceback
    assert "[rank0]" not in traceback.split("remote")[0]


def test_of_several_exceptions_the_last_is_taken() -> None:
    first, second = ("Traceback (most recent call last):\n  File x\n" + name for name in ("AError: a\n\n", "BError\n"))
    assert exception_evidence(first + second)[0] == "BError"


@pytest.mark.parametrize(
    "text", ["", "Traceback (most recent call last):", "Traceback (most recent call last):\n  F\n"]
)
def test_an_incomplete_traceback_is_ignored(text: str) -> None:
    assert exception_evidence(text) == ("", "")


@given(st.text())
def test_any_text_can_be_cleaned_and_cut(text: str) -> None:
    cleaned = clean(text)
    assert not set(cleaned) & set("\x00\x07\x1b\r\x7f\x9b")
    assert len(truncate_bytes(cleaned, 10).encode()) <= 10
    assert len(truncate_middle(cleaned, 40).encode()) <= 40
    tail_evidence(cleaned)
    exception_evidence(cleaned)


# memory


def test_a_kill_with_a_higher_oom_count_is_attributed_to_the_oom_killer() -> None:
    before, after = (
        MemoryEvidence(kills=1, limit=4 * GIB, peak=GIB),
        MemoryEvidence(kills=2, limit=4 * GIB, peak=int(3.9 * GIB)),
    )
    assert oom_evidence(before, after) == "killed by the kernel's OOM killer (cgroup limit 4.0 GiB, peak 3.9 GiB)"
    assert oom_evidence(MemoryEvidence(0), MemoryEvidence(1)) == "killed by the kernel's OOM killer"
    assert "machine" in oom_evidence(MemoryEvidence(0, machine=True), MemoryEvidence(1, machine=True))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (MemoryEvidence(1), MemoryEvidence(1)),
        (MemoryEvidence(), MemoryEvidence(1)),
        (MemoryEvidence(1), MemoryEvidence()),
        (MemoryEvidence(0), MemoryEvidence(1, machine=True)),
    ],
)
def test_a_kill_without_a_higher_oom_count_is_not(before: MemoryEvidence, after: MemoryEvidence) -> None:
    assert oom_evidence(before, after) == ""


def test_only_sigkill_is_attributed_to_memory(tmp_path: Path) -> None:
    now = memory_evidence()
    if now.kills is None:
        pytest.skip("this kernel does not count OOM kills")
    before = MemoryEvidence(now.kills - 1, machine=now.machine)
    killed, crashed = evidence(tmp_path, -signal.SIGKILL, before), evidence(tmp_path, -signal.SIGSEGV, before)
    assert killed.oom == killed.message
    assert killed.oom.startswith("killed by the kernel's OOM killer")
    assert crashed.oom == ""


AGENT = """
import os, subprocess, sys
from pathlib import Path
from ripstop.model.text_formatting import clean, truncate_bytes, truncate_middle
from ripstop.model.round import Address, Place
from ripstop.diagnostics.evidence import gather_evidence, memory_evidence

Path(sys.argv[1], "cgroup.procs").write_text(str(os.getpid()))
before = memory_evidence()
code = subprocess.run([sys.executable, "-c", "b'x' * (200 << 20)"]).returncode
nowhere = Path("/nowhere")
place = Place(1, 0, 1, 0, 1, 1, 0, 1, Address("localhost", 1), 0)
print(gather_evidence(place, 0, host="h", at=1.0, pid=1, returncode=code, logs=nowhere, error_file=nowhere,
                      stderr=None, before=before).oom)
"""


@pytest.fixture
def small_cgroup() -> Iterator[Path]:
    version, path = memory_cgroup_path(Path("/proc/self/cgroup").read_text())
    group = Path(f"/sys/fs/cgroup/memory{path}/ripstop_test_{os.getpid()}")
    if version != 1 or not group.parent.is_dir() or not os.access(group.parent, os.W_OK):
        pytest.skip("needs the right to make a memory cgroup (version 1)")
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(64 << 20))
        yield group
    finally:
        group.rmdir()


def test_a_real_oom_kill_is_recognised(small_cgroup: Path) -> None:
    agent = [sys.executable, "-c", AGENT, str(small_cgroup)]
    output = subprocess.run(agent, capture_output=True, text=True, timeout=120, check=True).stdout
    assert output.startswith("killed by the kernel's OOM killer (cgroup limit 64.0 MiB, peak ")


def test_a_worker_that_was_not_started_has_neither_code_nor_signal(tmp_path: Path) -> None:
    failure = evidence_of_failed_start(PLACE, 2, host="node1", at=NOW, why="no such program: tarin", logs=tmp_path)
    assert (failure.rank, failure.exitcode, failure.signal, failure.pid) == (6, None, None, None)
    assert failure.message == "could not be started: no such program: tarin"
