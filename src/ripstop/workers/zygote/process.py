"""The zygote: an interpreter that stops just before it would run the user's script, and forks workers at that point.

The agent starts `python -u train.py args` with `hook/` in front of PYTHONPATH, so `main` below runs inside the import
of `sitecustomize`: the last thing before the script.  There it imports what the workers will need, and waits.  A worker
is a fork that returns; Python itself then runs the script.  So nothing of `__main__`, `sys.argv`, `sys.path[0]`,
tracebacks or exit codes is imitated: it is the real thing, and none of our frames is on the stack.

Rules
1.  The zygote has one thread and never touches a GPU.  A preload that breaks this makes it unfit: it says so and ends.
2.  A worker is the agent's child: a middle process forks the workers and exits; the agent, a subreaper, adopts them.
3.  A worker waits at the gate until the agent knows its pid, or dies there if zygote or agent do.  Until then it bears
    the name NEWBORN.
4.  A worker dies with the agent (parent-death signal).  What it leaves behind in its session, the zygote kills.
5.  What stays of ours in a worker: an excepthook that writes the error file, and an exit handler (rule 7).  No file
    descriptor, no entry in sys.path or sys.modules, no variable does.  Where hangs are to be diagnosed, faulthandler
    and its file stay too, and where there is torch, a thread that sleeps at a socket until it is asked (`flight.py`).
    `/proc/PID/environ` shows the worker's environment, as it would of a process that was executed with it.
6.  Whatever goes wrong in here ends the process: it must never fall through into the script by accident.
7.  When an exception ends the script, the worker exits as soon as threads have ended, exit handlers have run and files
    are flushed.  Taking torch's objects apart would take another 0.2 s, and the whole job would wait for it.

This file is not imported but executed in the new interpreter, hence its few and low-level imports: whatever is imported
here is imported in every worker, and the script's own modules may bear any name.  A message is a length and a
marshalled value, over a socket pair; both its ends are the same interpreter on the same machine.
"""

# Pathlib is slow to import, and every worker would have it.
# ruff: noqa: PTH109, PTH110, PTH112, PTH115, PTH118, PTH120, PTH123, PTH208

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import _socket
import atexit
import gc
import marshal
import os
import sys
import time

TYPE_CHECKING = False  # typing itself would be imported in every worker
if TYPE_CHECKING:
    from typing import Any, NoReturn

CHANNEL = "RIPSTOP_ZYGOTE"  # the variable that holds the number of the channel's file descriptor
ROOM = "RIPSTOP_ROOM"  # a variable that makes room for the workers' own in what /proc/PID/environ shows
NEWBORN = b"ripstop-newborn"
ZYGOTE = b"ripstop-zygote"
STORE = b"ripstop-store"
PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15
MADV_DONTNEED = 4
MPOL_PREFERRED = 1
GO = b"g"
NOT_FOUND, NOT_EXECUTABLE, BROKEN = 127, 126, 70  # exit codes: the shell's two, and EX_SOFTWARE


class Channel:
    """The zygote's end of the conversation with the agent."""

    def __init__(self, fd: int) -> None:
        self.socket = _socket.socket(fileno=fd)

    def receive(self) -> tuple[Any, list[int]]:
        """The next message and the file descriptors that came with it; EOFError when the agent is gone."""
        fds: list[int] = []
        size = int.from_bytes(self._read(4, fds), "big")
        return marshal.loads(self._read(size, fds)), fds

    def _read(self, size: int, fds: list[int]) -> bytes:
        data = b""
        while len(data) < size:
            part, ancillary, _, _ = self.socket.recvmsg(size - len(data), 1024, _socket.MSG_CMSG_CLOEXEC)
            if not part:
                raise EOFError
            data += part
            for _, _, ints in ancillary:
                fds += [int.from_bytes(ints[i : i + 4], sys.byteorder) for i in range(0, len(ints), 4)]
        return data

    def send(self, message: Any) -> None:
        data = marshal.dumps(message)
        self.socket.sendall(len(data).to_bytes(4, "big") + data)


