"""Groups of functions and commands: torch's behaviour compared with ripstop's, and ripstop's additions."""

import io
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ripstop.compat import multiprocessing as ours
from ripstop.compat.multiprocessing import tail_log as our_tail_log
from ripstop.model.errors import UsageError
from tests.compat.processes import DEADLINE, eventually, is_alive, nothing_left  # noqa: F401
from tests.compat.scripts import worker_functions as functions
from tests.compat.signatures import taken_by_both

theirs = pytest.importorskip("torch.distributed.elastic.multiprocessing")
their_tail_log = pytest.importorskip("torch.distributed.elastic.multiprocessing.tail_log")

pytestmark = pytest.mark.usefixtures("nothing_left")
both = pytest.mark.parametrize("api", [theirs, ours], ids=["torch", "ripstop"])
both_tails = pytest.mark.parametrize("api", [their_tail_log, our_tail_log], ids=["torch", "ripstop"])
METHODS = ("spawn", "fork", "forkserver")
SHELL = "/bin/sh"
PERIOD = 0.02  # of torch's polling


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Starts one process for each entry of `args`; everything is closed when the test is over."""
    contexts: list[Any] = []

    def begin(api: Any, entry: Any, args: list[tuple[Any, ...]], **options: Any) -> Any:
        envs = options.pop("envs", [{} for _ in args])
        specs = options.pop("specs", None) or api.DefaultLogsSpecs(
            log_dir=str(tmp_path / "logs"), redirects=api.Std.ALL
        )
        context = api.start_processes(
            name="trainer",
            entrypoint=entry,
            args=dict(enumerate(args)),
            envs=dict(enumerate(envs)),
            logs_specs=specs,
            **options,
        )
        contexts.append(context)
        return context

    yield begin
    for context in contexts:
        context.close(signal.SIGKILL)


def shell(*scripts: str) -> list[tuple[str, str]]:
    return [("-c", script) for script in scripts]


def text(path: str) -> str:
    return Path(path).read_text()


@pytest.mark.parametrize("name", [name for name in theirs.__all__ if name != "Std"])
def test_torchs_arguments_are_accepted(name: str) -> None:
    taken_by_both(getattr(theirs, name), getattr(ours, name))


def test_tails_accept_torchs_arguments() -> None:
    for name in their_tail_log.__all__:
        taken_by_both(getattr(their_tail_log, name), getattr(our_tail_log, name))


# choices of streams -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("written", ["0", "1", "2", "3", "0:1", "0:3,1:0,2:1,3:2", "7:2,3:1", "1:1,1:2"])
def test_a_choice_of_streams_reads_as_torch_reads_it(written: str) -> None:
    assert ours.Std.from_str(written) == theirs.Std.from_str(written)


@both
@pytest.mark.parametrize("written", ["", "4", "-1", "1,2", "0:4", "a:1", "0:1,", "0:1;1:2", "3 "])
def test_an_invalid_choice_of_streams_is_rejected(api: Any, written: str) -> None:
    with pytest.raises(ValueError):
        api.Std.from_str(written)


def test_a_local_rank_of_two_digits_is_read() -> None:
    assert ours.Std.from_str("10:3") == {10: ours.Std.ALL}


@both
def test_a_choice_for_all_or_some_ranks_becomes_one_for_each(api: Any) -> None:
    assert api.to_map(api.Std.OUT, 2) == {0: api.Std.OUT, 1: api.Std.OUT}
    assert api.to_map({1: api.Std.OUT}, 2) == {0: api.Std.NONE, 1: api.Std.OUT}


def test_torchs_choices_are_taken_for_ours() -> None:
    assert ours.to_map(theirs.Std.ERR, 1) == {0: ours.Std.ERR}


# log files ----------------------------------------------------------------------------------------------------------


def reified(api: Any, directory: Path, **choices: Any) -> tuple[dict[str, Any], list[str]]:
    """Destinations and the tree, without the name that is made up."""
    envs = {rank: {"TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_RESTART_COUNT": "2"} for rank in range(3)}
    converted = {
        name: {rank: api.Std(std) for rank, std in value.items()} if isinstance(value, dict) else api.Std(value)
        for name, value in choices.items()
        if name != "local_ranks_filter"
    }
    dest = api.DefaultLogsSpecs(str(directory), **{**choices, **converted}).reify(envs)
    (run,) = directory.iterdir()
    assert run.name.startswith("job_")
    names = {**vars(dest), "env": [env["TORCHELASTIC_ERROR_FILE"] for env in envs.values()]}
    stripped = {key: repr(value).replace(str(run), "RUN") for key, value in names.items()}
    return stripped, sorted(str(path.relative_to(run)) for path in run.rglob("*"))


@pytest.mark.parametrize(
    "choices",
    [
        {},
        {"redirects": 3},
        {"tee": 3},
        {"redirects": 1, "tee": 2},
        {"redirects": {0: 1, 2: 3}, "tee": {1: 2}},
        {"redirects": 1, "tee": 2, "local_ranks_filter": {1}},
        {"local_ranks_filter": {0, 2}},
    ],
)
def test_log_files_are_where_torch_has_them(choices: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    assert reified(ours, tmp_path / "ours", **choices) == reified(theirs, tmp_path / "torch", **choices)


@both
def test_logs_to_dev_null_leave_no_file(api: Any, start: Callable[..., Any], capfd: pytest.CaptureFixture[str]) -> None:
    specs = api.DefaultLogsSpecs(log_dir=os.devnull, redirects=api.Std.ALL)
    context = start(api, SHELL, shell('echo "error file: <$TORCHELASTIC_ERROR_FILE>"'), specs=specs)
    assert not context.wait(DEADLINE, PERIOD).is_failed()
    assert "error file: <>" in capfd.readouterr().out


@both
def test_specifications_with_the_same_settings_are_equal(api: Any, tmp_path: Path) -> None:
    one, other, third = (
        api.DefaultLogsSpecs(str(tmp_path), tee=tee) for tee in (api.Std.OUT, api.Std.OUT, api.Std.ERR)
    )
    assert one == other and one != third and one.root_log_dir == str(tmp_path)
    assert str(tmp_path) in repr(one)


@both
def test_a_file_in_place_of_the_log_directory_is_rejected(api: Any, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match="file"):
        api.DefaultLogsSpecs(str(tmp_path / "file"))


def test_the_error_for_an_unusable_log_directory_names_it(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match=r"file/logs cannot be used \(Not a directory\); give another log_dir"):
        ours.DefaultLogsSpecs(str(tmp_path / "file" / "logs"))


def test_logs_of_an_earlier_start_of_the_attempt_are_renamed(tmp_path: Path) -> None:
    specs = ours.DefaultLogsSpecs(str(tmp_path), redirects=ours.Std.OUT)
    first = Path(specs.reify({0: {}}).stdouts[0])
    first.write_text("of the first time")
    second = Path(specs.reify({0: {}}).stdouts[0])
    assert second == first and not second.exists()
    assert (first.parents[2] / "attempt_0.1" / "0" / "stdout.log").read_text() == "of the first time"


# commands -----------------------------------------------------------------------------------------------------------


@both
def test_commands_run_with_their_arguments_environment_and_files(api: Any, start: Callable[..., Any]) -> None:
    context = start(
        api,
        SHELL,
        [(*shell('echo "$0 $WHO"; echo oops >&2')[0], rank) for rank in (7, 8)],
        envs=[{"WHO": "a"}, {"WHO": "b"}],
    )
    assert isinstance(context, api.SubprocessContext)
    result = context.wait(DEADLINE, PERIOD)
    assert not result.is_failed()
    assert result.return_values == {0: None, 1: None}
    assert [text(result.stdouts[rank]) for rank in (0, 1)] == ["7 a\n", "8 b\n"]
    assert [text(result.stderrs[rank]) for rank in (0, 1)] == ["oops\n", "oops\n"]


@both
def test_a_command_that_fails_ends_the_others(api: Any, start: Callable[..., Any]) -> None:
    result = start(api, SHELL, shell("exec sleep 600", "exit 3")).wait(DEADLINE, PERIOD)
    assert result.is_failed() and result.return_values == {}
    assert {rank: failure.exitcode for rank, failure in result.failures.items()} == {0: -signal.SIGTERM, 1: 3}
    assert result.failures[0].message.startswith("Signal 15 (SIGTERM) received by PID ")


@pytest.mark.parametrize(
    ("api", "record"),
    [(theirs, "torch.distributed.elastic.multiprocessing.errors"), (ours, "ripstop")],
    ids=["torch", "ripstop"],
)
def test_an_error_file_that_a_command_wrote_is_its_failures_message(
    api: Any, record: str, start: Callable[..., Any]
) -> None:
    script = f"from {record} import record\n@record\ndef main(): raise ValueError('of the script')\nmain()"
    failure = start(api, sys.executable, [("-c", script)]).wait(DEADLINE, PERIOD).failures[0]
    assert failure.message["message"] == "ValueError: of the script"
    assert failure.error_file.endswith("error.json")


@both
def test_wait_with_a_timeout_returns_none_while_workers_run(api: Any, start: Callable[..., Any]) -> None:
    context = start(api, SHELL, shell("exec sleep 600"))
    assert context.wait(0) is None
    assert context.wait(0.1, period=0.01) is None
    assert is_alive(context.pids()[0])


def test_wait_returns_at_the_exit_whatever_the_period(start: Callable[..., Any], tmp_path: Path) -> None:
    context = start(ours, SHELL, shell(f"while ! [ -e {tmp_path}/go ]; do sleep 0.01; done"))
    threading.Timer(0.2, (tmp_path / "go").touch).start()
    before = time.monotonic()
    assert not context.wait(period=600).is_failed()
    assert time.monotonic() - before < DEADLINE


def test_a_second_wait_returns_the_same_result(start: Callable[..., Any]) -> None:
    context = start(ours, SHELL, shell("exit 3"))
    assert context.wait(DEADLINE, PERIOD) is context.wait(0)


@both
def test_a_command_that_ignores_the_signal_is_killed_after_the_timeout(
    api: Any, start: Callable[..., Any], tmp_path: Path
) -> None:
    context = start(api, SHELL, shell(f"trap '' TERM; touch {tmp_path}/ready; while :; do sleep 0.1; done"))
    eventually((tmp_path / "ready").exists, "the trap")
    context.close(signal.SIGTERM, timeout=1)
    assert not is_alive(context.pids()[0])


def test_a_stopped_command_receives_the_signal(start: Callable[..., Any]) -> None:
    context = start(ours, SHELL, shell("exec sleep 600"))
    pid = context.pids()[0]
    os.kill(pid, signal.SIGSTOP)
    eventually(lambda: "T" in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0], "stopped")
    context.close(signal.SIGTERM, timeout=int(DEADLINE))
    assert context.subprocess_handlers[0].proc.returncode == -signal.SIGTERM


def test_children_of_a_dead_command_are_killed(start: Callable[..., Any], tmp_path: Path) -> None:
    result = start(ours, SHELL, shell(f"sleep 600 & echo $! > {tmp_path}/pid; kill -9 $$")).wait(DEADLINE, PERIOD)
    assert result.failures[0].exitcode == -signal.SIGKILL
    child = int((tmp_path / "pid").read_text())
    eventually(lambda: not is_alive(child), "the end of the child")


@both
def test_a_command_that_is_not_there_is_an_error(api: Any, start: Callable[..., Any]) -> None:
    with pytest.raises(FileNotFoundError, match="no-such-command"):
        start(api, "no-such-command", [(), ()])


def test_a_start_that_fails_stops_the_workers_that_have_started(start: Callable[..., Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="null byte"):
        start(ours, SHELL, [*shell(f"echo $$ > {tmp_path}/pid; exec sleep 600"), ("-c", "\0")])
    # that nothing is left is what the fixture asserts


@both
def test_local_ranks_must_be_complete(api: Any, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="envs, local rank mapping mismatch"):
        api.start_processes("trainer", SHELL, {0: (), 1: ()}, {0: {}}, api.DefaultLogsSpecs(str(tmp_path)))


@both
def test_a_custom_context_is_polled_every_period(api: Any, tmp_path: Path) -> None:
    class Countdown(api.PContext):  # type: ignore[misc, name-defined]
        left = 3

        def _start(self) -> None: ...

        def _poll(self) -> Any:
            self.left -= 1
            return None if self.left else api.RunProcsResult({0: "done"})

        def _close(self, death_sig: signal.Signals, timeout: int = 30) -> None: ...

        def pids(self) -> dict[int, int]:
            return {}

    context = Countdown("own", SHELL, {0: ()}, {0: {}}, api.DefaultLogsSpecs(str(tmp_path)))
    context.start()
    assert context.wait(period=0.01).return_values == {0: "done"}
    context.close()


# functions ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("api", "method"), [(theirs, "fork"), *((ours, method) for method in METHODS)])
def test_functions_return_values_by_rank(api: Any, method: str, start: Callable[..., Any]) -> None:
    context = start(api, functions.double, [(1,), (2,)], start_method=method)
    assert isinstance(context, api.MultiprocessContext)
    pids = context.pids()
    result = context.wait(DEADLINE, PERIOD)
    assert result.return_values == {0: 2, 1: 4} and not result.failures
    assert not any(is_alive(pid) for pid in pids.values())


@pytest.mark.parametrize("method", METHODS)
def test_a_function_has_its_environment_its_files_and_its_own_group(method: str, start: Callable[..., Any]) -> None:
    context = start(ours, functions.where, [(0,), (1,)], envs=[{"WHO": "a"}, {"WHO": "b"}], start_method=method)
    pids = context.pids()
    result = context.wait(DEADLINE, PERIOD)
    assert result.return_values == {0: ("a", pids[0], pids[0]), 1: ("b", pids[1], pids[1])}
    assert [text(result.stdouts[rank]) for rank in (0, 1)] == ["to stdout\n"] * 2
    assert [text(result.stderrs[rank]) for rank in (0, 1)] == ["to stderr\n"] * 2


@both
def test_a_closure_can_be_forked(api: Any, start: Callable[..., Any]) -> None:
    secret = object()
    context = start(api, lambda: id(secret), [()], start_method="fork")
    assert context.wait(DEADLINE, PERIOD).return_values == {0: id(secret)}


def test_a_function_without_torch_does_not_pay_for_it(start: Callable[..., Any]) -> None:
    assert start(ours, functions.imports_torch, [()], start_method="spawn").wait(DEADLINE, PERIOD).return_values == {
        0: False
    }


def test_a_tensor_is_returned(start: Callable[..., Any]) -> None:
    import torch

    (value,) = (
        start(ours, lambda: torch.arange(3), [()], start_method="fork").wait(DEADLINE, PERIOD).return_values.values()
    )
    assert value.tolist() == [0, 1, 2]


@pytest.mark.parametrize(("api", "method"), [(theirs, "fork"), *((ours, method) for method in METHODS)])
def test_an_exception_of_a_function_is_in_its_error_file(api: Any, method: str, start: Callable[..., Any]) -> None:
    result = start(api, functions.fail, [("because",)], start_method=method).wait(DEADLINE, PERIOD)
    failure = result.failures[0]
    assert (failure.local_rank, failure.exitcode) == (0, 1)
    assert failure.message["message"] == "ValueError: because"
    assert "in fail" in failure.message["extraInfo"]["py_callstack"]


def test_an_exception_of_a_function_is_on_its_stderr_too(start: Callable[..., Any]) -> None:
    result = start(ours, functions.fail, [("because",)], start_method="fork").wait(DEADLINE, PERIOD)
    shown = text(result.stderrs[0])
    assert shown.startswith("Traceback") and shown.endswith("ValueError: because\n")
    assert shown.count("  File ") == 1, "the user's frame, and none of ours"


@both
@pytest.mark.parametrize(("code", "expected"), [(0, None), (3, 3)])
def test_sys_exit_in_a_function(api: Any, code: int, expected: int | None, start: Callable[..., Any]) -> None:
    result = start(api, functions.leave, [(code,)], start_method="fork").wait(DEADLINE, PERIOD)
    if expected is None:
        assert result.return_values == {0: None}
    else:
        assert result.failures[0].exitcode == expected


@pytest.mark.parametrize("method", ("fork", "spawn"))
def test_sys_exit_without_a_code_is_a_success(method: str, start: Callable[..., Any]) -> None:
    result = start(ours, functions.leave, [(None,)], start_method=method).wait(DEADLINE, PERIOD)
    assert result.return_values == {0: None} and not result.failures


@both
def test_a_function_that_is_killed_failed_by_the_signal(api: Any, start: Callable[..., Any]) -> None:
    failure = start(api, functions.kill_self, [()], start_method="fork").wait(DEADLINE, PERIOD).failures[0]
    assert failure.exitcode == -signal.SIGKILL and failure.signal_name() == "SIGKILL"
    assert failure.error_file == "<N/A>"


@pytest.mark.parametrize("method", METHODS)
def test_a_function_that_ends_its_process_without_returning_has_failed(method: str, start: Callable[..., Any]) -> None:
    result = start(ours, functions.vanish, [()], start_method=method).wait(DEADLINE, PERIOD)
    assert "instead of returning" in result.failures[0].message


@both
def test_a_function_that_fails_ends_the_others(api: Any, start: Callable[..., Any], tmp_path: Path) -> None:
    ready = str(tmp_path / "ready")
    context = start(api, functions.fail_or_wait, [(0, ready), (1, ready)], start_method="fork")
    pids = context.pids()
    assert list(context.wait(DEADLINE, PERIOD).failures) == [0]
    assert not is_alive(pids[1])


def test_a_function_that_was_ended_has_recorded_nothing(start: Callable[..., Any], tmp_path: Path) -> None:
    ready = str(tmp_path / "ready")
    context = start(ours, functions.fail_or_wait, [(0, ready), (1, ready)], start_method="fork")
    context.wait(DEADLINE, PERIOD)
    assert not Path(context.error_files[1]).exists()
    assert text(context.stderrs[1]) == ""


@both
def test_a_worker_that_has_returned_exits_when_all_have(api: Any, start: Callable[..., Any], tmp_path: Path) -> None:
    context = start(
        api, functions.at_once_or_late, [(0, str(tmp_path / "go")), (1, str(tmp_path / "go"))], start_method="fork"
    )
    assert context.wait(0.5, PERIOD) is None
    assert is_alive(context.pids()[0])
    (tmp_path / "go").touch()
    assert context.wait(DEADLINE, PERIOD).return_values == {0: 0, 1: 1}


@pytest.mark.parametrize("method", METHODS)
def test_a_large_value_is_returned(method: str, start: Callable[..., Any]) -> None:
    result = start(ours, functions.large, [(100_000_000,), (3,)], start_method=method).wait(DEADLINE, PERIOD)
    assert {rank: len(value) for rank, value in result.return_values.items()} == {0: 100_000_000, 1: 3}


def test_a_value_that_cannot_be_pickled_is_a_failure_with_a_remedy(start: Callable[..., Any]) -> None:
    failure = start(ours, functions.return_unpicklable, [()], start_method="spawn").wait(DEADLINE, PERIOD).failures[0]
    assert "this function cannot be pickled" in failure.message["message"]
    assert failure.message["message"].endswith("return plain data")


def test_a_value_that_cannot_be_read_here_is_a_failure(start: Callable[..., Any]) -> None:
    failure = start(ours, functions.return_unreadable, [()], start_method="fork").wait(DEADLINE, PERIOD).failures[0]
    assert "what it returned cannot be read here: ValueError: cannot be made again" in failure.message


@both
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_function_that_cannot_be_pickled_is_rejected(api: Any, method: str, start: Callable[..., Any]) -> None:
    with pytest.raises((pickle.PicklingError, AttributeError), match="lambda"):
        start(api, lambda: None, [()], start_method=method)


def test_an_argument_that_cannot_be_pickled_ends_those_that_were_started(start: Callable[..., Any]) -> None:
    with pytest.raises(pickle.PicklingError, match=r"those of local rank 1 \(double\) are not: .*start_method='fork'"):
        start(ours, functions.double, [(1,), (threading.Lock(),)], start_method="spawn")


def test_an_unknown_start_method_is_rejected(start: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="start_method='thread': there is no such method; choose one of"):
        start(ours, functions.double, [(1,)], start_method="thread")


def test_a_function_that_ignores_the_signal_is_killed_after_the_timeout(
    start: Callable[..., Any], tmp_path: Path
) -> None:
    context = start(ours, functions.ignore_sigterm, [(str(tmp_path / "ready"),)], start_method="fork")
    eventually((tmp_path / "ready").exists, "the function")
    context.close(signal.SIGTERM, timeout=1)
    assert not is_alive(context.pids()[0])


@pytest.mark.parametrize("method", METHODS)
def test_children_of_a_dead_function_are_killed(method: str, start: Callable[..., Any], tmp_path: Path) -> None:
    result = start(ours, functions.with_child, [(str(tmp_path / "pid"),)], start_method=method).wait(DEADLINE, PERIOD)
    assert result.failures[0].exitcode == -signal.SIGKILL
    child = int((tmp_path / "pid").read_text())
    eventually(lambda: not is_alive(child), "the end of the child")


def test_a_function_that_is_interrupted_died_of_it(start: Callable[..., Any], tmp_path: Path) -> None:
    context = start(ours, functions.announce, [(str(tmp_path / "ready"),)], start_method="fork")
    eventually((tmp_path / "ready").exists, "the function")
    os.kill(context.pids()[0], signal.SIGINT)
    assert context.wait(DEADLINE, PERIOD).failures[0].exitcode == -signal.SIGINT


def test_functions_can_be_started_from_any_thread(start: Callable[..., Any]) -> None:
    results: list[Any] = []

    def launch() -> None:
        results.append(start(ours, functions.double, [(4,)], start_method="spawn").wait(DEADLINE, PERIOD))

    thread = threading.Thread(target=launch)
    thread.start()
    thread.join(DEADLINE)
    assert results[0].return_values == {0: 8}


def test_a_command_outlives_the_thread_that_started_it(start: Callable[..., Any], tmp_path: Path) -> None:
    contexts: list[Any] = []
    script = f"while ! [ -e {tmp_path}/go ]; do sleep 0.01; done"
    thread = threading.Thread(target=lambda: contexts.append(start(ours, SHELL, shell(script))))
    thread.start()
    thread.join(DEADLINE)
    (tmp_path / "go").touch()
    assert not contexts[0].wait(DEADLINE, PERIOD).is_failed()


# signals and the parent's death -------------------------------------------------------------------------------------


def parent(tmp_path: Path, package: str, body: str) -> "subprocess.Popen[str]":
    """A program that starts workers with torch's package or ours."""
    script = tmp_path / "parent.py"
    root = Path(__file__).parents[2]
    script.write_text(
        f"import sys; sys.path.insert(0, {str(root)!r})\n"
        f"from {package} import DefaultLogsSpecs, SignalException, Std, start_processes\n"
        "from tests.compat.scripts import worker_functions as functions\n"
        f"specs = DefaultLogsSpecs({str(tmp_path / 'logs')!r})\n" + textwrap.dedent(body)
    )
    return subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("package", ["torch.distributed.elastic.multiprocessing", "ripstop.compat.multiprocessing"])
