"""Failures of workers: torch's behaviour and ours side by side, error files both ways, and files that are no such."""

import json
import os
import pickle
import re
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ripstop
from ripstop.compat.multiprocessing import errors as ours
from ripstop.diagnostics.evidence import error_file_evidence
from tests.compat.signatures import taken_by_both

theirs = pytest.importorskip("torch.distributed.elastic.multiprocessing.errors")

both = pytest.mark.parametrize("api", [theirs, ours], ids=["torch", "ripstop"])
either_way = pytest.mark.parametrize(
    ("writer", "reader"),
    [(theirs, ours), (ours, theirs), (ours, ours)],
    ids=["read theirs", "read by them", "read ours"],
)


@pytest.fixture
def error_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    return path


@pytest.fixture(autouse=True)
def no_fault_handler() -> Any:
    """`record` enables it for the whole process."""
    import faulthandler

    before = faulthandler.is_enabled()
    yield
    if not before:
        faulthandler.disable()


@pytest.mark.parametrize("name", theirs.__all__)
def test_torchs_arguments_are_accepted(name: str) -> None:
    taken_by_both(getattr(theirs, name), getattr(ours, name))


def broken(text: str = "because") -> None:
    raise ValueError(text)


def failed(decorated: Callable[..., Any], *args: Any) -> None:
    with pytest.raises(ValueError):
        decorated(*args)


# record -------------------------------------------------------------------------------------------------------------


@either_way
def test_an_error_file_of_record_is_read(writer: Any, reader: Any, error_file: Path) -> None:
    before = int(time.time())
    failed(writer.record(broken), "because")
    failure = reader.ProcessFailure(local_rank=1, pid=7, exitcode=1, error_file=str(error_file))
    assert failure.message["message"] == "ValueError: because"
    assert "broken\n    raise ValueError(text)\nValueError: because\n" in failure.message["extraInfo"]["py_callstack"]
    assert before <= failure.timestamp <= time.time()
    assert failure.error_file_data == json.loads(error_file.read_text())


def test_ripstops_own_record_is_read_by_torch_and_by_the_agent(error_file: Path) -> None:
    failed(ripstop.record(broken))
    assert theirs.ProcessFailure(0, 7, 1, str(error_file)).message["message"] == "ValueError: because"
    said = error_file_evidence(error_file)
    assert said is not None and said.message == "ValueError: because"
    assert "in recorded" not in said.traceback


def test_ripstops_own_record_loads_nothing_heavy(tmp_path: Path) -> None:
    script = "import ripstop, sys\n@ripstop.record\ndef main(): return 5\nassert main() == 5\n"
    check = "print([name for name in ('torch', 'asyncio', 'aiohttp', 'ripstop.model.config') if name in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", script + check], text=True) == "[]\n"


@both
def test_a_recorded_function_is_otherwise_the_same(api: Any) -> None:
    def add(one: int, *, other: int) -> int:
        """Adds."""
        return one + other

    recorded = api.record(add)
    assert recorded(1, other=2) == 3 and recorded.__doc__ == "Adds." and recorded.__name__ == "add"


@both
def test_sys_exit_is_zero_or_passes(api: Any, error_file: Path) -> None:
    assert api.record(lambda: sys.exit(0))() is None
    with pytest.raises(SystemExit, match="3"):
        api.record(lambda: sys.exit(3))()
    assert not error_file.exists()


@both
def test_without_an_error_file_the_exception_just_passes(api: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    failed(api.record(broken))


@pytest.mark.parametrize("record", [ours.record, ripstop.record])
def test_an_error_file_that_cannot_be_written_does_not_hide_the_exception(
    record: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "none" / "error.json"))
    with pytest.raises(ValueError, match="because") as caught:
        record(broken)("because")
    assert caught.value.__context__ is None
    assert "the error file cannot be written: FileNotFoundError" in capsys.readouterr().err


