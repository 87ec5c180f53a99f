"""Timers compared with torch's: the same API, the same lines on the pipe, and a worker that misses one is killed."""

import multiprocessing
import os
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.elastic.timer as torch_timer
import torch.distributed.elastic.timer.api as torch_api
import torch.distributed.elastic.timer.debug_info_logging as torch_debug
import torch.distributed.elastic.timer.local_timer as torch_local

from ripstop.compat import timer
from tests.compat.processes import eventually
from tests.compat.signatures import taken_by_both

DEADLINE = 120.0
FORK = multiprocessing.get_context("fork")
MODULES = {"torch": torch_timer, "ripstop": timer}


@pytest.mark.parametrize("name", timer.__all__)
def test_the_signatures_are_torchs(name: str) -> None:
    places = (torch_timer, torch_api, torch_local, torch_debug)
    theirs = next(getattr(place, name) for place in places if hasattr(place, name))
    taken_by_both(theirs, getattr(timer, name))


# the with block -------------------------------------------------------------------------------------------------------


class Recorder(timer.TimerClient):
    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def acquire(self, scope_id: str, expiration_time: float) -> None:
        self.calls.append(("acquire", scope_id, expiration_time))

    def release(self, scope_id: str) -> None:
        self.calls.append(("release", scope_id))


@pytest.fixture
def client() -> Iterator[Recorder]:
    recorder = Recorder()
    timer.configure(recorder)
    yield recorder
    timer._timer_client = None


def test_a_block_sets_a_timer_and_clears_it_however_it_ends(client: Recorder) -> None:
    before = time.time()
    with pytest.raises(KeyError), timer.expires(after=60, scope="mine"):
        raise KeyError
    (_, scope, expires), released = client.calls
    assert scope == "mine" and before + 60 <= expires <= time.time() + 60
    assert released == ("release", "mine")


def test_a_scope_without_a_name_is_the_callers_line(client: Recorder) -> None:
    with (
        timer.expires(after=60),
        timer.expires(after=30),
    ):
        pass
    outer, inner = (call[1] for call in client.calls[:2])
    file, _, line = outer.rpartition("#")
    assert file == __file__
    assert inner == f"{file}#{int(line) + 1}", "a block within another has a timer of its own"


def test_a_client_may_be_given_and_one_is_needed() -> None:
    given = Recorder()

    @timer.expires(after=60, scope="call", client=given)
    def work() -> None: ...

    work(), work()
    assert [call[0] for call in given.calls] == ["acquire", "release"] * 2
    with pytest.raises(RuntimeError, match="call configure"), timer.expires(after=1):
        pass


# through the pipe -----------------------------------------------------------------------------------------------------


def hanging(path: str, client: str) -> None:
    """A worker; runs in its own process."""
    module = MODULES[client]
    module.configure(module.FileTimerClient(path))
    with module.expires(after=60, scope="left in time"):
        pass
    with module.expires(after=0.2, scope="never left"):
        time.sleep(600)


@pytest.mark.parametrize("client", MODULES)
def test_our_server_kills_a_worker_that_misses_its_timer_and_lives_on(client: str, tmp_path: Path) -> None:
    steps: list[tuple[str, Any]] = []
    path = str(tmp_path / "pipe")
    server = timer.FileTimerServer(
        path, "run", max_interval=60, log_event=lambda name, request: steps.append((name, request))
    )
    server.start()
    worker = FORK.Process(target=hanging, args=(path, client))
    worker.start()
    worker.join(DEADLINE)
    assert worker.exitcode == -signal.SIGKILL
    eventually(lambda: len(steps) == 3, "the kill is told")
    server.stop(), server.stop()
    assert [name for name, _ in steps] == [
        "watchdog started",
        "timer expired",
        "kill worker process",
        "watchdog stopped",
    ]
    missed = steps[1][1]
    assert (missed.worker_pid, missed.scope_id, missed.signal) == (worker.pid, "never left", signal.SIGKILL)
    assert not Path(path).exists()


def test_torchs_server_understands_our_client(tmp_path: Path) -> None:
    """Signal 0 kills no process; with another, torch's server would kill this process too."""
    steps: list[tuple[str, Any]] = []
    path = str(tmp_path / "pipe")
    server = torch_timer.FileTimerServer(
        path, "run", 0.05, log_event=lambda name, request: steps.append((name, request))
    )
    server.start()
    client = timer.FileTimerClient(path, signal=0)
    with timer.expires(after=60, scope="left in time", client=client):
        pass
    with timer.expires(after=0.1, scope="left too late", client=client):
        eventually(lambda: len(steps) == 2, "torch's server notices")
    server.stop()
    assert [(name, request.scope_id) for name, request in steps[1:2]] == [("timer expired", "left too late")]
    ours = timer.FileTimerRequest(7, "s", 1.5, 9)
    assert ours.to_json() == torch_timer.FileTimerRequest(7, "s", 1.5, 9).to_json()


def test_requests_with_the_same_values_are_equal() -> None:
    assert timer.FileTimerRequest(7, "s", 1.5, 9) == timer.FileTimerRequest(7, "s", 1.5, 9)
    assert timer.FileTimerRequest(7, "s", 1.5, 9) != timer.FileTimerRequest(7, "s", 1.5, 15)
    assert timer.TimerRequest(7, "s", 1.5) == timer.TimerRequest(7, "s", 1.5) != timer.TimerRequest(8, "s", 1.5)
    assert timer.FileTimerRequest(7, "s", 1.5, 9) != "s"


