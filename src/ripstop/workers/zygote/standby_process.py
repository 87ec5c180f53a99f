"""The standby's side: a forked process that warms up and waits just before the script's first line.

With `--standby-until=elastic`, it goes on from there (`run_ahead.py`).

Rules
1.  It is forked and claimed like a worker, ends with the agent, and leads its own session.  It has the environment, the
    processors and the memory policy that are known of its local rank before a round.
2.  The warm-up runs with low priority, and its output goes to stderr.  No code of the script runs in it.
3.  What a warm-up changed in the process is restored: environment, working directory, umask, signal handlers,
    `sys.path`, excepthook, random states, process group.  A Python thread or a child process that it left, or a handler
    that cannot be restored, ends the standby.
4.  The agent hands over the request for a worker.  The standby confirms it and becomes that worker, or says why not and
    exits: a module that the warm-up imported has changed on disk, the GPU is lost, a log file cannot be opened.
5.  It takes 5 to 10 ms to look at 2000 files.  So when a worker has failed, the agent asks for that at once, while the
    coordinator decides.  The result is valid for `CHECK_VALID_S`.
"""

# Pathlib is slow to import, and every worker would import it.
# ruff: noqa: PTH109, PTH123, PTH208

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import _thread
import gc
import os
import sys
import time

from ripstop.workers.zygote import title, warmups
from ripstop.workers.zygote.channel import CHECK, Channel
from ripstop.workers.zygote.preload import preloaded_file_identity

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

    from ripstop.workers.zygote.worker_setup import WorkerSetup

LOWEST_PRIORITY = 19
CHECK_VALID_S = 1.0


class WarmStandby:
    """What a standby has after its warm-up."""

    def __init__(
        self, control: Channel, before: StandbyProcessSurroundings, priority: StandbyProcessPriority, gpu_memory: int
    ) -> None:
        self.control = control
        self.before = before
        self.priority = priority
        self.gpu_memory = gpu_memory


def warm_up_standby_process(worker: WorkerSetup) -> WarmStandby:
    """Run the warm-up, and undo what it changed; the priority stays low."""
    control = Channel(worker.fds.pop())
    title.rename_process(title.STANDBY)
    own_path = worker.zygote.preload.first_path()
    pid = os.getpid()
    try:
        before = StandbyProcessSurroundings()
        priority = StandbyProcessPriority()
        os.dup2(2, 1)
        if own_path is not None:
            sys.path.insert(0, own_path)
        gc.enable()
        asked = worker.request
        gpu_memory = warmups.warm_up(asked["warm_up"], asked["local_rank"], with_gpu=asked["with_gpu"])
        gc.collect()
        exit_unless_standby_process(pid)
        before.restore()
    except BaseException as error:
        exit_unless_standby_process(pid)
        give_up_standby_process(control, "failed", f"the warm-up failed: {describe_standby_process_error(error)}")
    return WarmStandby(control, before, priority, gpu_memory)


def wait_as_standby_process(worker: WorkerSetup, warm: WarmStandby) -> dict[str, Any]:
    """Wait before the script; return the round's request, with the worker's streams opened."""
    warm.priority.restore()
    files = {path: preloaded_file_identity(path) for path in warm.before.new_files()}
    warm.control.send({"ready": {"memory": standby_process_private_memory(), "gpu_memory": warm.gpu_memory}})
    return wait_for_standby_process_request(worker, warm.control, files)


def wait_for_standby_process_request(
    worker: WorkerSetup, control: Channel, files: dict[str, tuple[int, int, int]]
) -> dict[str, Any]:
    """Return the round's request, with the worker's streams opened.  `files` are those that must not have changed."""
    valid_until, changed = 0.0, ""
    try:
        while (request := control.receive()[0]) == CHECK:
            changed = changed_standby_file(worker, files)
            valid_until = time.monotonic() + CHECK_VALID_S
    except (EOFError, ConnectionError):
        os._exit(0)
    if time.monotonic() > valid_until:
        changed = changed_standby_file(worker, files)
    if changed:
        give_up_standby_process(control, "unfit", f"{changed} has changed since it was imported")
    try:
        warmups.check_warmed_gpu()
    except Exception as error:
        give_up_standby_process(
            control, "unfit", f"its GPU does not work any more: {describe_standby_process_error(error)}"
        )
    try:
        worker.open_streams(request)
    except OSError as error:
        give_up_standby_process(control, "error", f"{error.strerror}: {error.filename}")
    control.send("taken")
    control.socket.close()
    return request  # type: ignore[no-any-return]


def changed_standby_file(worker: WorkerSetup, files: dict[str, tuple[int, int, int]]) -> str:
    """A file that was imported and has changed since; or an empty text."""
    changed = next((path for path, identity in files.items() if preloaded_file_identity(path) != identity), "")
    return changed or worker.zygote.preload.changed_file()


def exit_unless_standby_process(pid: int) -> None:
    """End a fork that the warm-up made and let return."""
    if os.getpid() != pid:
        os._exit(0)