@pytest.mark.parametrize("record", [ours.record, ripstop.record])
def test_an_error_file_that_is_a_device_or_a_link_is_not_replaced(
    record: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    master, slave = os.openpty()  # a device that we may write to and read from
    try:
        device = os.ttyname(slave)
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", device)
        failed(record(broken))
        assert stat.S_ISCHR(Path(device).stat().st_mode)
        assert b"ValueError: because" in os.read(master, 1 << 16)
    finally:
        os.close(master)
        os.close(slave)
    link, target = tmp_path / "link", tmp_path / "target"
    link.symlink_to(target)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(link))
    failed(record(broken))
    assert link.is_symlink() and json.loads(target.read_text())["message"]["message"] == "ValueError: because"
    assert sorted(tmp_path.iterdir()) == [link, target]
    assert "cannot be written" not in capsys.readouterr().err


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_an_error_file_in_a_directory_that_is_not_ours_is_written_in_place(error_file: Path) -> None:
    error_file.write_text("something longer than what comes after it" * 1000)
    error_file.parent.chmod(0o500)
    try:
        failed(ripstop.record(broken))
    finally:
        error_file.parent.chmod(0o700)
    assert json.loads(error_file.read_text())["message"]["message"] == "ValueError: because"


MOUNTED = """
import ctypes, json, os, sys
import ripstop
libc = ctypes.CDLL(None)
uid = os.getuid()
if libc.unshare(0x10020000) != 0:  # a mount namespace, in a user namespace
    sys.exit(77)
open("/proc/self/setgroups", "w").write("deny")
open("/proc/self/uid_map", "w").write(f"0 {uid} 1")
folder = sys.argv[1]
for name in ("outer", "error.json"):
    open(f"{folder}/{name}", "w").close()
if libc.mount(f"{folder}/outer".encode(), f"{folder}/error.json".encode(), None, 4096, None) != 0:  # bind
    sys.exit(77)
os.environ["TORCHELASTIC_ERROR_FILE"] = f"{folder}/error.json"
@ripstop.record
def main():
    raise ValueError("because")
try:
    main()
except ValueError:
    print(json.load(open(f"{folder}/outer"))["message"]["message"], sorted(os.listdir(folder)))
"""