def test_a_signal_to_the_parent_is_an_exception_there(package: str, tmp_path: Path) -> None:
    ready, waits = tmp_path / "ready", tmp_path / "waits"
    script = f"echo $$ > {ready}.part; mv {ready}.part {ready}; exec sleep 600"
    body = f"""
        context = start_processes("x", "/bin/sh", {{0: ("-c", {script!r})}}, {{0: {{}}}}, specs)
        try:
            open({str(waits)!r}, "w").close()
            context.wait(period=0.1)
        except SignalException as signal:
            print(signal.sigval.name)
            context.close(signal.sigval)
        """
    process = parent(tmp_path, package, body)
    eventually(lambda: ready.exists() and waits.exists(), "the worker, and the parent that waits for it")
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=DEADLINE)[0] == "SIGTERM\n"
    assert not is_alive(int(ready.read_text()))


@pytest.mark.parametrize(
    "start_worker",
    [
        '("x", "/bin/sh", {0: ("-c", "echo $$ > %(r)s.part; mv %(r)s.part %(r)s; exec sleep 600")}, {0: {}}, specs)',
        *(f'("x", functions.announce, {{0: ("%(r)s",)}}, {{0: {{}}}}, specs, start_method={m!r})' for m in METHODS),
    ],
    ids=["command", *METHODS],
)
def test_workers_die_with_their_parent(start_worker: str, tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    call = start_worker % {"r": ready}
    process = parent(
        tmp_path, "ripstop.compat.multiprocessing", f"if __name__ == '__main__': start_processes{call}.wait()"
    )
    try:
        eventually(ready.exists, "the worker")
    finally:
        process.kill()
        process.communicate()
    worker = int(ready.read_text())
    eventually(lambda: not is_alive(worker), "the end of the worker")


def test_an_unknown_signal_is_logged_and_ignored(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGTERM,SIGNONE,SIGKILL")
    assert not start(ours, SHELL, shell("true")).wait(DEADLINE, PERIOD).is_failed()
    assert "SIGNONE" in caplog.text and "SIGKILL cannot be handled" in caplog.text
    with pytest.raises(ours.SignalException):
        os.kill(os.getpid(), signal.SIGTERM)


# tee ----------------------------------------------------------------------------------------------------------------


@both
def test_teed_lines_are_on_the_console_with_their_heads(
    api: Any, start: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    specs = api.DefaultLogsSpecs(str(tmp_path), tee=api.Std.ALL, local_ranks_filter={0, 1})
    scripts = shell("echo one; echo two >&2", "echo three", "echo four")
    result = start(api, SHELL, scripts, specs=specs, log_line_prefixes={1: "(one) "}).wait(DEADLINE, PERIOD)
    out, err = capsys.readouterr()
    assert sorted(out.splitlines()) == ["(one) three", "[trainer0]:one"]
    assert err.splitlines()[:1] == ["[trainer0]:two"]
    assert text(result.stdouts[2]) == "four\n"


@both
def test_lines_that_contain_a_filter_are_copied_to_one_file(
    api: Any, start: Callable[..., Any], tmp_path: Path
) -> None:
    specs = api.DefaultLogsSpecs(str(tmp_path), tee=api.Std.ALL)
    scripts = shell("echo loss 1; echo other; echo eval 2; echo loss >&2", "echo loss 3")
    context = start(
        api, SHELL, scripts, specs=specs, duplicate_stdout_filters=["loss", "eval"], duplicate_stderr_filters=["none"]
    )
    assert not context.wait(DEADLINE, PERIOD).is_failed()
    attempt = Path(context.stdouts[0]).parents[1]
    lines = (attempt / "filtered_stdout.log").read_text().splitlines()
    assert sorted(lines) == ["[trainer0]:eval 2", "[trainer0]:loss 1", "[trainer1]:loss 3"]
    assert (attempt / "filtered_stderr.log").read_text() == ""


@pytest.mark.parametrize("method", METHODS)
def test_the_output_of_functions_can_be_teed(
    method: str, start: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    specs = ours.DefaultLogsSpecs(str(tmp_path), tee=ours.Std.OUT)
    assert (
        not start(ours, functions.say, [(3,), (5,)], specs=specs, start_method=method)
        .wait(DEADLINE, PERIOD)
        .is_failed()
    )
    assert sorted(capsys.readouterr().out.splitlines()) == ["[trainer0]:xxx", "[trainer1]:xxxxx"]


@both_tails
def test_a_file_that_is_created_late_is_tailed_to_its_end(api: Any, tmp_path: Path) -> None:
    target = io.StringIO()
    paths = {rank: tmp_path / f"{rank}.log" for rank in (0, 1)}
    tail = api.TailLog("x", {rank: str(path) for rank, path in paths.items()}, target, interval_sec=0.01).start()
    for rank, path in paths.items():
        path.write_text("".join(f"{rank} line {number}\n" for number in range(1000)))
    assert not tail.stopped()
    if api is their_tail_log:  # it does not check again for a file that was created just before the stop
        eventually(lambda: target.getvalue().count("line 999") == 2, "the lines")
    tail.stop()
    assert tail.stopped()
    for rank in paths:
        own = [line for line in target.getvalue().splitlines() if line.startswith(f"[x{rank}]:")]
        assert own == [f"[x{rank}]:{rank} line {number}" for number in range(1000)]


@both_tails
def test_a_tail_of_a_missing_file_can_be_stopped(api: Any, tmp_path: Path) -> None:
    target = io.StringIO()
    tail = api.TailLog("x", {0: str(tmp_path / "never")}, target, interval_sec=0.01).start()
    tail.stop()
    assert target.getvalue() == ""


@both_tails
def test_one_file_can_be_tailed_until_an_event(api: Any, tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"one\nt\xffo\n")
    finished, target = threading.Event(), io.StringIO()
    finished.set()
    api.tail_logfile("> ", str(tmp_path / "log"), target, finished, 0.01, lambda line: line != "one\n")
    assert target.getvalue() == "> t\ufffdo\n"


def test_a_line_written_in_pieces_is_copied_complete(tmp_path: Path) -> None:
    target = io.StringIO()
    tail = ours.TailLog("x", {0: str(tmp_path / "log")}, target, interval_sec=0.01).start()
    with (tmp_path / "log").open("w") as file:
        file.write("one ")
        file.flush()
        (tmp_path / "other").touch()
        file.write("line\nand the end")
    tail.stop()
    assert target.getvalue() == "[x0]:one line\n[x0]:and the end\n"


def test_lines_are_seen_while_they_are_written(tmp_path: Path) -> None:
    target = io.StringIO()
    (tmp_path / "log").touch()
    tail = ours.TailLog("x", {0: str(tmp_path / "log")}, target, interval_sec=600).start()
    try:
        for number in range(3):
            with (tmp_path / "log").open("a") as file:
                file.write(f"{number}\n")
            eventually(lambda number=number: f"[x0]:{number}\n" in target.getvalue(), "the line")  # type: ignore[misc]
    finally:
        tail.stop()


def test_a_destination_that_fails_does_not_affect_the_workers(
    start: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with Path("/dev/full").open("w") as full, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", full)
        context = start(ours, SHELL, shell("echo one"), specs=ours.DefaultLogsSpecs(str(tmp_path), tee=ours.Std.OUT))
        result = context.wait(DEADLINE, PERIOD)
        patch.undo()
        with pytest.raises(OSError):
            full.close()  # what could not be written is still in its buffer
    assert not result.is_failed() and text(result.stdouts[0]) == "one\n"
    assert "No space left on device" in caplog.text


# log directories that cannot be written -----------------------------------------------------------------------------


def run_on(mount: str, tmp_path: Path, body: str) -> str:
    """Runs a program with its own mount of this file system at `tmp_path/disk`."""
    disk, script = tmp_path / "disk", tmp_path / "program.py"
    disk.mkdir()
    script.write_text(
        f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r})\n"
        "from ripstop.compat.multiprocessing import DefaultLogsSpecs, Std, start_processes\n"
        "from tests.compat.scripts import worker_functions as functions\n"
        f"disk = {str(disk)!r}\n" + textwrap.dedent(body)
    )
    command = f"mount -t tmpfs {mount} none {disk} && exec {sys.executable} {script}"
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", command], capture_output=True, text=True, timeout=DEADLINE, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


can_mount = pytest.mark.skipif(
    os.geteuid() != 0
    or shutil.which("unshare") is None
    or subprocess.run(["unshare", "--mount", "true"], check=False, capture_output=True).returncode != 0,
    reason="needs the right to mount",
)


@can_mount
def test_a_read_only_log_directory_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    out = run_on(
        "-o ro",
        tmp_path,
        """
        for directory in (disk, f"{disk}/below"):
            try:
                start_processes("x", "true", {0: ()}, {0: {}}, DefaultLogsSpecs(directory, redirects=Std.ALL))
            except OSError as error:
                print(error)
        """,
    )
    assert len(out.splitlines()) == 2
    assert all(
        re.search(r"disk.* cannot be used \(Read-only file system\); give another log_dir", x) for x in out.splitlines()
    )


@can_mount
def test_a_full_log_directory_is_an_error_and_stops_the_workers(tmp_path: Path) -> None:
    out = run_on(
        "-o nr_inodes=6",
        tmp_path,
        """
        specs = DefaultLogsSpecs(disk, redirects=Std.ALL)
        for entry in ("true", functions.double):
            try:
                start_processes("x", entry, {0: (1,), 1: (1,)}, {0: {}, 1: {}}, specs)
            except OSError as error:
                print(error)
        """,
    )
    assert out.count("No space left on device") == 2


@can_mount
def test_a_worker_whose_log_is_full_fails(tmp_path: Path) -> None:
    out = run_on(
        "-o size=64k",
        tmp_path,
        """
        specs = DefaultLogsSpecs(disk, redirects=Std.ALL)
        result = start_processes("x", functions.say, {0: (1_000_000,)}, {0: {}}, specs, start_method="fork").wait(120)
        print(result.failures[0].exitcode, result.failures[0].message)
        """,
    )
    assert out.startswith("1 ")


# NUMA ---------------------------------------------------------------------------------------------------------------


def test_a_binding_that_is_impossible_is_an_error_unless_it_may_be_left_out(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.numa.binding import AffinityMode, NumaOptions

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(UsageError, match="numa_options=node"):
        start(ours, "true", [()], numa_options=NumaOptions(AffinityMode.NODE))
    lenient = NumaOptions(AffinityMode.NODE, should_fall_back_if_binding_fails=True)
    assert not start(ours, "true", [()], numa_options=lenient).wait(DEADLINE, PERIOD).is_failed()
    assert (
        not start(ours, functions.double, [(1,)], start_method="fork", numa_options=lenient)
        .wait(DEADLINE, PERIOD)
        .is_failed()
    )
