#!/usr/bin/env python3
"""Many in-place recoveries of one worker: does its process grow?

    python bench/inplace_soak.py [--recoveries 500] [--json F]

Starts a job of two workers.  Rank 1 is killed after every few steps; rank 0 goes on in place.  Prints JSON: threads and
open files of rank 0 after the first ten recoveries and the last ten, its resident memory and the memory in use by
malloc after each tenth of the recoveries, and seconds from the fault to the next step.  `torch_alone` is the memory of
a process without ripstop that makes, uses and destroys the same groups as often.  Fails if rank 0 has not stayed in one
process.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

STEPS = 4  # after each recovery


class MallocState(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    ]


def memory() -> dict[str, int]:
    """Resident bytes of this process, and the bytes in use by malloc (without what it keeps for later)."""
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = MallocState
    state = libc.mallinfo2()
    return {
        "rss": int(Path("/proc/self/statm").read_text().split()[1]) * 4096,
        "malloc": state.uordblks + state.hblkhd,
    }


def log(found: dict[str, object]) -> None:
    with open(os.environ["SOAK_LOG"], "a") as file:
        file.write(json.dumps(found) + "\n")


def torch_alone() -> None:
    """One of two processes that make and destroy process groups, without faults and without ripstop."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    rank = int(os.environ["RANK"])
    model = torch.nn.Linear(256, 256)
    optimizer = torch.optim.AdamW(model.parameters())
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=rank == 0, wait_for_workers=False)
    excepthook = sys.excepthook
    for number in range(int(os.environ["SOAK_RECOVERIES"]) + 1):
        dist.init_process_group("gloo", store=dist.PrefixStore(str(number), store), rank=rank, world_size=2)
        pair = dist.new_group([0, 1])
        replica = DistributedDataParallel(model)
        for _ in range(STEPS):
            optimizer.zero_grad()
            replica(torch.randn(2, 256)).square().mean().backward()
            optimizer.step()
            dist.all_reduce(torch.ones(1), group=pair)
        if rank == 0:
            log(memory())
        dist.barrier()
        dist.destroy_process_group()
        sys.excepthook = excepthook  # each `init_process_group` wraps the one before it
        del replica
        gc.collect()


def worker() -> None:
    import signal

    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from ripstop import train

    recoveries = int(os.environ["SOAK_RECOVERIES"])
    torch.manual_seed(0)
    model = torch.nn.Linear(256, 256)
    optimizer = torch.optim.AdamW(model.parameters())
    state = train.State(model=model, optimizer=optimizer, step=0)
    last_step = 0.0

    @train.elastic
    def main() -> None:
        nonlocal last_step
        dist.init_process_group("gloo")
        pair = dist.new_group([0, 1])
        replica = DistributedDataParallel(model)
        state.restore()
        restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        for number in range(STEPS):
            optimizer.zero_grad()
            replica(torch.randn(2, 256)).square().mean().backward()
            optimizer.step()
            dist.all_reduce(torch.ones(1), group=pair)
            state.step += 1
            state.commit()
            train.heartbeat(state.step)
            if number == 0 and dist.get_rank() == 0:
                found = {
                    "pid": os.getpid(),
                    "pause": time.time() - last_step,
                    "threads": len(os.listdir("/proc/self/task")),
                    "files": len(os.listdir("/proc/self/fd")),
                }
                log(found | memory())
            last_step = time.time()
        if restarts < recoveries:
            if dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            dist.barrier()
            raise AssertionError("rank 1 was killed")

    main()


def run_alone(folder: str, env: dict[str, str]) -> list[dict[str, int]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    file = Path(folder, "alone")
    env = {**env, "SOAK_LOG": str(file), "SOAK_ALONE": "1", "MASTER_PORT": str(port)}
    ranks = [subprocess.Popen([sys.executable, __file__], env={**env, "RANK": str(rank)}) for rank in range(2)]
    try:
        codes = [rank.wait() for rank in ranks]
        if any(codes):
            raise SystemExit("the processes without ripstop have failed")
    finally:
        for rank in ranks:
            rank.kill()
    return [json.loads(line) for line in file.read_text().splitlines()]


def tenths(found: list[dict[str, int]], key: str) -> list[float]:
    """In MB, after a hundredth of the recoveries and after each tenth."""
    size = len(found) - 1
    return [round(found[at][key] / 1e6, 1) for at in (size // 100, *(size * n // 10 for n in range(1, 11)))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recoveries", type=int, default=500)
    parser.add_argument("--ripstop", default=str(Path(sys.executable).parent / "ripstop"))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        file = Path(folder, "log")
        common = {**os.environ, "SOAK_RECOVERIES": str(args.recoveries), "OMP_NUM_THREADS": "1"}
        flags = ("--nproc-per-node=2", f"--max-restarts={args.recoveries + 100}", "--restart-backoff=0", "--standby=2")
        with open(Path(folder, "agent.log"), "wb") as out:
            command = [args.ripstop, "run", *flags, "--log-dir", folder, __file__]
            code = subprocess.call(command, env={**common, "SOAK_LOG": str(file)}, stdout=out, stderr=subprocess.STDOUT)
        if code:
            print(Path(folder, "agent.log").read_text(errors="replace")[-4000:], file=sys.stderr)
            raise SystemExit(f"the job has ended with {code}")
        found = [json.loads(line) for line in file.read_text().splitlines()]
        alone = run_alone(folder, common)
    first, last = found[1:11], found[-10:]
    processes = len({each["pid"] for each in found})
    pauses = [each["pause"] for each in found[1:]]
    figures = {
        "recoveries": len(found) - 1,
        "processes": processes,
        **{
            key: [statistics.median(each[key] for each in part) for part in (first, last)]
            for key in ("threads", "files")
        },
        **{f"{key}_mb": tenths(found, key) for key in ("rss", "malloc")},
        "torch_alone": {f"{key}_mb": tenths(alone, key) for key in ("rss", "malloc")},
        "pause_s": {"median": round(statistics.median(pauses), 3), "max": round(max(pauses), 3)},
    }
    text = json.dumps(figures, indent=1)
    print(text)
    if args.json:
        args.json.write_text(text + "\n")
    raise SystemExit(processes > 1)


if __name__ == "__main__":
    if os.environ.get("SOAK_ALONE"):
        torch_alone()
    elif os.environ.get("SOAK_LOG"):
        worker()
    else:
        main()
