"""`LaunchConfig`, `elastic_launch`, `launch_agent`: programs that launch functions and commands, run for real."""

import asyncio
import contextlib
import dataclasses
import io
import json
import logging
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ripstop.compat import events, metrics
from ripstop.compat.launcher import LaunchConfig, elastic_launch, launch_agent
from ripstop.compat.multiprocessing import DefaultLogsSpecs, LogsDest, LogsSpecs, Std
from ripstop.compat.multiprocessing.errors import ChildFailedError
from ripstop.compat.numa import AffinityMode, NumaOptions
from tests.e2e.harness import free_port

METHODS = ("spawn", "fork", "forkserver")
DEADLINE = 120.0
TORCH, OURS = "torch.distributed.launcher", "ripstop.compat.launcher"

PRELUDE = r"""
import json, os, signal, sys, time
from LAUNCHER import LaunchConfig, elastic_launch
from LAUNCHER import launch_agent

def config(method="fork", workers=2, **more):
    more = {"max_restarts": 0, "rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "run_id": "r"} | more
    return LaunchConfig(1, 1, workers, start_method=method, **more)

def say(*what):
    os.write(1, (json.dumps(what) + "\n").encode())
"""

Program = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def program(tmp_path: Path, short_tmp_path: Path) -> Iterator[Program]:
    """Starts a program that launches; it and its children are killed after the test."""
    started: list[subprocess.Popen[str]] = []

    def start(source: str, *args: str, launcher: str = OURS, **env: str) -> "subprocess.Popen[str]":
        path = tmp_path / f"program{len(started)}.py"
        path.write_text(PRELUDE.replace("LAUNCHER", launcher) + textwrap.dedent(source))
        process = subprocess.Popen(
            [sys.executable, str(path), *args],
            env=os.environ | {"TMPDIR": str(short_tmp_path)} | env,  # forkserver makes a socket there
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def said(process: "subprocess.Popen[str]") -> list[Any]:
    """The program's output; it must exit with 0."""
    out, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == 0, err
    return [json.loads(line) for line in out.splitlines()]


def config(method: str = "fork", workers: int = 2, **more: Any) -> LaunchConfig:
    settings = {"max_restarts": 0, "rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "run_id": "r"} | more
    return LaunchConfig(1, 1, workers, start_method=method, **settings)


def wait_for(what: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE
    while not what():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


# standbys -------------------------------------------------------------------------------------------------------------

WORKER = """
import os, signal, sys, time
from ripstop import train
out, restart, rank = sys.argv[1], os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
train.heartbeat(step=1)
open(f"{out}/{restart}-{rank}-{os.getpid()}-{sys.argv[2]}", "w").close()
while restart == "0" and not os.path.exists(f"{out}/go"):
    time.sleep(0.01)
if restart == "0" and rank == "0":
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_standbys_of_a_launched_script_become_its_workers(tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text(WORKER)
    command = ("-u", str(tmp_path / "worker.py"), str(tmp_path), "local${local_rank}")
    waiting: list[int] = []

    def kill_when_ready() -> None:
        wait_for(lambda: len(found := standbys_of(os.getpid())) == 2 and waiting.extend(found) is None)
        wait_for(lambda: bool(list(tmp_path.glob("0-0-*"))))
        (tmp_path / "go").touch()

    killer = threading.Thread(target=kill_when_ready)
    killer.start()
    launch = elastic_launch(config(max_restarts=1, standby="auto"), sys.executable)
    assert launch(*command) == {0: None, 1: None}
    killer.join()
    names = [path.name.split("-") for path in tmp_path.glob("1-*")]
    assert sorted((rank, word) for _, rank, _, word in names) == [("0", "local0"), ("1", "local1")]
    assert sorted(int(pid) for _, _, pid, _ in names) == sorted(waiting)
    assert standbys_of(os.getpid()) == []


def standbys_of(parent: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{parent}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has just ended
            found += (task / "children").read_text().split()
    return [int(pid) for pid in found if command_name(pid) == "ripstop-standby"]


def command_name(pid: str) -> str:
    """Empty for a process that has just ended."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/comm").read_text().rstrip("\n")
    return ""


@pytest.mark.parametrize(
    ("setting", "entrypoint", "line"),
    [
        ({"standby": 3}, "python", "standby=3: above the maximum (2); give 1 to 2, the workers of this node"),
        ({"standby": 1}, "ls", "standby=1: standbys are forked, and ls is no Python script; leave standby out"),
        ({"standby": 1, "standby_until": "end"}, "python", "standby_until=end: standbys run until script or elastic"),
        ({"standby": "auto"}, os.getpid, "standby=auto: standbys are forked from a zygote, and a function is not"),
    ],
)
def test_standbys_that_cannot_be_are_an_error(setting: dict[str, Any], entrypoint: Any, line: str) -> None:
    with pytest.raises(ValueError, match=re.escape(line)):
        elastic_launch(config(**setting), entrypoint)()


# functions ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_a_function_of_the_program_runs_in_every_worker_and_returns_values_by_rank(
    program: Program, method: str
) -> None:
    source = """
    def work(word):
        return [word, os.environ["LOCAL_RANK"], os.environ["WORLD_SIZE"], os.getpid()]

    if __name__ == "__main__":
        say(elastic_launch(config(sys.argv[1], workers=3), work)("hello"), os.getpid())
    """
    ((values, launcher),) = said(program(source, method))
    assert {rank: value[:3] for rank, value in values.items()} == {
        str(rank): ["hello", str(rank), "3"] for rank in range(3)
    }
    assert len({value[3] for value in values.values()} | {launcher}) == 4


def test_closures_work_with_fork() -> None:
    seen = {"word": "inside"}
    assert elastic_launch(config(), lambda: (seen["word"], os.environ["RANK"]))() == {
        0: ("inside", "0"),
        1: ("inside", "1"),
    }


@pytest.mark.parametrize("method", METHODS)
def test_a_queue_of_the_same_context_can_be_an_argument(program: Program, method: str) -> None:
    source = """
    import multiprocessing

    def work(queue):
        queue.put(int(os.environ["RANK"]))

    if __name__ == "__main__":
        queue = multiprocessing.get_context(sys.argv[1]).Queue()
        elastic_launch(config(sys.argv[1]), work)(queue)
        say(sorted([queue.get(), queue.get()]))
    """
    assert said(program(source, method)) == [[[0, 1]]]


@pytest.mark.parametrize("method", ("spawn", "fork"))
def test_functions_form_a_process_group(program: Program, method: str) -> None:
    source = """
    import torch, torch.distributed as dist

    def work():
        dist.init_process_group("gloo")
        tensor = torch.ones(1) + dist.get_rank()
        dist.all_reduce(tensor)
        dist.destroy_process_group()
        return tensor

    if __name__ == "__main__":
        say({rank: value.item() for rank, value in elastic_launch(config(sys.argv[1]), work)().items()})
    """
    assert said(program(source, method)) == [[{"0": 3.0, "1": 3.0}]]


def test_a_large_return_value_is_complete() -> None:
    assert elastic_launch(config(workers=1), lambda: b"x" * (64 << 20))() == {0: b"x" * (64 << 20)}


def test_a_function_that_fails_is_restarted_and_the_last_round_counts(tmp_path: Path) -> None:
    def work() -> str:
        first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        if first and os.environ["RANK"] == "1":
            raise ValueError("only once")
        return os.environ["TORCHELASTIC_RESTART_COUNT"]

    assert elastic_launch(config(max_restarts=2), work)() == {0: "1", 1: "1"}


@pytest.mark.parametrize("launcher", (TORCH, OURS))
def test_a_failure_has_torchs_fields(program: Program, launcher: str) -> None:
    source = """
    def broken(word):
        if os.environ["RANK"] == "1":
            raise ValueError(word)
        time.sleep(60)

    def killed():
        if os.environ["RANK"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)

    if __name__ == "__main__":
        try:
            elastic_launch(config("fork"), broken)("broken")
        except Exception as error:
            rank, failure = error.get_first_failure()
            say(type(error).__name__, error.name, rank, failure.local_rank, failure.exitcode, failure.pid > 0)
            say(failure.message["message"], os.path.exists(failure.error_file), failure.signal_name())
            say("broken" in str(error), list(error.failures))
        try:
            elastic_launch(config("fork"), killed)()
        except Exception as error:
            failure = error.failures[0]
            say(failure.exitcode, failure.signal_name(), failure.message.replace(str(failure.pid), "PID"))
    """
    assert said(program(source, launcher=launcher)) == [
        ["ChildFailedError", "broken", 1, 1, 1, True],
        ["ValueError: broken", True, "<N/A>"],
        [True, [1]],
        [-9, "SIGKILL", "Signal 9 (SIGKILL) received by PID PID"],
    ]


@pytest.mark.parametrize("method", ("spawn", "forkserver"))
def test_a_function_that_cannot_be_pickled_is_rejected_before_anything_starts(method: str) -> None:
    with pytest.raises(pickle.PicklingError, match=r"cannot be pickled.*start_method='fork'"):
        elastic_launch(config(method), lambda: None)()
    with pytest.raises(pickle.PicklingError, match="an argument"):
        elastic_launch(config(method), os.getpid)(threading.Lock())


@pytest.mark.parametrize("static", (False, True))
def test_a_rejected_launch_can_be_retried_at_the_same_endpoint(static: bool) -> None:
    port = free_port()
    backend = {"rdzv_backend": "static", "rdzv_configs": {"rank": 0}} if static else {}
    place = {"rdzv_endpoint": f"localhost:{port}", **backend}
    kept: list[BaseException] = []  # with its frames: they would keep what they hold
    with pytest.raises(pickle.PicklingError) as refused:
        elastic_launch(config("spawn", workers=1, **place), lambda: None)()
    kept.append(refused.value)
    assert elastic_launch(config(workers=1, **place), os.getppid)() == {0: os.getpid()}
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(("localhost", port))


def test_a_function_that_exits_returns_none_or_is_an_error() -> None:
    assert elastic_launch(config(workers=1), lambda: sys.exit(0))() == {0: None}
    assert elastic_launch(config(workers=1), sys.exit)() == {0: None}
    with pytest.raises(ChildFailedError):
        elastic_launch(config(workers=1), lambda: sys.exit(""))()
    with pytest.raises(RuntimeError, match=r"rank 0 ended its process \(exit code 0\) and did not return"):
        elastic_launch(config(workers=1), lambda: os._exit(0))()


def test_a_return_value_that_cannot_be_sent_is_the_workers_failure() -> None:
    with pytest.raises(ChildFailedError) as failed:
        elastic_launch(config(workers=1), threading.Lock)()
    assert "this lock cannot be pickled" in failed.value.failures[0].message["message"]


# commands -------------------------------------------------------------------------------------------------------------


def test_a_command_gets_its_arguments_and_returns_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os, sys; open(os.environ['RANK'], 'w').write(' '.join(sys.argv[1:]))")
    monkeypatch.chdir(tmp_path)
    assert elastic_launch(config(), sys.executable)("-u", str(script), "--local-rank=${local_rank}") == {
        0: None,
        1: None,
    }
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["--local-rank=0", "--local-rank=1"]
    assert elastic_launch(config(), "sh")("-c", "echo $RANK ${local_rank} > from_sh_$RANK") == {0: None, 1: None}
    assert [(tmp_path / f"from_sh_{rank}").read_text() for rank in "01"] == ["0 0\n", "1 1\n"]


def test_a_commands_failure_bears_its_scripts_name(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("raise SystemExit(7)")
    with pytest.raises(ChildFailedError) as failed:
        launch_agent(config(workers=1), sys.executable, ["-u", str(script)])
    assert failed.value.name == str(script)
    assert failed.value.failures[0].exitcode == 7


def test_output_goes_where_the_logs_specs_say(tmp_path: Path) -> None:
    specs = DefaultLogsSpecs(log_dir=str(tmp_path), redirects=Std.ALL)

    def work() -> None:
        os.write(1, f"out {os.environ['RANK']}".encode())

    elastic_launch(config(logs_specs=specs), work)()
    assert sorted(path.read_text() for path in tmp_path.rglob("stdout.log")) == ["out 0", "out 1"]


@pytest.mark.parametrize("stand_in", ("io.StringIO()", "None"))
def test_the_output_of_a_fork_is_in_its_file_wherever_the_programs_output_goes(
    program: Program, tmp_path: Path, stand_in: str
) -> None:
    source = f"""
    import io, ripstop.compat.multiprocessing as m
    def work():
        print("printed")
        os.system("echo echoed")
    sys.stdout = {stand_in}
    specs = m.DefaultLogsSpecs({str(tmp_path / "logs")!r}, redirects=m.Std.OUT)
    elastic_launch(config(workers=1, logs_specs=specs), work)()
    """
    assert said(program(source)) == []
    (path,) = (tmp_path / "logs").rglob("stdout.log")
    assert sorted(path.read_text().splitlines()) == ["echoed", "printed"]


def test_teed_output_goes_to_the_object_that_the_program_has_for_its_stdout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As with torch: `capsys`, `redirect_stdout`, notebooks."""
    specs = DefaultLogsSpecs(log_dir=str(tmp_path), tee=Std.ALL)

    def work() -> None:
        for number in range(1000):
            os.write(1, f"{number} éé\n".encode())
        os.write(1, b"\xff and no end")
        os.write(2, b"to stderr\n")

    def lines(text: str, rank: int) -> list[str]:
        prefix = f"[default_role{rank}]:"
        return [line.removeprefix(prefix) for line in text.splitlines() if line.startswith(prefix)]

    wanted = [*(f"{number} éé" for number in range(1000)), "\ufffd and no end"]
    with contextlib.redirect_stdout(io.StringIO()) as redirected:
        elastic_launch(config(logs_specs=specs), work)()
    shown = capsys.readouterr()
    assert [lines(redirected.getvalue(), rank) for rank in range(2)] == [wanted, wanted]
    assert (shown.out, lines(shown.err, 0), lines(shown.err, 1)) == ("", ["to stderr"], ["to stderr"])
    with contextlib.redirect_stdout(io.StringIO()) as closed:
        closed.close()
        elastic_launch(config(logs_specs=specs), work)()  # must not fail


def test_a_command_is_launched_although_the_programs_stdout_cannot_be_written(program: Program) -> None:
    source = """
    own = os.dup(1)
    os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
    print("before")  # stays in the buffer
    elastic_launch(config(), "true")()
    os.write(own, b'"launched"')
    os._exit(0)  # without another flush
    """
    assert said(program(source, PYTHONUNBUFFERED="")) == ["launched"]


def test_teed_output_follows_what_the_program_printed_before(program: Program) -> None:
    source = """
    from ripstop.compat.multiprocessing import DefaultLogsSpecs, Std
    def work():
        print("by a worker")
    print("before")  # in a pipe it is not written at once
    elastic_launch(config(workers=1, logs_specs=DefaultLogsSpecs(tee=Std.ALL)), work)()
    print("after")
    """
    out, err = program(source).communicate(timeout=DEADLINE)
    assert out.splitlines() == ["before", "[default_role0]:by a worker", "after"], err


class Flat(LogsSpecs):
    """All in one directory, and a variable for the workers."""

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        top = self.root_log_dir
        for rank, env in envs.items():
            env |= {"MINE": f"my {rank}", "TORCHELASTIC_ERROR_FILE": f"{top}/{rank}.json"}
        names = {rank: f"{top}/{rank}.out" for rank in envs}
        return LogsDest(names, dict.fromkeys(envs, ""), names, {}, {rank: f"{top}/{rank}.json" for rank in envs})

    @property
    def root_log_dir(self) -> str:
        return str(self._root_log_dir)


def test_custom_logs_specs_choose_output_and_error_files(tmp_path: Path, capfd: Any) -> None:
    def work() -> None:
        os.write(1, f"{os.environ['MINE']}\n".encode())
        if os.environ["RANK"] == "1":
            raise ValueError("broken")
        time.sleep(60)

    with pytest.raises(ChildFailedError) as failed:
        elastic_launch(config(logs_specs=Flat(str(tmp_path))), work)()
    assert (tmp_path / "1.out").read_text() == "my 1\n" and "[default_role1]:my 1" in capfd.readouterr().out
    assert failed.value.failures[1].error_file == str(tmp_path / "1.json")
    assert failed.value.failures[1].message["message"] == "ValueError: broken"


class Silent(LogsSpecs):
    """Names no error files, and does not call the base class's constructor."""

    def __init__(self) -> None:
        pass

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        return LogsDest(dict.fromkeys(envs, ""), dict.fromkeys(envs, ""), {}, {}, {})

    @property
    def root_log_dir(self) -> str:
        return ""


def test_logs_specs_that_name_no_error_file_lose_no_exception(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))

    def work() -> None:
        raise ValueError("broken")

    words = {"duplicate_stdout_filters": ["apple"]}
    with pytest.raises(ChildFailedError) as failed:
        elastic_launch(config(workers=1, logs_specs=Silent(), **words), work)()
    failure = failed.value.failures[0]
    assert failure.message["message"] == "ValueError: broken"
    assert Path(failure.error_file).is_relative_to(tmp_path)
    assert "no effect" not in caplog.text


def test_logs_to_dev_null_leave_no_file_whatever_happens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def work() -> None:
        raise ValueError("broken")

    with pytest.raises(ChildFailedError) as failed:
        elastic_launch(config(workers=1, logs_specs=DefaultLogsSpecs(os.devnull, tee=Std.ALL)), work)()
    assert failed.value.failures[0].message["message"] == "ValueError: broken"
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_left_on_disk_of_a_launch_that_wrote_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert elastic_launch(config(), os.getppid)() == {0: os.getpid(), 1: os.getpid()}
    assert list(tmp_path.iterdir()) == []


# inside a program -----------------------------------------------------------------------------------------------------


def test_a_program_that_is_in_an_event_loop_can_launch() -> None:
    async def main() -> dict[int, Any]:
        values = elastic_launch(config(), lambda: os.environ["RANK"])()
        await asyncio.sleep(0)  # the loop still works
        return values

    assert asyncio.run(main()) == {0: "0", 1: "1"}


def test_a_thread_can_launch() -> None:
    values: list[dict[int, Any]] = []
    thread = threading.Thread(target=lambda: values.append(elastic_launch(config("spawn"), os.getppid)()))
    thread.start()
    thread.join(DEADLINE)
    assert values == [{0: os.getpid(), 1: os.getpid()}]


def test_the_programs_signal_handlers_are_its_own_again_afterwards() -> None:
    def mine(*_: object) -> None:
        pass

    before = {number: signal.signal(number, mine) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGCHLD)}
    try:
        elastic_launch(config(signals_to_handle="SIGTERM,SIGUSR1"), os.getppid)()
        assert [signal.getsignal(number) for number in before] == [mine] * 3
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_the_programs_own_children_are_not_touched() -> None:
    own = subprocess.Popen(["sleep", "600"], start_new_session=True)
    try:
        elastic_launch(config(), os.getppid)()
        assert own.poll() is None
    finally:
        own.kill()
        assert own.wait() == -signal.SIGKILL


