"""Forks a worker that commits, kills it at a random moment of a commit, and lets the next one check what it restores.

Exits 0 if every restore was whole and no finished commit was lost.  Prints how many kills were in the middle of a
commit.  $KILLS is the number of kills; there are up to three times as many until $INTERRUPTED were in the middle.
$SEED is the seed.  $MUTANT breaks a rule of commits, which must be found.
"""

import os
import random
import signal
import struct
import sys
import time
from zlib import crc32

import torch

from ripstop.train import state as state_module
from ripstop.train.commit_buffer import CommitBuffer, Corrupted
from ripstop.train.content import StoredContent
from ripstop.train.state import State

TENSORS = 8
ELEMENTS = 1 << 20  # a commit takes long enough to be hit
COMMITS = 4  # before the one that is interrupted, at most
TORN, LOST = 3, 4
REPORT = struct.Struct("<qd")


def worker(finished: int, report: int) -> None:
    """Check the restored state, then commit until killed.

    Reports 2 n before commit n, and 2 n + 1 with its duration after it.
    """
    model = torch.nn.ParameterList([torch.zeros(ELEMENTS) for _ in range(TENSORS)])
    state = State(model=model, step=0)
    state.restore()
    torn = sum(buffer.header(state._run) is None for buffer in state._buffers.values())
    if any(bool((tensor != state.step).any()) for tensor in model) or not all(map(is_whole, state._buffers.values())):
        os._exit(TORN)
    if state.step < finished or state.commits != state.step:
        os._exit(LOST)
    os.write(report, REPORT.pack(-torn - 1, 0.0))
    while True:
        state.step += 1
        with torch.no_grad():
            for tensor in model:
                tensor.fill_(state.step)
        os.write(report, REPORT.pack(2 * state.step, 0.0))
        began = time.monotonic()
        state.commit()
        os.write(report, REPORT.pack(2 * state.step + 1, time.monotonic() - began))


def is_whole(buffer: CommitBuffer) -> bool:
    """A buffer that says it has a commit has all of it, also if it is not the one that is restored here."""
    header = buffer.header(crc32(os.environ.get("TORCHELASTIC_RUN_ID", "").encode()))
    if header is None:
        return True
    try:
        entries = StoredContent(buffer, buffer.read_pickle(header))._entries
    except Corrupted:
        return False
    tensors = [buffer.tensor(e.offset, e.dtype, e.shape) for e in entries if e.shape == (ELEMENTS,)]
    return len(tensors) == TENSORS and all(bool((tensor == header.id.number).all()) for tensor in tensors)


def read(fd: int) -> tuple[int, float] | None:
    data = os.read(fd, REPORT.size)
    return REPORT.unpack(data) if data else None


def break_rule(mutant: str) -> None:
    right = state_module._copy_state_now

    def stamp_first(buffer, header, taken):
        buffer.write_pickle(taken.pickle_offset, taken.pickle)
        buffer.complete(header)
        buffer.clear = lambda: None
        right(buffer, header, taken)

    if mutant == "stamp first":
        state_module._copy_state_now = stamp_first
    elif mutant == "old stamp":
        CommitBuffer.clear = lambda buffer: None
    elif mutant == "same buffer":
        state_module.next_slot = lambda slots, buffers, *_: 0


def main() -> int:
    break_rule(os.environ.get("MUTANT", ""))
    random.seed(int(os.environ.get("SEED", "0")))
    torch.set_num_threads(1)
    finished = interrupted = 0
    commit_s = 0.01
    kills, least = int(os.environ["KILLS"]), int(os.environ.get("INTERRUPTED", "0"))
    for number_of_kills in range(3 * kills):
        if number_of_kills >= kills and interrupted >= least:
            break
        reader, writer = os.pipe()
        before = random.randint(1, COMMITS)
        pid = os.fork()
        if pid == 0:
            os.close(reader)
            worker(finished, writer)
        os.close(writer)
        is_alive = True
        while (report := read(reader)) is not None:
            number, seconds = report
            if number < 0:
                interrupted += -number - 1
            elif number % 2:
                finished, commit_s = number // 2, (3 * commit_s + min(seconds, 0.05)) / 4
                before -= 1
            elif before <= 0 and is_alive:
                end = time.monotonic() + random.random() * commit_s
                while time.monotonic() < end:
                    pass
                os.kill(pid, signal.SIGKILL)
                is_alive = False
        os.close(reader)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if code != -signal.SIGKILL:
            print({TORN: "torn", LOST: "lost"}.get(code, f"exit {code}"))
            return 1
    print(interrupted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
