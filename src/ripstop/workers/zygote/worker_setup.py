"""From the zygote's fork to the first instruction of a worker's own program.

Rules
1.  A worker waits until the agent has claimed its pid.  It exits if the zygote or the agent ends before that.
2.  A worker ends with the agent (parent-death signal).
3.  `/proc/PID/environ` shows the worker's own environment, as after an exec.
"""

# Pathlib is slow to import, and every worker would import it.
# ruff: noqa: PTH118

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import gc
import os
import sys

from ripstop.workers.zygote import run_ahead, title, worker_hooks
from ripstop.workers.zygote.standby_process import wait_as_standby_process, warm_up_standby_process

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

    from ripstop.workers.zygote.process import Zygote

PR_SET_PDEATHSIG = 1
MPOL_PREFERRED = 1
GO = b"g"
NOT_FOUND, NOT_EXECUTABLE, BROKEN = 127, 126, 70  # exit codes: the shell's two, and EX_SOFTWARE

SAVER_PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
from ripstop.train.saver import run_saver
sys.path[0] = sys.argv[2]
run_saver(sys.argv[3], int(sys.argv[4]), [int(fd) for fd in sys.argv[5:]])
"""


class WorkerSetup:
    """One requested process.  Made before the fork; called in the forked process."""

    def __init__(self, zygote: Zygote, request: dict[str, Any], fds: list[int], go_pipe: tuple[int, int]) -> None:
        self.zygote = zygote
        self.request = request
        self.fds = fds
        self.go_pipe = go_pipe
        self.streams: dict[int, int]  # by number of the stream
        self.open_streams(request)

    def open_streams(self, request: dict[str, Any]) -> None:
        self.streams = {}
        for number, path in ((1, request["stdout"]), (2, request["stderr"])):
            if path is not None:
                no_follow = 0 if path.startswith("/dev/") else os.O_NOFOLLOW
                flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | no_follow | os.O_CLOEXEC
                self.streams[number] = os.open(path, flags, 0o666)

    def close_streams(self) -> None:
        """In the parent, after the fork."""
        for fd in self.streams.values():
            os.close(fd)

    def __call__(self) -> None:
        """Set the process up.  Returns only if Python is to run the script."""
        os.close(self.go_pipe[1])
        self.zygote.channel.socket.close()
        self._set_environment()
        self._redirect()
        self._wait_for_go()
        self._bind()
        match self.request["what"]:
            case "run":
                self._prepare_script()
            case "standby":
                warm = warm_up_standby_process(self)
                runs_ahead = self.request["shadowed"] is not None
                prepare = run_ahead.prepare_run_ahead if runs_ahead else wait_as_standby_process
                self.request = prepare(self, warm)
                self._set_environment()
                self._redirect()
                self._prepare_script()
                if runs_ahead:
                    title.rename_process(run_ahead.TITLE)
            case "exec":
                self.zygote.title.show(self.request["argv"])
                self._exec(self.request["argv"])
            case "store":
                self._serve_store(self.request["host"], self.request["port"])
            case "save":
                self._save(self.request["settings"])

    def _set_environment(self) -> None:
        env = self.request["env"]
        for name in [name for name in os.environ if name not in env]:
            del os.environ[name]
        for name, value in env.items():
            if os.environ.get(name) != value:
                os.environ[name] = value

    def _redirect(self) -> None:
        for number, fd in self.streams.items():
            os.dup2(fd, number)
            os.close(fd)

    def _wait_for_go(self) -> None:
        """Wait until the agent is the parent and has claimed this pid (rule 1)."""
        go = os.read(self.go_pipe[0], 1)
        os.close(self.go_pipe[0])
        self.zygote.title.prctl(PR_SET_PDEATHSIG, _signal.SIGKILL, 0, 0, 0)
        if go != GO or os.getppid() != self.zygote.agent_pid:
            os._exit(BROKEN)

    def _bind(self) -> None:
        """Bind to the processors and the memory near the worker's GPU."""
        if cpus := self.request["cpus"]:
            try:
                os.sched_setaffinity(0, cpus)
            except OSError as error:
                sys.stderr.write(f"ripstop: cannot run on processors {cpus}: {error.strerror}; ")
                sys.stderr.write("they were allowed when the job started: check what changed the cpuset.\n")
                os._exit(BROKEN)
        if self.request["memory"]:
            import ctypes

            call, node = self.request["memory"]
            mask = (ctypes.c_uint64 * (node // 64 + 1))()
            mask[node // 64] = 1 << node % 64
            long = ctypes.c_long
            if ctypes.CDLL(None).syscall(long(call), long(MPOL_PREFERRED), mask, long(len(mask) * 64 + 1)):
                sys.stderr.write(f"ripstop: the kernel refused to prefer the memory of NUMA node {node}.\n")

    def _prepare_script(self) -> None:
        for fd in self.fds:
            os.close(fd)
        for name, value in self.zygote.preload.added.items():
            os.environ.setdefault(name, value)
        args = self.request["args"]
        sys.argv[1:] = args
        sys.orig_argv[len(sys.orig_argv) - self.request["zygote_args"] :] = args
        for number in self.streams:
            set_up_worker_stream(number)
        reseed_worker_at_setup()
        worker_hooks.install_worker_excepthook(self.zygote.import_root)
        self._install_round_hooks()
        gc.enable()

    def become_worker(self, request: dict[str, Any]) -> None:
        """In a standby that has run the script up to its training function: take part in this round."""
        self._redirect()
        env, before = request["env"], self.request["env"]
        for name in [name for name in before if name not in env]:
            os.environ.pop(name, None)
        for name, value in env.items():
            if before.get(name) != value:
                os.environ[name] = value
        self.request = request
        self._install_round_hooks()

    def _install_round_hooks(self) -> None:
        """Install what differs between rounds, and show the process title."""
        self.zygote.title.show(sys.orig_argv)
        self.zygote.title.show_environment()
        worker_hooks.error_file_path = os.environ.get("TORCHELASTIC_ERROR_FILE")
        if self.request["stacks"]:
            worker_hooks.install_worker_stack_hook(*self.request["stacks"])
        if self.request["exit_signal"]:
            worker_hooks.install_exit(self.request["exit_signal"])
        if self.request["recorder"] and "torch" in sys.modules:
            worker_hooks.install_worker_recorder_hook(self.request["recorder"])

    def _exec(self, argv: list[str]) -> NoReturn:
        for fd in self.fds:
            os.set_inheritable(fd, True)
        for number in (_signal.SIGPIPE, _signal.SIGXFSZ):  # Python ignores them, and an exec would inherit that
            _signal.signal(number, _signal.SIG_DFL)
        try:
            os.execvpe(argv[0], argv, self.request["env"])
        except OSError as error:
            sys.stderr.write(f"ripstop: cannot execute {argv[0]!r}: {error.strerror}; check that it is on PATH.\n")
            os._exit(NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE)

    def _serve_store(self, host: str, port: int) -> NoReturn:
        """Serve the round's store here, or in a new interpreter if the zygote has not imported torch.

        This is the interpreter of the script, because that is where torch is installed.
        """
        if "torch" not in sys.modules:
            python = self.request["env"].get("PYTHON_EXEC") or sys.executable
            program = os.path.join(self.zygote.home, "store_process.py")
            self._exec([python, "-u", program, host, str(port), str(self.fds[0])])
        sys.path.insert(0, self.zygote.import_root)
        from ripstop.workers.zygote.store_process import run_store_process

        del sys.path[0]
        run_store_process(host, port, self.fds[0])

    def _save(self, settings: str) -> NoReturn:
        """Save a commit to disk here, or in a new interpreter if the zygote has not imported torch."""
        if "torch" not in sys.modules:
            paths = self.zygote.import_root, self.zygote.preload.first_path() or ""
            self._exec([sys.executable, "-u", "-c", SAVER_PROGRAM, *paths, settings, *map(str, self.fds)])
        title.rename_process(title.SAVER)
        sys.path.insert(0, self.zygote.import_root)
        from ripstop.train.saver import run_saver

        del sys.path[0]
        if (first := self.zygote.preload.first_path()) is not None:
            sys.path.insert(0, first)  # values may be of classes that the script imports
        run_saver(settings, self.fds[0], self.fds[1:])


def set_up_worker_stream(fd: int) -> None:
    """Replace sys.stdout or sys.stderr, as `python -u` opens it: its descriptor is another file now."""
    import io

    name = {1: "stdout", 2: "stderr"}[fd]
    old = getattr(sys, f"__{name}__")
    raw = io.FileIO(fd, "wb", closefd=False)
    raw.name = f"<{name}>"
    text = io.TextIOWrapper(raw, old.encoding, old.errors, newline="\n", write_through=True)
    text.mode = "w"  # type: ignore[misc]
    setattr(sys, name, text)
    setattr(sys, f"__{name}__", text)


def reseed_worker_at_setup() -> None:
    """Renew what a fork shares with its parent and a new process does not: random states, authkey, main thread id."""
    modules = sys.modules  # `random` reseeds itself
    if (numpy_random := modules.get("numpy.random")) is not None:
        numpy_random.seed()
    if (torch := modules.get("torch")) is not None:
        torch.default_generator.seed()  # the CPU's; GPU generators start from a fixed seed in any process
    if (process := modules.get("multiprocessing.process")) is not None:
        process.current_process().authkey = os.urandom(32)
    if (threading := modules.get("threading")) is not None:
        threading.main_thread()._set_native_id()