def test_a_client_without_a_server_raises_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ripstop.compat.timer.RETRY_PAUSE_S", 0.001)
    os.mkfifo(tmp_path / "unread")
    for name in ("missing", "unread"):
        with pytest.raises(BrokenPipeError, match="there is no timer server"):
            timer.FileTimerClient(str(tmp_path / name)).acquire("s", 1.0)
    with pytest.raises(RuntimeError, match="shorter than"):
        timer.FileTimerClient(str(tmp_path / "unread")).acquire("s" * 5000, 1.0)


def test_a_users_file_is_never_replaced_by_a_pipe(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("precious")
    with pytest.raises(OSError, match="data"):
        timer.FileTimerServer(str(tmp_path / "data"), "run")
    assert (tmp_path / "data").read_text() == "precious"


def test_run_once_processes_the_requests_that_are_there(tmp_path: Path) -> None:
    def log_event(name: str, request: Any) -> None:
        told.append(name)
        raise ValueError("a callback that raises keeps nobody from being killed")

    told: list[str] = []
    path = str(tmp_path / "pipe")
    server = timer.FileTimerServer(path, "run", log_event=log_event)
    worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        before = server.get_last_progress_time()
        timer.FileTimerClient(path).acquire("mine", time.time() + 60)
        said = timer.FileTimerRequest(worker.pid, "theirs", time.time(), signal.SIGTERM).to_json()
        Path(path).write_text(f"{said}\n")
        server.run_once()
        assert worker.wait(DEADLINE) == -signal.SIGTERM
    finally:
        worker.kill()
        worker.wait()
    assert told == ["timer expired", "kill worker process"]
    assert server.get_last_progress_time() >= before
    assert [r.scope_id for rs in server.get_expired_timers(time.time() + 90).values() for r in rs] == ["mine"]
    server.register_timers([timer.FileTimerRequest(worker.pid, "of a dead process", 5.0, 9)])
    server.clear_timers({os.getpid()})
    assert server.get_expired_timers(time.time() + 90) == {}


# through a queue ------------------------------------------------------------------------------------------------------


def hanging_with_a_queue(messages: Any, client: str) -> None:
    module = MODULES[client]
    with module.expires(after=0.2, scope="never left", client=module.LocalTimerClient(messages)):
        time.sleep(600)


@pytest.mark.parametrize("client", MODULES)
def test_a_local_server_kills_at_the_deadline_and_not_at_its_interval(client: str) -> None:
    messages = FORK.Queue()
    server = timer.LocalTimerServer(messages, max_interval=600)
    server.start()
    worker = FORK.Process(target=hanging_with_a_queue, args=(messages, client))
    worker.start()
    worker.join(DEADLINE)
    assert worker.exitcode == -signal.SIGKILL
    server._stop_signaled = True  # stop() would wait for the interval to be over, as torch's does
    timer.LocalTimerClient(messages).release("wakes the server")
    thread = server._watchdog_thread
    assert thread is not None
    thread.join(DEADLINE)
    server.stop()


def test_a_worker_that_cannot_be_ended_is_retried_every_interval_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tries: list[float] = []

    class Server(timer.LocalTimerServer):
        def _reap_worker(self, worker_id: int) -> bool:
            tries.append(time.time())
            return super()._reap_worker(worker_id)

    server = Server(queue.Queue(), max_interval=0.1)
    server.register_timers([timer.TimerRequest(1 << 40, "stays", 1.0)])  # not a valid pid: the signal fails
    server.start()
    eventually(lambda: len(tries) >= 3, "it is tried again")
    server.stop()
    assert all(later - earlier >= 0.1 for earlier, later in pairwise(tries))
    said = [record for record in caplog.records if str(1 << 40) in record.getMessage()]
    assert [record.levelname for record in said] == ["WARNING", "ERROR", "ERROR"], caplog.text


def test_a_queue_returns_its_requests_and_waits_at_most_the_timeout() -> None:
    plain: queue.Queue[Any] = queue.Queue()
    requests = timer.MultiprocessingRequestQueue(plain)
    assert requests.get(3, timeout=0) == []
    client = timer.LocalTimerClient(plain)
    client.acquire("a", 5.0), client.release("a")
    assert requests.size() == 2
    assert requests.get(5, timeout=0.01) == [
        timer.TimerRequest(os.getpid(), "a", 5.0),
        timer.TimerRequest(os.getpid(), "a", -1),
    ]


# a custom server ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", MODULES)
def test_a_custom_server_is_called_again_for_a_worker_that_was_not_ended(kind: str) -> None:
    """The same class on torch's base and on ours."""
    api: Any = {"torch": torch_api, "ripstop": timer}[kind]
    asked: list[str] = []

    class Queue(api.RequestQueue):
        def size(self) -> int:
            return 0

        def get(self, size: int, timeout: float) -> list[Any]:
            return []

    class Server(api.TimerServer):
        cleared: Callable[[set[Any]], None]

        def register_timers(self, timer_requests: list[Any]) -> None:
            assert timer_requests == []

        def get_expired_timers(self, deadline: float) -> dict[str, list[Any]]:
            return {name: [api.TimerRequest(name, "s", 1.0)] for name in ("obeys", "stays", "raises")}

        def clear_timers(self, worker_ids: set[Any]) -> None:
            asked.append(f"cleared {sorted(worker_ids)}")

        def _reap_worker(self, worker_id: Any) -> bool:
            asked.append(worker_id)
            if worker_id == "raises":
                raise ValueError
            return bool(worker_id == "obeys")

    Server(Queue(), 1.0)._run_watchdog()
    assert asked == ["obeys", "stays", "raises", "cleared ['obeys', 'raises']"]
