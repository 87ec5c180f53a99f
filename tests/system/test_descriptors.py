"""A process that may open no more files can recover."""

import subprocess
import sys

# `fill` opens files up to the limit; `free` is how many more can be opened.
SETUP = """
import logging, os, resource
from ripstop.system.descriptors import RESERVED, DescriptorReserve
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
    done = subprocess.run([sys.executable, "-c", SETUP + text], check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_the_soft_limit_is_raised_when_it_is_reached() -> None:
    log = run("limit(64, 256); reserve.ensure(); fill(); reserve.ensure(); assert free() == 192, free()")
    assert log == "too few file descriptors were free: the limit is raised from 64 to 256 (ulimit -n)\n"


def test_the_reserve_is_used_at_the_hard_limit_and_filled_again_later() -> None:
    log = run("""
limit(64, 64); reserve.ensure(); files = fill()
reserve.ensure(); assert free() == RESERVED, free()
for file in files: os.close(file)
before = free(); reserve.ensure(); assert free() == before - RESERVED, free()
""")
    assert log == "too few file descriptors are free: Too many open files, limit 64; raise `ulimit -Hn`\n"


def test_nothing_changes_while_enough_descriptors_are_free() -> None:
    assert run("reserve.ensure(); before = free(); reserve.ensure(); assert free() == before; reserve.close()") == ""