def test_an_error_file_that_is_a_mount_is_written_in_place(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", MOUNTED, str(tmp_path)], capture_output=True, text=True, check=False)
    if done.returncode == 77:
        pytest.skip("no mount namespaces here")
    assert done.stdout == "ValueError: because ['error.json', 'outer']\n", done.stderr


def test_an_exception_without_a_text_or_with_too_much_is_recorded_for_the_agent(error_file: Path) -> None:
    class Mute(ValueError):
        def __str__(self) -> str:
            raise RuntimeError

    def fail_mute() -> None:
        raise Mute

    failed(ripstop.record(fail_mute))
    assert json.loads(error_file.read_text())["message"]["message"] == "Mute: <its text cannot be made: RuntimeError>"
    failed(ripstop.record(broken), "\x00\U0001f600" * 5_000_000)
    said = error_file_evidence(error_file)
    assert said is not None and said.message.startswith("ValueError") and "broken" in said.traceback


@both
def test_a_custom_error_handler_is_used(api: Any) -> None:
    seen: list[str] = []

    class Handler(api.ErrorHandler):  # type: ignore[misc, name-defined]
        def initialize(self) -> None:
            seen.append("initialize")

        def record_exception(self, e: BaseException) -> None:
            seen.append(repr(e))

    failed(api.record(broken, Handler()))
    assert seen == ["initialize", "ValueError('because')"]
    assert isinstance(api.get_error_handler(), api.ErrorHandler)


@both
@pytest.mark.filterwarnings("ignore:Unable to enable fault handler")
def test_a_worker_runs_if_faulthandler_cannot_be_enabled(api: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr("faulthandler.enable", fail)
    api.ErrorHandler().initialize()
    assert api.record(lambda: 5)() == 5


def test_a_crash_shows_pythons_stacks(tmp_path: Path) -> None:
    script = "import ripstop, os, signal\n@ripstop.record\ndef main(): os.kill(os.getpid(), signal.SIGSEGV)\nmain()"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGSEGV and "in main" in done.stderr


# a child's failure handed on ----------------------------------------------------------------------------------------


def child_failure(api: Any, tmp_path: Path, content: Any, exitcode: int = -11) -> Any:
    path = tmp_path / "child.json"
    path.write_text(json.dumps(content))
    return api.ProcessFailure(0, 7, exitcode, str(path))


RECORDED = {"message": {"message": "ValueError: x", "extraInfo": {"py_callstack": "stack", "timestamp": "1700000000"}}}


@either_way
def test_a_childs_failure_is_handed_on_with_its_exit_code(
    writer: Any, reader: Any, tmp_path: Path, error_file: Path
) -> None:
    error = writer.ChildFailedError("trainer", {0: child_failure(writer, tmp_path, RECORDED)})

    @writer.record  # type: ignore[untyped-decorator]
    def nanny() -> None:
        raise error

    with pytest.raises(writer.ChildFailedError):
        nanny()
    handed_on = reader.ProcessFailure(0, 8, 1, str(error_file))
    assert handed_on.message == {**RECORDED["message"], "errorCode": -11}


@both
def test_a_childs_failure_without_an_error_file_just_passes(api: Any, error_file: Path) -> None:
    def nanny() -> None:
        raise api.ChildFailedError("trainer", {0: api.ProcessFailure(0, 7, 1, "/nowhere")})

    with pytest.raises(api.ChildFailedError):
        api.record(nanny)()
    assert not error_file.exists()


def test_an_existing_error_file_is_renamed(tmp_path: Path, error_file: Path) -> None:
    error_file.write_text("mine")
    failure = child_failure(ours, tmp_path, {"message": "a text"})
    ours.ErrorHandler().dump_error_file(failure.error_file, 3)
    assert json.loads(error_file.read_text()) == {"message": "a text"}
    assert (tmp_path / "error.json.1").read_text() == "mine"


def test_a_childs_file_that_is_no_error_file_is_handed_on_as_a_message(tmp_path: Path, error_file: Path) -> None:
    (tmp_path / "child.json").write_bytes(b"\x00\xff{")
    ours.ErrorHandler().dump_error_file(str(tmp_path / "child.json"), 3)
    assert "is not JSON, or was cut off" in json.loads(error_file.read_text())["message"]


def test_a_missing_error_file_of_a_child_is_logged(error_file: Path, caplog: pytest.LogCaptureFixture) -> None:
    ours.ErrorHandler().dump_error_file("/nowhere/error.json", 3)
    assert "/nowhere/error.json does not exist" in caplog.text and not error_file.exists()


# ProcessFailure -----------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("content", [RECORDED, {"message": "a text", "timestamp": "1700000000"}])
def test_an_error_file_gives_message_and_time(api: Any, content: dict[str, Any], tmp_path: Path) -> None:
    failure = child_failure(api, tmp_path, content, exitcode=1)
    assert (failure.message, failure.timestamp) == (content["message"], 1700000000)
    assert failure.error_file == str(tmp_path / "child.json") and failure.error_file_data == content
    assert failure.timestamp_isoformat() == time.strftime("%Y-%m-%d_%H:%M:%S", time.localtime(1700000000))


@both
def test_a_failure_without_an_error_file_is_described_by_its_exit(api: Any) -> None:
    killed = api.ProcessFailure(0, 7, -9, "/nowhere")
    assert killed.message == "Signal 9 (SIGKILL) received by PID 7"
    assert (killed.signal_name(), killed.error_file) == ("SIGKILL", "<N/A>")
    assert abs(killed.timestamp - time.time()) < 10
    exited = api.ProcessFailure(0, 7, 3, os.devnull)
    assert (exited.signal_name(), exited.error_file) == ("<N/A>", "<N/A>")
    assert exited.error_file_data["errorTraits"]["category"] == "system_terminated_error"
    assert exited.message
    assert api.ProcessFailure(0, 7, -99, "/nowhere").signal_name() == "<N/A>"


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b'{"message": {"message": "Val', "is not JSON, or was cut off; it begins: {"),
        (b"\x80\x04\x95\x00\xff" * 100, "is not JSON, or was cut off"),
        (b"[1, 2]", "has no message; it begins: [1, 2]"),
        (b'{"message": 5}', "5"),
        (b'{"other": "x"}', "has no message"),
        (b"[" * 100_000, "is not JSON, or was cut off"),
        (b"", "exited with code 1 and wrote no error file"),
    ],
)
def test_a_file_that_is_no_error_file_is_a_message(data: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    path.write_bytes(data)
    failure = ours.ProcessFailure(0, 7, 1, str(path))
    assert said in failure.message
    assert failure.error_file == str(path)
    assert failure.timestamp == int(path.stat().st_mtime)
    assert "FAILED" in str(ours.ChildFailedError("trainer", {0: failure}))


@pytest.mark.parametrize("extra", [None, [], {}, {"timestamp": "soon"}, {"timestamp": "1e400"}, {"timestamp": 10**30}])
def test_an_error_file_with_a_strange_time_has_that_of_the_file(extra: Any, tmp_path: Path) -> None:
    failure = child_failure(ours, tmp_path, {"message": {"message": "x", "extraInfo": extra}})
    assert abs(failure.timestamp - time.time()) < 60
    assert "traceback : x" in str(ours.ChildFailedError("trainer", {0: failure}))


def test_a_very_large_error_file_is_not_read_completely(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    with path.open("wb") as file:
        file.write(b'{"message": "')
        file.truncate(1 << 30)
    before = time.monotonic()
    failure = ours.ProcessFailure(0, 7, 1, str(path))
    assert time.monotonic() - before < 60
    assert "is too long (1.0 GiB)" in failure.message and len(failure.message) < 5000


def test_a_pipe_in_place_of_an_error_file_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "error.json")
    assert ours.ProcessFailure(0, 7, 1, str(tmp_path / "error.json")).error_file == "<N/A>"


@both
def test_failures_travel_by_pickle(api: Any, tmp_path: Path) -> None:
    failure = child_failure(api, tmp_path, RECORDED)
    assert pickle.loads(pickle.dumps(failure)) == failure


def test_an_error_about_failures_travels_by_pickle(tmp_path: Path) -> None:
    error = ours.ChildFailedError("trainer", {3: child_failure(ours, tmp_path, RECORDED)})
    again = pickle.loads(pickle.dumps(error))
    assert (again.name, again.failures, str(again)) == (error.name, error.failures, str(error))


# ChildFailedError ---------------------------------------------------------------------------------------------------


def failures(api: Any, tmp_path: Path) -> dict[int, Any]:
    late = {"message": "a text", "timestamp": "1700000005"}
    made = {1: child_failure(api, tmp_path, late, 1), 2: child_failure(api, tmp_path, RECORDED, -11)}
    made[4] = api.ProcessFailure(4, 9, 1, "/nowhere")
    made[4].message, made[4].timestamp = "no file", 1700000009
    return made


def squeezed(text: str) -> list[str]:
    return [re.sub(r" +", " ", line).strip() for line in text.splitlines()]


def test_the_report_is_laid_out_as_torchs(tmp_path: Path) -> None:
    for pick in ([1, 2, 4], [2]):
        mine, torchs = (
            api.ChildFailedError("train.py", {rank: failures(api, tmp_path)[rank] for rank in pick})
            for api in (ours, theirs)
        )
        assert squeezed(str(mine)) == squeezed(str(torchs))
        assert squeezed(mine.format_msg("#", "~")) == squeezed(torchs.format_msg("#", "~"))


@both
def test_the_first_failure_is_the_earliest(api: Any, tmp_path: Path) -> None:
    error = api.ChildFailedError("trainer", failures(api, tmp_path))
    rank, failure = error.get_first_failure()
    assert rank == 2 and failure.exitcode == -11 and error.name == "trainer"


@both
def test_an_error_without_failures_is_rejected(api: Any) -> None:
    with pytest.raises(AssertionError):
        api.ChildFailedError("trainer", {})


def test_failures_of_the_same_second_are_ordered(tmp_path: Path) -> None:
    second = int(time.time())
    made = {}
    for rank, at in ((0, second + 0.9), (1, second + 0.1)):
        path = tmp_path / f"{rank}.json"
        path.write_text(json.dumps({"message": {"message": "x", "extraInfo": {"timestamp": str(second)}}}))
        os.utime(path, (at, at))
        made[rank] = ours.ProcessFailure(rank, 7, 1, str(path))
    assert ours.ChildFailedError("trainer", made).get_first_failure()[0] == 1
