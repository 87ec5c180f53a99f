"""Functions that tests run as workers: in a module of their own, which a spawned process can import."""

import os
import signal
import sys
import time


def double(number):
    return 2 * number


def where(_):
    print("to stdout")
    print("to stderr", file=sys.stderr)
    return os.environ["WHO"], os.getpid(), os.getpgid(0)


def imports_torch():
    return "torch" in sys.modules


def large(size):
    return bytes(size)


def fail(text):
    raise ValueError(text)


def leave(code):
    sys.exit(code)


def vanish():
    os._exit(0)


def kill_self():
    os.kill(os.getpid(), signal.SIGKILL)


def return_unpicklable():
    return lambda: None


class Unreadable:
    def __reduce__(self):
        return fail, ("cannot be made again",)


def return_unreadable():
    return Unreadable()


def fail_or_wait(rank, ready):
    """Rank 0 fails when rank 1 waits."""
    if rank == 1:
        open(ready, "w").close()
        time.sleep(600)
    await_file(ready)
    raise ValueError("rank 0")


def at_once_or_late(rank, go):
    if rank == 1:
        await_file(go)
    return rank


def with_child(pid_file):
    """Starts a process that outlives it, and dies."""
    pid = os.fork()
    if pid == 0:
        time.sleep(600)
    with open(pid_file, "w") as file:
        file.write(str(pid))
    os.kill(os.getpid(), signal.SIGKILL)


def ignore_sigterm(ready):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    open(ready, "w").close()
    time.sleep(600)


def announce(ready):
    open(f"{ready}.part", "w").write(str(os.getpid()))
    os.rename(f"{ready}.part", ready)
    time.sleep(600)


def say(size):
    print("x" * size)


def await_file(path, deadline=30):
    end = time.monotonic() + deadline
    while not os.path.exists(path):
        if time.monotonic() > end:
            raise TimeoutError(path)
        time.sleep(0.01)