def test_a_child_that_the_program_starts_during_a_launch_is_not_touched(tmp_path: Path) -> None:
    def work() -> None:
        (tmp_path / "up").touch()
        wait_for((tmp_path / "go").exists)

    def meanwhile() -> None:
        wait_for((tmp_path / "up").exists)
        own.append(subprocess.Popen(["sleep", "600"], start_new_session=True))
        own.append(subprocess.Popen(["sh", "-c", "exit 7"], start_new_session=True))
        (tmp_path / "go").touch()

    own: list[subprocess.Popen[bytes]] = []
    thread = threading.Thread(target=meanwhile)
    thread.start()
    try:
        elastic_launch(config(), work)()
        thread.join()
        assert own[0].poll() is None
        assert own[1].wait() == 7
    finally:
        thread.join()
        for one in own:
            one.kill()
            one.wait()


def test_launches_in_several_threads_leave_each_others_workers_alone(program: Program) -> None:
    source = """
    import threading
    def work(name, other):
        open(name, "a").close()
        while not os.path.exists(other):
            time.sleep(0.01)
        while name == "slow" and not os.path.exists("quick is over"):
            time.sleep(0.01)
        return name

    def launch(name, other):
        say(elastic_launch(config(sys.argv[1], 1), work)(name, other)[0])
        open(f"{name} is over", "w").close()

    if __name__ == "__main__":
        threads = [threading.Thread(target=launch, args=pair) for pair in (("slow", "quick"), ("quick", "slow"))]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        from ripstop.system.linux import is_subreaper
        say(is_subreaper())
    """
    assert said(program(source, "spawn")) == [["quick"], ["slow"], [False]]