class Title:
    """What `ps` and /proc show: the memory in which the kernel laid out a process's command line and environment.

    The zygote and its workers share one command line, and only the workers should be seen by it.
    """

    def __init__(self) -> None:
        import ctypes

        self.write = ctypes.memmove
        fields = stat_of("self")
        self.start = int(fields[45])
        self.words = ctypes.string_at(self.start, int(fields[46]) - self.start)
        self.env_start, self.env_size = int(fields[47]), int(fields[48]) - int(fields[47])
        self.prctl = ctypes.CDLL(None).prctl
        with open("/proc/self/comm", "rb") as file:
            self.name = file.read().strip()

    def hide(self) -> None:
        self.prctl(PR_SET_NAME, ZYGOTE, 0, 0, 0)
        title = ZYGOTE[: len(self.words) - 1]
        self.write(self.start, title.ljust(len(self.words), b"\0"), len(self.words))

    def show(self, argv: list[str]) -> None:
        """As a process that runs this; where there is no room for it, as it was before."""
        words = b"".join(os.fsencode(word) + b"\0" for word in argv)
        if len(words) > len(self.words):
            words = self.words
        self.write(self.start, words.ljust(len(self.words), b"\0"), len(self.words))
        self.prctl(PR_SET_NAME, self.name, 0, 0, 0)

    def move_environment(self) -> None:
        """Leave the environment's memory to `show_environment`: from now on nobody is given a pointer to it."""
        for name, value in os.environ.items():
            if name:  # one that begins with = has none, and nobody can ask for it
                os.putenv(name, value)  # libc makes a copy

    def show_environment(self) -> None:
        """Show the present one; where there is no room for it, the one before."""
        block = b"".join(b"%s=%s\0" % item for item in os.environb.items())
        if len(block) <= self.env_size:
            self.write(self.env_start, block.ljust(self.env_size, b"\0"), self.env_size)


def main(home: str) -> None:
    """Serves the agent.  Returns in workers only."""
    try:
        failed = Zygote(home).serve()
    except BaseException as error:  # rule 6
        sys.stderr.write(f"ripstop: the zygote is broken: {type(error).__name__}: {error}\n")
        os._exit(BROKEN)
    if failed is not None:  # the user's sitecustomize, in the zygote; let Python say so in the worker, as it would
        raise failed


