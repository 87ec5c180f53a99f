"""The zygote: an interpreter that stops just before it would run the user's script, and forks workers at that point.

The agent starts `python -u train.py args` with `hook/` in front of PYTHONPATH, so `run_zygote` runs inside the import
of `sitecustomize`, the last step before the script.  There it imports what the workers need, and waits for requests.  A
worker is a fork that returns from `run_zygote`; Python itself then runs the script.  So `__main__`, `sys.argv`,
`sys.path[0]`, tracebacks and exit codes are Python's own, and no frame of ripstop is on the stack.

Rules
1.  The zygote has one thread and never touches a GPU.  If a preloaded module breaks this, the zygote reports it and
    exits.
2.  A worker is the agent's child: an intermediate process forks the workers and exits; the agent, a subreaper, adopts
    them.
3.  A worker is named PENDING and waits until the agent has claimed it (`worker_setup.py`).
4.  When the agent ends, the kernel kills the workers, and the zygote kills every other process of their sessions.
5.  A worker keeps what `worker_hooks.py` installs, and nothing else of ripstop: no file descriptor, no entry in
    sys.path or sys.modules, no variable.
6.  An error in here ends the process.  The zygote must never run the script.

Every module that this folder imports at the top is imported in every worker, so these are few and low-level.
"""

# Pathlib is slow to import, and every worker would import it.
# ruff: noqa: PTH110, PTH118, PTH120, PTH123, PTH208

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import atexit
import gc
import marshal
import os
import sys
import time

from ripstop.workers.zygote import title, worker_hooks
from ripstop.workers.zygote.channel import CHANNEL_FD_VARIABLE, PADDING_VARIABLE, Channel
from ripstop.workers.zygote.preload import Preload
from ripstop.workers.zygote.worker_setup import BROKEN, GO, PR_SET_PDEATHSIG, WorkerSetup

TYPE_CHECKING = False  # typing itself would be imported in every worker
if TYPE_CHECKING:
    from typing import Any, NoReturn

MADV_DONTNEED = 4
KILL_INTERVAL_S = 0.005


def run_zygote(home: str) -> None:
    """Serve the agent.  Returns only in workers."""
    try:
        failed = Zygote(home).serve()
    except BaseException as error:  # rule 6
        sys.stderr.write(f"ripstop: the zygote failed: {type(error).__name__}: {error}\n")
        os._exit(BROKEN)
    if failed is not None:  # from the user's sitecustomize: Python reports it in the worker, as it would without us
        raise failed