SLEEPERS = """
def work(nested):
    say(os.getpid())
    time.sleep(600)

def main(method, *args):
    try:
        elastic_launch(config(method), work)(*args)
    except BaseException as error:
        say(type(error).__name__, int(getattr(error, "sigval", 0)))
        raise SystemExit(0)
"""


def test_a_handler_and_its_stores_die_by_reference_count_when_the_launch_is_over(program: Program) -> None:
    process = program(
        """
        import asyncio, gc, weakref
        import torch.distributed as dist
        from ripstop.compat.multiprocessing.errors import ChildFailedError
        from ripstop.compat.rendezvous import rendezvous_handler_registry
        from ripstop.compat.rendezvous.c10d import create_backend
        from ripstop.compat.rendezvous.dynamic import DynamicRendezvousHandler, create_handler

        things, make_store = [], dist.TCPStore

        def store(*args, **kwargs):
            made = make_store(*args, **kwargs)
            things.append(weakref.ref(made))
            return made

        def make(parameters):
            backend, store = create_backend(parameters)
            made = create_handler(store, backend, parameters)
            things.append(weakref.ref(made))
            return made

        def work(fails):
            sys.exit(fails)

        def launch(fails):
            try:
                elastic_launch(config(rdzv_backend="mine", max_restarts=1), work)(fails)
            except ChildFailedError:
                assert fails

        async def launch_within_a_loop(fails):
            launch(fails)

        dist.TCPStore = store
        DynamicRendezvousHandler.get_backend = lambda self: "mine"
        rendezvous_handler_registry.register("mine", make)
        gc.disable()
        for start in (launch, lambda fails: asyncio.run(launch_within_a_loop(fails))):
            for fails in (0, 1):
                things.clear()
                start(fails)
                say(len(things) > 1, [str(thing()) for thing in things if thing() is not None])
        """
    )
    assert said(process) == 4 * [[True, []]]


