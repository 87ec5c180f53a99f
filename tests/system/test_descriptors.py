"""A process that may open no more files can recover."""

import subprocess
import sys

# `fill` opens files up to the limit; `free` is how many more can be opened.
SETUP = """
import errno, logging, os, resource
from ripstop.system.descriptors import RESERVED_DESCRIPTORS, DescriptorReserve
logging.basicConfig(format="%(message)s")
def limit(soft, hard): resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
def fill():
    files = []
    try:
        while True: files.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        return files
def free():
    files = fill()
    for file in files: os.close(file)
    return len(files)
reserve = DescriptorReserve()
"""


def run(text: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", SETUP + text], check=False, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_the_soft_limit_is_raised_when_it_is_reached() -> None:
    log = run("limit(64, 256); reserve.ensure(); fill(); reserve.ensure(); assert free() == 192, free()")
    assert log == "too few file descriptors were free: the limit is raised from 64 to 256 (ulimit -n)\n"


def test_the_reserve_is_used_at_the_hard_limit_and_filled_again_later() -> None:
    log = run("""
limit(64, 64); reserve.ensure(); files = fill()
reserve.ensure(); assert free() == RESERVED_DESCRIPTORS, free()
for file in files: os.close(file)
before = free(); reserve.ensure(); assert free() == before - RESERVED_DESCRIPTORS, free()
""")
    assert log == "too few file descriptors are free: Too many open files; the limit is 64; raise it (ulimit -n)\n"


def test_a_limit_that_cannot_be_raised_or_does_not_help_leaves_the_reserve_and_is_logged_once() -> None:
    log = run("""
limit(64, 256); reserve.ensure(); files = fill()
def refuse(*_): raise ValueError("not allowed to raise maximum limit")  # the hard limit is above fs.nr_open
resource.setrlimit = refuse
reserve.ensure(); assert free() == RESERVED_DESCRIPTORS, free()
reserve.ensure(); assert free() == RESERVED_DESCRIPTORS, free()
""")
    assert log == "too few file descriptors are free: Too many open files; the limit is 64; raise it (ulimit -n)\n"
    log = run("""
limit(64, 256); before = free(); reserve.ensure()
def full(*_): raise OSError(errno.ENFILE, os.strerror(errno.ENFILE))
os.open, real = full, os.open
reserve.ensure(); os.open = real
assert free() == before and resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 64
""")
    assert log == "too few file descriptors are free: Too many open files in system; raise sysctl fs.file-max\n"


def test_nothing_changes_while_enough_descriptors_are_free() -> None:
    assert run("reserve.ensure(); before = free(); reserve.ensure(); assert free() == before; reserve.close()") == ""
