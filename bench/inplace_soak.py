#!/usr/bin/env python3
"""Many in-place recoveries of one worker: does its process grow?

    python bench/inplace_soak.py [--recoveries 500]

Starts a job of two workers.  Rank 1 is killed after every few steps; rank 0 goes on in place.  Prints JSON: threads,
open files and resident memory of rank 0 after the first ten recoveries and the last ten, and seconds from the fault to
the next step.  Fails if rank 0 has not stayed in one process.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path


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
        for number in range(4):
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
                    "restarts": restarts,
                    "pause": time.time() - last_step,
                    "threads": len(os.listdir("/proc/self/task")),
                    "files": len(os.listdir("/proc/self/fd")),
                    "rss": int(Path("/proc/self/statm").read_text().split()[1]) * 4096,
                }
                with open(os.environ["SOAK_LOG"], "a") as log:
                    log.write(json.dumps(found) + "\n")
            last_step = time.time()
        if restarts < recoveries:
            if dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            dist.barrier()
            raise AssertionError("rank 1 was killed")

    main()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recoveries", type=int, default=500)
    parser.add_argument("--ripstop", default=str(Path(sys.executable).parent / "ripstop"))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        log = Path(folder, "log")
        env = {**os.environ, "SOAK_LOG": str(log), "SOAK_RECOVERIES": str(args.recoveries), "OMP_NUM_THREADS": "1"}
        flags = ("--nproc-per-node=2", f"--max-restarts={args.recoveries + 100}", "--restart-backoff=0", "--standby=2")
        with open(Path(folder, "agent.log"), "wb") as out:
            command = [args.ripstop, "run", *flags, "--log-dir", folder, __file__]
            code = subprocess.call(command, env=env, stdout=out, stderr=subprocess.STDOUT)
        if code:
            print(Path(folder, "agent.log").read_text(errors="replace")[-4000:], file=sys.stderr)
            raise SystemExit(f"the job has ended with {code}")
        found = [json.loads(line) for line in log.read_text().splitlines()]
    first, last = found[1:11], found[-10:]
    processes = len({each["pid"] for each in found})
    pauses = [each["pause"] for each in found[1:]]
    print(
        json.dumps(
            {
                "recoveries": len(found) - 1,
                "processes": processes,
                **{
                    key: [statistics.median(each[key] for each in part) for part in (first, last)]
                    for key in ("threads", "files", "rss")
                },
                "pause_s": {"median": statistics.median(pauses), "max": max(pauses)},
            },
            indent=1,
        )
    )
    raise SystemExit(processes > 1)


if __name__ == "__main__":
    if os.environ.get("SOAK_LOG"):
        worker()
    else:
        main()