def test_a_signal_stops_the_workers_and_is_an_exception(program: Program) -> None:
    process = program(SLEEPERS + "\nif __name__ == '__main__': main('fork', None)")
    assert process.stdout is not None
    pids = [json.loads(process.stdout.readline())[0] for _ in range(2)]
    process.terminate()
    assert said(process) == [["SignalException", signal.SIGTERM]]
    assert not any(map(is_alive, pids))


def test_ctrl_c_inside_an_event_loop_stops_the_workers(program: Program) -> None:
    source = """
    import asyncio

    async def inside():
        main("spawn", None)

    if __name__ == "__main__":
        loop = asyncio.new_event_loop()
        loop.run_until_complete(inside())
    """
    process = program(SLEEPERS + textwrap.dedent(source))
    assert process.stdout is not None
    pids = [json.loads(process.stdout.readline())[0] for _ in range(2)]
    process.send_signal(signal.SIGINT)
    assert said(process) == [["KeyboardInterrupt", 0]]
    assert not any(map(is_alive, pids))


@pytest.mark.parametrize("method", METHODS)
def test_workers_die_with_a_launcher_that_is_killed(program: Program, method: str) -> None:
    process = program(SLEEPERS + f"\nif __name__ == '__main__': main({method!r}, None)")
    assert process.stdout is not None
    pids = [json.loads(process.stdout.readline())[0] for _ in range(2)]
    process.kill()
    wait_for(lambda: not any(map(is_alive, pids)))


