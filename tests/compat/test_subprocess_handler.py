"""One worker that is a command, and streams that go to files: torch's behaviour and ours side by side."""

import io
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ripstop.compat.multiprocessing import redirects as our_redirects
from ripstop.compat.multiprocessing import subprocess_handler as ours
from tests.compat.processes import DEADLINE, eventually, is_alive, nothing_left  # noqa: F401
from tests.compat.signatures import taken_by_both

theirs = pytest.importorskip("torch.distributed.elastic.multiprocessing.subprocess_handler")
their_redirects = pytest.importorskip("torch.distributed.elastic.multiprocessing.redirects")

pytestmark = pytest.mark.usefixtures("nothing_left")
both = pytest.mark.parametrize("api", [theirs, ours], ids=["torch", "ripstop"])
both_redirects = pytest.mark.parametrize("api", [their_redirects, our_redirects], ids=["torch", "ripstop"])


@pytest.fixture
def handlers() -> Iterator[list[Any]]:
    """What a test has started; ended when it is over."""
    started: list[Any] = []
    yield started
    for handler in started:
        if handler.proc.poll() is None:
            handler.proc.kill()
            handler.proc.wait()


def begin(api: Any, handlers: list[Any], script: str, **given: Any) -> Any:
    options = {"env": {}, "stdout": "", "stderr": "", "local_rank_id": 0, **given}
    handlers.append(api.get_subprocess_handler("/bin/sh", ("-c", script, *given.pop("args", ())), **options))
    return handlers[-1]


@pytest.mark.parametrize("name", theirs.__all__)
def test_torchs_arguments_are_accepted(name: str) -> None:
    taken_by_both(getattr(theirs, name), getattr(ours, name))


@both
def test_a_command_has_the_parents_environment_and_its_own(
    api: Any, handlers: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INHERITED", "yes")
    monkeypatch.setenv("CHANGED", "no")
    out, err = str(tmp_path / "out"), str(tmp_path / "err")
    script = 'echo "$INHERITED $CHANGED"; echo oops >&2'
    handler = begin(api, handlers, script, env={"CHANGED": "yes"}, stdout=out, stderr=err, local_rank_id=3)
    assert handler.proc.wait(DEADLINE) == 0
    assert (Path(out).read_text(), Path(err).read_text()) == ("yes yes\n", "oops\n")
    assert handler.local_rank_id == 3 and isinstance(handler, api.SubprocessHandler)


@both
def test_arguments_are_converted_to_strings(api: Any, handlers: list[Any], tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    handlers.append(
        api.get_subprocess_handler("/bin/echo", (1, [2, 3]), env={}, stdout=out, stderr="", local_rank_id=0)
    )
    assert handlers[-1].proc.wait(DEADLINE) == 0
    assert Path(out).read_text() == "1 [2, 3]\n"


@both
def test_an_old_log_is_emptied(api: Any, handlers: list[Any], tmp_path: Path) -> None:
    (tmp_path / "out").write_text("of long ago")
    assert begin(api, handlers, "echo new", stdout=str(tmp_path / "out")).proc.wait(DEADLINE) == 0
    assert (tmp_path / "out").read_text() == "new\n"


@both
@pytest.mark.parametrize("signum", [None, signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_closing_signals_the_whole_group(
    api: Any, signum: signal.Signals | None, handlers: list[Any], tmp_path: Path
) -> None:
    handler = begin(
        api, handlers, f"sleep 600 & echo $! > {tmp_path}/pid.part; mv {tmp_path}/pid.part {tmp_path}/pid; wait"
    )
    eventually((tmp_path / "pid").exists, "the child")
    assert os.getsid(handler.proc.pid) == handler.proc.pid
    handler.close(signum)
    child = int((tmp_path / "pid").read_text())
    if signum != signal.SIGINT:  # which a shell has its background children ignore
        eventually(lambda: not is_alive(child), "the end of the child")
    else:
        os.kill(child, signal.SIGKILL)
    assert handler.proc.wait(DEADLINE) == -(signum or signal.SIGTERM)


def test_closing_a_worker_that_has_exited_is_no_error(handlers: list[Any]) -> None:
    handler = begin(ours, handlers, "true")
    handler.proc.wait(DEADLINE)
    handler.close()


@both
def test_a_log_that_cannot_be_opened_is_an_error(api: Any, handlers: list[Any], tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="none/out"):
        begin(api, handlers, "true", stdout=str(tmp_path / "none" / "out"))


def test_a_command_that_cannot_be_started_leaves_no_file_open(tmp_path: Path) -> None:
    before = set(Path("/proc/self/fd").iterdir())
    with pytest.raises(FileNotFoundError):
        ours.get_subprocess_handler("no-such-command", (), {}, str(tmp_path / "out"), str(tmp_path / "err"), 0)
    assert set(Path("/proc/self/fd").iterdir()) <= before


# redirects ----------------------------------------------------------------------------------------------------------


@both_redirects
def test_output_of_python_c_and_children_is_redirected_within_the_block(api: Any, tmp_path: Path) -> None:
    script = f"""
import ctypes, os
from {api.__name__} import redirect_stderr, redirect_stdout
with redirect_stdout("out"), redirect_stderr("err"):
    print("python")
    ctypes.CDLL(None).printf(b"c\\n")
    os.system("echo child; echo oops >&2")
print("after")
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert sorted((tmp_path / "out").read_text().splitlines()) == ["c", "child", "python"]
    assert (tmp_path / "err").read_text() == "oops\n"
    assert (done.stdout, done.stderr) == ("after\n", "")


@both_redirects
def test_an_unknown_stream_is_rejected(api: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="stdin"), api.redirect("stdin", str(tmp_path / "x")):
        pass


@both_redirects
def test_an_exception_ends_the_redirection(api: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyError), api.redirect_stdout(str(tmp_path / "out")):
        raise KeyError
    print("after", flush=True)
    assert capfd.readouterr().out == "after\n"


def test_a_stream_that_is_not_the_processes_own_is_redirected_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (tmp_path / "elsewhere").open("w") as file:
        for number, stand_in in enumerate((io.StringIO(), file)):
            monkeypatch.setattr(sys, "stdout", stand_in)
            with our_redirects.redirect_stdout(str(tmp_path / f"out{number}")):
                print("python")
                subprocess.run(["echo", "child"], check=True)
            print("after")
            assert sys.stdout is stand_in
            assert sorted((tmp_path / f"out{number}").read_text().splitlines()) == ["child", "python"]
    assert (tmp_path / "elsewhere").read_text() == "after\n"