class Zygote:
    """One zygote process, from its first breath to a worker's."""

    def __init__(self, home: str) -> None:
        self.home = home
        self.root = os.path.dirname(os.path.dirname(os.path.dirname(home)))  # where our package is found
        self.channel = Channel(int(os.environ.pop(CHANNEL)))
        os.environ.pop(ROOM, None)
        self.loaded = False
        atexit.register(leave)  # before anybody else, so that it comes last
        self.born: dict[int, bytes] = {}  # our workers' pids and start times: their sessions are ours to kill
        orders, _ = self.channel.receive()
        self.agent: int = orders["agent"]
        self.forks: bool = orders["forks"]
        self.preload: tuple[str, ...] | None = orders["preload"]
        self.kind, self.target = orders["entry"]
        self.title = Title()
        self.title.hide()
        self.title.move_environment()
        self.title.prctl(PR_SET_PDEATHSIG, _signal.SIGKILL, 0, 0, 0)
        if os.getppid() != self.agent:
            os._exit(0)

    def serve(self) -> Exception | None:
        """Returns in a worker that is to run the script."""
        self._clean()
        failed = self._user_hook() if self.forks else None
        self._warm()
        while True:
            try:
                births, fds = self.channel.receive()
                worker = self._spawn(births, fds)
            except (EOFError, ConnectionError):
                self._bury()
            if worker is not None:
                break
            self._slim()
        worker()
        return failed

    # warming up -----------------------------------------------------------------------------------------------------

    def _clean(self) -> None:
        """Removes what made this interpreter a zygote, so that nothing started from here becomes one."""
        hook = os.path.join(self.home, "hook")
        words = os.environ.pop("PYTHONPATH").split(os.pathsep)[1:]
        if words:
            os.environ["PYTHONPATH"] = os.pathsep.join(words)
        sys.path.remove(hook)
        sys.path_importer_cache.pop(hook, None)
        sys.modules.pop("sitecustomize", None)
        for name in os.listdir("/proc/self/fd"):
            fd = int(name)
            if fd > 2 and fd != self.channel.socket.fileno() and is_inherited(fd):
                os.close(fd)
        os.set_inheritable(self.channel.socket.fileno(), False)

    def _user_hook(self) -> Exception | None:
        """Imports the user's own sitecustomize, as Python would have done; gives its exception back."""
        try:
            import sitecustomize  # type: ignore[import-not-found]  # noqa: F401
        except ImportError as error:
            if error.name != "sitecustomize":
                return error
        except Exception as error:
            return error
        return None

    def _warm(self) -> None:
        began = time.monotonic()
        gc.disable()  # a collection would write to every page that workers are to share
        loaded: list[str] = []
        why = self._import(loaded) if self.forks else ""
        if self.forks and not why:
            why = self._trial()
        if why:
            self.channel.send({"unfit": why})
            os._exit(0)
        gc.freeze()
        self.loaded = bool(loaded)
        self.title.prctl(PR_SET_PDEATHSIG, 0, 0, 0, 0)  # from now on there may be workers to bury
        self.channel.send({"preloaded": tuple(loaded), "seconds": time.monotonic() - began})

    def _import(self, loaded: list[str]) -> str:
        """Imports the preload list with the script's sys.path; returns what went wrong."""
        first = self._first_path()
        if first is not None:
            sys.path.insert(0, first)
        try:
            for name in self._scan() if self.preload is None else self.preload:
                try:
                    __import__(name)
                    loaded.append(name)
                except ModuleNotFoundError as error:
                    guessed = (
                        self.preload is None and error.name is not None and f"{name}.".startswith(f"{error.name}.")
                    )
                    if not guessed:
                        return f"preloading {name} failed: {error}"
                except BaseException as error:
                    return f"preloading {name} failed: {type(error).__name__}: {error}"
        finally:
            if first is not None:
                sys.path.remove(first)
                sys.path_importer_cache.pop(first, None)  # the worker looks for itself
        return ""

    def _first_path(self) -> str | None:
        """The script's sys.path[0]."""
        if sys.flags.safe_path:
            return None
        match self.kind:
            case "script":
                path: str = os.path.realpath(self.target)
                return path if os.path.isdir(path) else os.path.dirname(path)
            case _:
                return os.getcwd()

    def _scan(self) -> list[str]:
        """Reads the imports of the script, in a process of its own that leaves no trace here."""
        if self.kind not in ("script", "module"):
            return []
        ours, theirs = os.pipe()
        scanner = os.fork()
        if scanner == 0:
            try:
                sys.path.insert(0, self.home)
                import imports  # type: ignore[import-not-found]

                names = imports.worth_preloading(imports.imported_by(self.kind, self.target, sys.path[1:]))
                os.write(theirs, "\n".join(names).encode())
            finally:  # a script that cannot be read or parsed is for Python to complain about
                os._exit(0)
        os.close(theirs)
        with open(ours, encoding="utf-8") as file:
            names = file.read().split()
        os.waitpid(scanner, 0)
        return names

    def _trial(self) -> str:
        """Why workers must not be forked from here, if so (rule 1)."""
        # BLAS libraries start threads when imported and stop them at a fork, until they are used again.
        trial = os.fork()
        if trial == 0:
            os._exit(0)
        os.waitpid(trial, 0)
        threads = len(os.listdir("/proc/self/task")) - 1
        if threads:
            return f"what was imported left {threads} thread{'s' * (threads > 1)} running"
        for fd in os.listdir("/proc/self/fd"):
            try:
                if os.readlink(f"/proc/self/fd/{fd}").startswith("/dev/nvidia"):
                    return "what was imported has initialised the GPU driver"
            except OSError:  # the descriptor of the listing itself
                continue
        return ""

    def _slim(self) -> None:
        """Lets go, once, of the library pages that importing has touched: no child has them from us, and here they are
        not needed any more.  The kernel keeps them cached, and maps them again should they be."""
        if not self.loaded:
            return
        self.loaded = False
        import ctypes

        madvise = ctypes.CDLL(None).madvise
        madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        for start, size in clean_mappings():
            madvise(start, size, MADV_DONTNEED)

    # giving birth ---------------------------------------------------------------------------------------------------

    def _spawn(self, births: list[dict[str, Any]], fds: list[int]) -> Worker | None:
        """Forks these workers.  Returns a `Worker` in each of them, None in the zygote."""
        gate = os.pipe()
        report = os.pipe()
        try:
            middle = os.fork()
        except OSError as error:
            for fd in (*gate, *report, *fds):
                os.close(fd)
            self.channel.send({"error": f"cannot fork: {error.strerror}"})
            return None
        if middle == 0:
            os.close(report[0])
            return self._deliver(births, fds, gate, report[1])
        for fd in (gate[0], report[1], *fds):
            os.close(fd)
        with open(report[0], "rb") as file:
            try:
                answer = marshal.load(file)
            except EOFError:
                answer = {"error": "the process that forks workers died"}
            os.waitpid(middle, 0)
            file.read()  # ends when every worker leads its session
        pids = answer.get("pids", ())
        self._remember(pids)
        self.channel.send(answer)  # the workers are the agent's children by now, and fit for its signals
        try:
            if pids:
                self.channel.receive()
                os.write(gate[1], GO * len(pids))
                self.channel.send("gone")
        finally:
            os.close(gate[1])
        return None

    def _deliver(
        self, births: list[dict[str, Any]], fds: list[int], gate: tuple[int, int], report: int
    ) -> Worker | None:
        """The middle process: forks the workers, says their pids, is gone.  Returns in the workers."""
        self.title.prctl(PR_SET_NAME, NEWBORN, 0, 0, 0)
        pids: list[int] = []
        try:
            for birth in births:
                worker = Worker(self, birth, fds, gate)
                pid = os.fork()
                if pid == 0:
                    os.setsid()
                    os.close(report)
                    return worker
                worker.drop()
                pids.append(pid)
        except OSError as error:
            for pid in pids:
                os.kill(pid, _signal.SIGKILL)
                os.waitpid(pid, 0)
            what = f"{error.strerror}: {error.filename}" if error.filename else f"cannot fork: {error.strerror}"
            answer: dict[str, Any] = {"error": what}
        else:
            answer = {"pids": pids}
        try:
            os.write(report, marshal.dumps(answer))
        finally:
            os._exit(0)

    def _remember(self, pids: tuple[int, ...]) -> None:
        for pid in list(self.born):
            try:
                os.killpg(pid, 0)
            except OSError:
                del self.born[pid]
        for pid in pids:
            self.born[pid] = stat_of(pid)[19]

    def _bury(self) -> NoReturn:
        """The agent is gone: kills whatever is left of our workers, then ends (rule 4)."""
        sys.path.insert(0, self.root)
        from ripstop.system.linux import processes

        # A pid stays taken while a session bears it, so a process that has the number but not the start time means
        # that our session is over and the number is another's.
        sessions = {pid for pid, start in self.born.items() if not os.path.exists(f"/proc/{pid}") or same(pid, start)}
        while left := [p.pid for p in processes() if p.session in sessions and not p.dead]:
            for pid in left:
                try:
                    os.kill(pid, _signal.SIGKILL)
                except OSError:
                    continue
            time.sleep(0.005)
        os._exit(0)