def test_a_launch_is_live_and_ready_while_its_workers_run(monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    monkeypatch.setenv("TORCHELASTIC_HEALTH_CHECK_PORT", url.rpartition(":")[2])

    def status(path: str) -> int:
        try:
            with urllib.request.urlopen(url + path, timeout=120) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code

    def work() -> int:
        wait_for(lambda: status("/ready") == 200)
        return status("/live")

    assert elastic_launch(config(workers=1), work)() == {0: 200}
    with pytest.raises(urllib.error.URLError):
        status("/live")


# several nodes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ("c10d", "static"))
def test_two_nodes_form_a_job(program: Program, backend: str) -> None:
    port = free_port()
    source = """
    def work():
        return [os.environ["GROUP_RANK"], os.environ["WORLD_SIZE"]]

    if __name__ == "__main__":
        backend, port, rank = sys.argv[1:]
        both = config("spawn", workers=1, rdzv_backend=backend, rdzv_endpoint=f"127.0.0.1:{port}")
        both.min_nodes = both.max_nodes = 2
        if backend == "static":
            both.rdzv_configs["rank"] = int(rank)
        say(elastic_launch(both, work)())
    """
    nodes = [program(source, backend, str(port), rank, RIPSTOP_TOKEN="t") for rank in "01"]
    values = [said(node)[0][0] for node in nodes]
    assert sorted(rank for value in values for rank in value) == ["0", "1"]
    assert all(value[rank] == [rank, "2"] for value in values for rank in value)


# the configuration ----------------------------------------------------------------------------------------------------


def test_the_configuration_has_torchs_fields_and_defaults() -> None:
    from torch.distributed.launcher import LaunchConfig as Theirs

    def described(kind: Any) -> list[tuple[str, Any]]:
        made = {"rdzv_configs", "metrics_cfg"}  # by factories
        return [(field.name, None if field.name in made else field.default) for field in dataclasses.fields(kind)]

    theirs = described(Theirs)  # an older torch has fewer
    assert [entry for entry in described(LaunchConfig) if entry[0] in dict(theirs)] == theirs
    assert LaunchConfig(1, 1, 1).rdzv_configs == Theirs(1, 1, 1).rdzv_configs == {"timeout": 900}
    assert LaunchConfig(1, 1, 1, rdzv_timeout=7).rdzv_configs == {"timeout": 7}
    with pytest.raises(ValueError, match="shutdown_timeout"):
        LaunchConfig(1, 1, 1, shutdown_timeout=-1)


def test_the_variable_for_the_shutdown_is_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, seconds in (("7", 7), ("2m", 120), ("", 30)):
        monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", text)
        assert LaunchConfig(1, 1, 1).shutdown_timeout == seconds
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "soon")
    with pytest.raises(ValueError, match="TORCH_ELASTIC_SHUTDOWN_TIMEOUT=soon: not a time"):
        LaunchConfig(1, 1, 1)