def give_up_standby_process(control: Channel, kind: str, why: str) -> NoReturn:
    try:
        control.send({kind: why})
    finally:
        os._exit(0)


def describe_standby_process_error(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:500]


class StandbyProcessSurroundings:
    """What a warm-up must leave as it was; taken before it."""

    def __init__(self) -> None:
        self.directory = os.getcwd()
        self.umask = os.umask(0)
        os.umask(self.umask)
        self.stdout = os.dup(1)
        self.handlers = {signum: _signal.getsignal(signum) for signum in _signal.valid_signals()}
        self.caught = standby_caught_signals()
        self.path = list(sys.path)
        self.finders = set(sys.path_importer_cache)
        self.modules = set(sys.modules)
        self.hook = sys.excepthook

    def restore(self) -> None:
        """RuntimeError for what cannot be restored (rule 3)."""
        os.dup2(self.stdout, 1)
        os.close(self.stdout)
        if os.getcwd() != self.directory:
            os.chdir(self.directory)
        os.umask(self.umask)
        sys.path[:] = self.path
        for name in set(sys.path_importer_cache) - self.finders:
            sys.path_importer_cache.pop(name)  # the worker scans the directory again
        sys.excepthook = self.hook
        destroy_process_group_of_standby()
        self._restore_handlers()
        reseed_standby()
        if _thread._count():
            raise RuntimeError("it left a Python thread running; join it before you return")
        if standby_has_children():
            raise RuntimeError("it left a child process; wait for it before you return")

    def _restore_handlers(self) -> None:
        for signum, handler in self.handlers.items():
            if handler is not None and _signal.getsignal(signum) != handler:
                _signal.signal(signum, handler)
        if changed := standby_caught_signals() ^ self.caught:
            raise RuntimeError(f"it changed the handler of signal {abs(min(changed))}, which cannot be restored")

    def new_files(self) -> set[str]:
        """The files of the modules that the warm-up imported."""
        modules = [module for name, module in list(sys.modules.items()) if name not in self.modules]
        files = (getattr(module, "__file__", None) for module in modules)
        return {file for file in files if isinstance(file, str)}


class StandbyProcessPriority:
    """Lowers the priority of this process, as far as that can be undone without privileges."""

    def __init__(self) -> None:
        self.nice = os.getpriority(os.PRIO_PROCESS, 0)
        self.policy = os.sched_getscheduler(0)
        if self.policy == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        if standby_process_can_restore_priority():
            os.setpriority(os.PRIO_PROCESS, 0, LOWEST_PRIORITY)

    def restore(self) -> None:
        """In all threads and child processes: they have inherited the priority of the thread that started them."""
        processes = [os.getpid()]
        for pid in processes:
            try:
                threads = os.listdir(f"/proc/{pid}/task")
            except OSError:  # the process has ended
                continue
            for thread in threads:
                try:
                    os.sched_setscheduler(int(thread), self.policy, os.sched_param(0))
                    os.setpriority(os.PRIO_PROCESS, int(thread), self.nice)
                    with open(f"/proc/{pid}/task/{thread}/children", "rb") as file:
                        processes += map(int, file.read().split())
                except OSError:  # the thread has ended
                    continue


def standby_process_can_restore_priority() -> bool:
    """Whether a lowered priority can be raised again.  Tried in a thread, since every thread has its own."""
    can: list[bool] = []
    done = _thread.allocate_lock()
    done.acquire()

    def attempt() -> None:
        nice = os.getpriority(os.PRIO_PROCESS, 0)
        try:
            os.setpriority(os.PRIO_PROCESS, 0, nice + 1)
            os.setpriority(os.PRIO_PROCESS, 0, nice)
            can.append(True)
        except OSError:
            pass
        finally:
            done.release()

    _thread.start_new_thread(attempt, ())
    done.acquire()
    return bool(can)


def standby_caught_signals() -> set[int]:
    """The kernel's view: the signals that have a handler, and, as negative numbers, those that are ignored."""
    with open("/proc/self/status", "rb") as file:
        masks = dict(line.split(b":\t", 1) for line in file if line.startswith(b"Sig"))
    caught, ignored = int(masks[b"SigCgt"], 16), int(masks[b"SigIgn"], 16)
    signals = _signal.valid_signals()  # without those that libc keeps for itself
    return {n for n in signals if caught >> n - 1 & 1} | {-n for n in signals if ignored >> n - 1 & 1}


def standby_has_children() -> bool:
    """Whether a child process is left; those that have ended are reaped."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def destroy_process_group_of_standby() -> None:
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


def reseed_standby() -> None:
    """Random states that a warm-up may have set and that `worker_setup.reseed_worker_at_setup` does not renew."""
    if (random := sys.modules.get("random")) is not None:
        random.seed()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        default = torch.Generator().initial_seed()
        for generator in torch.cuda.default_generators:
            generator.manual_seed(default)


def standby_process_private_memory() -> int:
    """The bytes of memory that only this process uses."""
    with open("/proc/self/smaps_rollup", "rb") as file:
        return sum(int(line.split()[1]) for line in file if line.startswith(b"Private_")) * 1024