class Worker:
    """A process on its way from the zygote's fork to its first own instruction."""

    def __init__(self, zygote: Zygote, birth: dict[str, Any], fds: list[int], gate: tuple[int, int]) -> None:
        self.zygote = zygote
        self.birth = birth
        self.fds = fds
        self.gate = gate
        self.streams: dict[int, int] = {}
        for number, path in ((1, birth["stdout"]), (2, birth["stderr"])):
            if path is not None:
                links = 0 if path.startswith("/dev/") else os.O_NOFOLLOW
                flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | links | os.O_CLOEXEC
                self.streams[number] = os.open(path, flags, 0o666)

    def drop(self) -> None:
        """In the middle process: this one is on its way."""
        for fd in self.streams.values():
            os.close(fd)

    def __call__(self) -> None:
        """Sets the process up.  Returns if the script is to run; all else happens in here."""
        os.close(self.gate[1])
        self.zygote.channel.socket.close()
        self._environment()
        for number, fd in self.streams.items():
            os.dup2(fd, number)
            os.close(fd)
        self._pass_gate()
        self._bind()
        match self.birth["what"]:
            case "run":
                self._run()
            case "exec":
                self.zygote.title.show(self.birth["argv"])
                self._exec(self.birth["argv"])
            case "store":
                self.zygote.title.prctl(PR_SET_NAME, STORE, 0, 0, 0)
                self._store(self.birth["host"], self.birth["port"])

    def _environment(self) -> None:
        env = self.birth["env"]
        for name in [name for name in os.environ if name not in env]:
            del os.environ[name]
        for name, value in env.items():
            if os.environ.get(name) != value:
                os.environ[name] = value

    def _bind(self) -> None:
        """Takes up the processors and the memory near the worker's GPU."""
        if self.birth["cpus"]:
            try:
                os.sched_setaffinity(0, self.birth["cpus"])
            except OSError as error:
                sys.stderr.write(f"ripstop: cannot run on processors {self.birth['cpus']}: {error.strerror}; ")
                sys.stderr.write("they were allowed when the job started: see who has taken them away.\n")
                os._exit(BROKEN)
        if self.birth["memory"]:
            import ctypes

            call, node = self.birth["memory"]
            mask = (ctypes.c_uint64 * (node // 64 + 1))()
            mask[node // 64] = 1 << node % 64
            word = ctypes.c_long
            if ctypes.CDLL(None).syscall(word(call), word(MPOL_PREFERRED), mask, word(len(mask) * 64 + 1)):
                sys.stderr.write(f"ripstop: memory of NUMA node {node} is not preferred: the kernel refused it.\n")

    def _pass_gate(self) -> None:
        """Waits until the agent is our parent and knows us (rule 3)."""
        go = os.read(self.gate[0], 1)
        os.close(self.gate[0])
        self.zygote.title.prctl(PR_SET_PDEATHSIG, _signal.SIGKILL, 0, 0, 0)
        if go != GO or os.getppid() != self.zygote.agent:
            os._exit(BROKEN)

    def _run(self) -> None:
        for fd in self.fds:
            os.close(fd)
        sys.argv[1:] = self.birth["args"]
        sys.orig_argv[len(sys.orig_argv) - self.birth["given"] :] = self.birth["args"]
        self.zygote.title.show(sys.orig_argv)
        self.zygote.title.show_environment()
        for number in self.streams:
            reopen(number)
        renew()
        tell_exceptions(os.environ.get("TORCHELASTIC_ERROR_FILE"), self.zygote.root)
        if self.birth["stacks"]:
            show_stacks(*self.birth["stacks"])
        if self.birth["recorder"] and "torch" in sys.modules:
            show_collectives(self.birth["recorder"])
        gc.enable()

    def _exec(self, argv: list[str]) -> NoReturn:
        for fd in self.fds:
            os.set_inheritable(fd, True)
        for number in (_signal.SIGPIPE, _signal.SIGXFSZ):  # Python ignores them, and that would be inherited
            _signal.signal(number, _signal.SIG_DFL)
        try:
            os.execvpe(argv[0], argv, self.birth["env"])
        except OSError as error:
            sys.stderr.write(f"ripstop: cannot execute {argv[0]!r}: {error.strerror}; see that it is on PATH.\n")
            os._exit(NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE)

    def _store(self, host: str, port: int) -> NoReturn:
        """Serves the round's store; without torch in the zygote, a new interpreter does."""
        if "torch" not in sys.modules:
            program = os.path.join(self.zygote.home, "store_process.py")
            self._exec([sys.executable, "-u", program, host, str(port), str(self.fds[0])])
        sys.path.append(self.zygote.home)
        from store_process import serve  # type: ignore[import-not-found]

        serve(host, port, self.fds[0])
        raise AssertionError("serve returned")


def reopen(number: int) -> None:
    """Makes sys.stdout or sys.stderr anew, as `python -u` does, since its file is another one now."""
    import io

    name = {1: "stdout", 2: "stderr"}[number]
    old = getattr(sys, f"__{name}__")
    raw = io.FileIO(number, "wb", closefd=False)
    raw.name = f"<{name}>"
    text = io.TextIOWrapper(raw, old.encoding, old.errors, newline="\n", write_through=True)
    text.mode = "w"  # type: ignore[misc]
    setattr(sys, name, text)
    setattr(sys, f"__{name}__", text)


def renew() -> None:
    """What a new process has anew and a fork does not: random states, and the main thread's number."""
    modules = sys.modules  # `random` sees to itself
    if (numpy_random := modules.get("numpy.random")) is not None:
        numpy_random.seed()
    if (torch := modules.get("torch")) is not None:
        torch.default_generator.seed()  # the CPU's; those of GPUs start from a fixed seed in any process
    if (process := modules.get("multiprocessing.process")) is not None:
        process.current_process().authkey = os.urandom(32)
    if (threading := modules.get("threading")) is not None:
        threading.main_thread()._set_native_id()


def tell_exceptions(path: str | None, root: str) -> None:
    """Has an uncaught exception written to the error file, in the format of torch's `record`, unless one is there."""
    if path is None:
        return
    show = sys.__excepthook__

    def excepthook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if isinstance(error, Exception) and not os.path.exists(path):
            sys.path.insert(0, root)
            try:
                from ripstop.workers import error_file

                error_file.write(path, error_file.describe(error))
            except Exception:  # evidence is worth a try; the exception itself is shown in any case
                pass
            finally:
                sys.path.remove(root)
        show(kind, error, trace)
        caller = sys._getframe()
        while caller.f_back is not None:
            caller = caller.f_back
        # Called by Python itself, perhaps through torch's hook, and not by code that goes on or sets an exit code.
        final = caller.f_code is excepthook.__code__ or caller.f_globals.get("__name__") == _TORCHS_HOOK
        if final and isinstance(error, Exception):  # an interrupt ends otherwise
            doomed.append(os.getpid())

    # Both, so that code which puts the original back, or looks whether it is still in place, sees no difference.
    sys.excepthook = sys.__excepthook__ = excepthook


def show_stacks(signum: int, path: str) -> None:
    """Has the stacks of all threads written to a file at this signal."""
    import faulthandler

    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        faulthandler.register(signum, fd, all_threads=True, chain=False)
    except OSError as error:
        sys.stderr.write(f"ripstop: stacks cannot be written to {path}: {error.strerror}.\n")


def show_collectives(path: str) -> None:
    """Has a thread tell whoever connects to this socket what torch's flight recorders have."""
    import _thread

    def serve() -> None:
        ours = identity(listener.fileno())
        while True:
            try:
                if identity(listener.fileno()) != ours:
                    return  # the script has closed all files, and opened others
                fd = listener._accept()[0]  # type: ignore[attr-defined]
            except OSError:  # the script has closed all files
                return
            asking = _socket.socket(fileno=fd)
            try:
                asking.sendall(recorded(hanging=asking.recv(1) == b"!"))
            except OSError:  # nobody wants to know any more
                pass
            finally:
                asking.close()

    try:
        listener = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
        listener.bind(path)
        listener.listen(128)
    except OSError:  # then there is nobody to ask, which is found out where it matters
        return
    # It takes no signal from the script, and none for a reader that has gone; but its own crash may be shown.
    crashes = {_signal.SIGSEGV, _signal.SIGBUS, _signal.SIGFPE, _signal.SIGILL, _signal.SIGABRT}
    before = _signal.pthread_sigmask(_signal.SIG_BLOCK, _signal.valid_signals() - crashes)
    try:
        _thread.start_new_thread(serve, ())
    except RuntimeError:  # no thread is left
        listener.close()
    finally:
        _signal.pthread_sigmask(_signal.SIG_SETMASK, before)


def identity(fd: int) -> tuple[int, int]:
    """Of an open file."""
    about = os.fstat(fd)
    return about.st_dev, about.st_ino


def recorded(hanging: bool) -> bytes:
    """The dumps of those recorders that this torch has, as one JSON object; NCCL's only of one that hangs."""
    core = sys.modules.get("torch._C._distributed_c10d")
    dumps: list[bytes] = []
    recorders = [(b"fr", "_dump_fr_trace_json"), (b"nccl", "_dump_nccl_trace_json")]
    for name, function in recorders if hanging else recorders[:1]:
        try:
            dumps.append(b'"%s": %s' % (name, getattr(core, function)()))
        except Exception:  # this one has none
            continue
    return b"{%s}" % b", ".join(dumps)


_TORCHS_HOOK = "torch.distributed.distributed_c10d"
doomed: list[int] = []  # the process, once an exception has ended its script


def leave() -> None:
    """The last exit handler: spares a worker that failed the rest of its interpreter's end (rule 7)."""
    if os.getpid() not in doomed:
        return
    import ctypes
    import io

    for thing in gc.get_objects():
        try:
            if isinstance(thing, io.IOBase) and not thing.closed:
                thing.flush()
        except Exception:  # a file that cannot be flushed would not have been by Python either
            continue
    ctypes.CDLL(None).fflush(None)
    os._exit(1)


def stat_of(pid: int | str) -> list[bytes]:
    """The fields of /proc/PID/stat from the third on."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()


def clean_mappings() -> list[tuple[int, int]]:
    """Where files are mapped for reading and no page was ever written: (address, size)."""
    found: list[tuple[int, int]] = []
    place: tuple[int, int] | None = None
    with open("/proc/self/smaps", "rb") as file:
        for line in file:
            name, *words = line.split()
            if not name.endswith(b":"):
                start, _, end = name.partition(b"-")
                readable, inode = words[0] in (b"r--p", b"r-xp"), words[3]
                place = (int(start, 16), int(end, 16) - int(start, 16)) if readable and inode != b"0" else None
            elif name == b"Anonymous:" and words[0] == b"0" and place is not None:
                found.append(place)
    return found


def same(pid: int, start: bytes) -> bool:
    """Whether the process of this pid is the one that started then."""
    try:
        return stat_of(pid)[19] == start
    except OSError:
        return True  # gone since, and its session with it or ours


def is_inherited(fd: int) -> bool:
    """Whether this descriptor came over an exec: what Python opens itself, it closes at the next one."""
    try:
        return os.get_inheritable(fd)
    except OSError:
        return False