class Zygote:
    def __init__(self, home: str) -> None:
        self.home = home  # this folder
        self.import_root = os.path.dirname(os.path.dirname(os.path.dirname(home)))  # has the ripstop package
        self.channel = Channel(int(os.environ.pop(CHANNEL_FD_VARIABLE)))
        os.environ.pop(PADDING_VARIABLE, None)
        self.can_release_pages = False
        atexit.register(worker_hooks.exit_failed_worker)  # first registered, so last to run
        self.worker_start_times: dict[int, bytes] = {}  # by pid, which is also the worker's session
        settings, _ = self.channel.receive()
        self.agent_pid: int = settings["agent"]
        self.forks: bool = settings["forks"]
        self.title = title.ProcessTitle()
        self.preload = Preload(home, settings, self.title.prctl)
        title.rename_process(title.ZYGOTE)
        self.title.detach_environment()
        self.title.prctl(PR_SET_PDEATHSIG, _signal.SIGKILL, 0, 0, 0)
        if os.getppid() != self.agent_pid:
            os._exit(0)

    def serve(self) -> Exception | None:
        """Returns in a worker that is to run the script."""
        self._remove_hook()
        failed = self._import_user_sitecustomize() if self.forks else None
        self._prepare()
        while True:
            try:
                requests, fds = self.channel.receive()
                worker = self._spawn(requests, fds)
            except (EOFError, ConnectionError):
                self._kill_sessions()
            if worker is not None:
                break
            self._release_library_pages()
        worker()
        return failed

    # preloading -----------------------------------------------------------------------------------------------------

    def _remove_hook(self) -> None:
        """Remove what made this interpreter a zygote, so that no process started from here becomes one."""
        hook = os.path.join(self.home, "hook")
        rest = os.environ.pop("PYTHONPATH").split(os.pathsep)[1:]
        if rest:
            os.environ["PYTHONPATH"] = os.pathsep.join(rest)
        sys.path.remove(hook)
        sys.path_importer_cache.pop(hook, None)
        sys.modules.pop("sitecustomize", None)
        for name in os.listdir("/proc/self/fd"):
            fd = int(name)
            if fd > 2 and fd != self.channel.socket.fileno() and is_inherited_by_zygote_process(fd):
                os.close(fd)
        os.set_inheritable(self.channel.socket.fileno(), False)

    def _import_user_sitecustomize(self) -> Exception | None:
        """Import the user's own sitecustomize, as Python would have done; return its exception."""
        try:
            import sitecustomize  # type: ignore[import-not-found]  # noqa: F401
        except ImportError as error:
            if error.name != "sitecustomize":
                return error
        except Exception as error:
            return error
        return None

    def _prepare(self) -> None:
        """Preload, and report the result to the agent."""
        began = time.monotonic()
        gc.disable()  # a collection would write to every page that workers are to share
        if self.forks and (end := self.preload.run()):
            self.channel.send({**end, "seconds": time.monotonic() - began})
            os._exit(0)
        gc.freeze()
        self.can_release_pages = bool(self.preload.loaded)
        self.title.prctl(PR_SET_PDEATHSIG, 0, 0, 0, 0)  # from now on it must outlive the agent (rule 4)
        self.channel.send(
            {
                "preloaded": self.preload.packages(),
                "left_out": self.preload.left_out,
                "seconds": time.monotonic() - began,
            }
        )

    def _release_library_pages(self) -> None:
        """Unmap, once, the library pages that importing has touched.

        No child shares them and the zygote no longer needs them.  The kernel keeps them in its cache.
        """
        if not self.can_release_pages:
            return
        self.can_release_pages = False
        import ctypes

        madvise = ctypes.CDLL(None).madvise
        madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        for start, size in clean_zygote_mappings():
            madvise(start, size, MADV_DONTNEED)

    # forking --------------------------------------------------------------------------------------------------------

    def _spawn(self, requests: list[dict[str, Any]], fds: list[int]) -> WorkerSetup | None:
        """Fork these workers.  Returns a `WorkerSetup` in each of them, None in the zygote."""
        if any(request["what"] in ("run", "standby") for request in requests) and (path := self.preload.changed_file()):
            self.channel.send({"changed": path})  # the agent replaces this zygote
            os._exit(0)
        go_pipe = os.pipe()
        report_pipe = os.pipe()
        try:
            intermediate = os.fork()
        except OSError as error:
            for fd in (*go_pipe, *report_pipe, *fds):
                os.close(fd)
            self.channel.send({"error": f"cannot fork: {error.strerror}"})
            return None
        if intermediate == 0:
            os.close(report_pipe[0])
            return self._fork_workers(requests, fds, go_pipe, report_pipe[1])
        for fd in (go_pipe[0], report_pipe[1], *fds):
            os.close(fd)
        with open(report_pipe[0], "rb") as file:
            try:
                reply = marshal.load(file)
            except EOFError:
                reply = {"error": "the process that forks workers died"}
            os.waitpid(intermediate, 0)
            file.read()  # ends when every worker leads its session
        pids = reply.get("pids", ())
        self._record_sessions(pids)
        self.channel.send(reply)  # by now the workers are the agent's children and can take its signals
        try:
            if pids:
                self.channel.receive()
                os.write(go_pipe[1], GO * len(pids))
                self.channel.send("started")
        finally:
            os.close(go_pipe[1])
        return None

    def _fork_workers(
        self, requests: list[dict[str, Any]], fds: list[int], go_pipe: tuple[int, int], report_fd: int
    ) -> WorkerSetup | None:
        """In the intermediate process: fork the workers, report their pids, exit.  Returns in the workers."""
        self.title.prctl(title.PR_SET_NAME, title.PENDING, 0, 0, 0)
        pids: list[int] = []
        try:
            for request in requests:
                worker = WorkerSetup(self, request, fds, go_pipe)
                pid = os.fork()
                if pid == 0:
                    os.setsid()
                    os.close(report_fd)
                    return worker
                worker.close_streams()
                pids.append(pid)
        except OSError as error:
            for pid in pids:
                os.kill(pid, _signal.SIGKILL)
                os.waitpid(pid, 0)
            what = f"{error.strerror}: {error.filename}" if error.filename else f"cannot fork: {error.strerror}"
            reply: dict[str, Any] = {"error": what}
        else:
            reply = {"pids": pids}
        try:
            os.write(report_fd, marshal.dumps(reply))
        finally:
            os._exit(0)

    def _record_sessions(self, pids: tuple[int, ...]) -> None:
        for pid in list(self.worker_start_times):
            try:
                os.killpg(pid, 0)
            except OSError:
                del self.worker_start_times[pid]
        for pid in pids:
            self.worker_start_times[pid] = title.title_stat_fields(pid)[title.START_TIME]

    def _kill_sessions(self) -> NoReturn:
        """The agent has ended: kill what is left of the workers' sessions, then exit (rule 4)."""
        sys.path.insert(0, self.import_root)
        from ripstop.system.linux import processes

        # A pid is not reused while a session has its number.  If the pid now has another start time, the session has
        # ended and the number belongs to another process.
        sessions = {
            pid
            for pid, start in self.worker_start_times.items()
            if not os.path.exists(f"/proc/{pid}") or is_worker_of_zygote_process(pid, start)
        }
        while left := [p.pid for p in processes() if p.session in sessions and not p.dead]:
            for pid in left:
                try:
                    os.kill(pid, _signal.SIGKILL)
                except OSError:
                    continue
            time.sleep(KILL_INTERVAL_S)
        os._exit(0)


def clean_zygote_mappings() -> list[tuple[int, int]]:
    """Return (address, size) of read-only file mappings in which no page was ever written."""
    found: list[tuple[int, int]] = []
    mapping: tuple[int, int] | None = None
    with open("/proc/self/smaps", "rb") as file:
        for line in file:
            name, *words = line.split()
            if not name.endswith(b":"):
                start, _, end = name.partition(b"-")
                readable, inode = words[0] in (b"r--p", b"r-xp"), words[3]
                mapping = (int(start, 16), int(end, 16) - int(start, 16)) if readable and inode != b"0" else None
            elif name == b"Anonymous:" and words[0] == b"0" and mapping is not None:
                found.append(mapping)
    return found


def is_worker_of_zygote_process(pid: int, start: bytes) -> bool:
    try:
        return title.title_stat_fields(pid)[title.START_TIME] == start
    except OSError:
        return True  # it has ended since, and the number is not reused yet


def is_inherited_by_zygote_process(fd: int) -> bool:
    """Whether this descriptor came through an exec.  Python opens its own as close-on-exec."""
    try:
        return os.get_inheritable(fd)
    except OSError:
        return False