@pytest.mark.parametrize(
    ("configs", "notes"),
    [
        ({"join_timeout": 5}, []),
        ({"is_host": None, "store_type": "tcp"}, []),
        ({"join_timeout": 5, "timeout": 7}, ["--rdzv-conf timeout=7 has no effect beside join_timeout=5"]),
        ({"no_such_wait": 3}, ["--rdzv-conf: there is no no_such_wait, so it has no effect"]),
    ],
)
def test_torchs_settings_are_accepted_and_those_without_effect_are_logged(
    configs: dict[str, Any], notes: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert elastic_launch(config(workers=1, rdzv_configs=configs), os.getppid)() == {0: os.getpid()}
    assert [record.getMessage() for record in caplog.records if "--rdzv-conf" in record.getMessage()] == notes


@pytest.mark.parametrize(
    ("setting", "word"),
    [
        ({"rdzv_backend": "zookeeper"}, "rdzv_backend='zookeeper'.*c10d"),
        ({"rdzv_backend": "etcd", "rdzv_endpoint": ""}, "the address of etcd is missing; write --rdzv-endpoint"),
        ({"rdzv_endpoint": "no host!"}, "not a host name"),
        ({"start_method": "threads"}, "spawn, fork, forkserver"),
        ({"rdzv_configs": {"lease": "soon"}}, "lease=soon: not a time"),
        ({"local_addr": "a b"}, "not a host name"),
    ],
)
def test_a_configuration_that_cannot_be_right_is_a_value_error(setting: dict[str, Any], word: str) -> None:
    settings = {"run_id": "r", "rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "start_method": "fork"}
    with pytest.raises(ValueError, match=word):
        elastic_launch(LaunchConfig(1, 1, 1, **(settings | setting)), os.getpid)()


def test_an_impossible_numa_binding_is_rejected_or_skipped(caplog: pytest.LogCaptureFixture) -> None:
    for mode in AffinityMode:
        with pytest.raises(ValueError, match="numa-binding"):
            elastic_launch(config(workers=4000, numa_options=NumaOptions(mode)), os.getppid)()
    options = NumaOptions(AffinityMode.NODE, should_fall_back_if_binding_fails=True)
    assert elastic_launch(config(workers=1, numa_options=options), os.getppid)() == {0: os.getpid()}
    assert "not bound" in caplog.text
    caplog.clear()
    with pytest.raises(ValueError, match="lease=soon"):
        elastic_launch(config(workers=4000, numa_options=options, rdzv_configs={"lease": "soon"}), os.getppid)()
    assert "not bound" not in caplog.text


def test_a_missing_run_id_is_generated() -> None:
    nameless = config(workers=1, run_id="")
    assert elastic_launch(nameless, lambda: os.environ["TORCHELASTIC_RUN_ID"])() == {0: nameless.run_id}
    assert nameless.run_id


# events and metrics ---------------------------------------------------------------------------------------------------


def test_a_launch_sends_torchs_events_and_metrics_to_the_programs_handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[dict[str, Any]] = []
    numbers: dict[str, Any] = {}

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.append(json.loads(record.getMessage()))

    class Metrics(metrics.MetricHandler):
        def emit(self, metric_data: metrics.MetricData) -> None:
            numbers[metric_data.name] = metric_data.value

    def work() -> None:
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            raise ValueError("once")

    monkeypatch.setitem(events._log_handlers, "mine", Handler())
    monkeypatch.setitem(metrics._metrics_map, "torchelastic", Metrics())
    elastic_launch(config(workers=1, max_restarts=1, role="t", event_log_handler="mine"), work)()
    states = [(event["source"], event["metadata"]["state"]) for event in told]
    assert states == [
        ("WORKER", "START"),
        ("WORKER", "FAILED"),
        ("WORKER", "START"),
        ("WORKER", "SUCCEEDED"),
        ("AGENT", "SUCCEEDED"),
    ]
    assert numbers == {
        "workers.t.flakiness": 50, "workers.t.run_total": 1,
        "workers.t.run_success_with_retries": 1, "workers.t.run_success_no_retries": 0,
        "workers.t.run_failed_with_retries": 0, "workers.t.run_failed_no_retries": 0,
    }  # fmt: skip


def test_an_unknown_event_handler_is_rejected() -> None:
    with pytest.raises(ValueError, match="event_log_handler: nobody's: there is no such event handler"):
        elastic_launch(config(event_log_handler="nobody's"), os.getpid)()
