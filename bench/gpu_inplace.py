#!/usr/bin/env python3
"""In-place recoveries of one worker with an NCCL group, on one GPU: how long each takes, and what it leaves behind.

    python bench/gpu_inplace.py [--recoveries 50] [--ripstop "python -m ripstop"]

Starts a job of one worker on this machine and restarts its round again and again, as an operator does (`ripstop
restart`).  The worker goes on in its process: its NCCL communicator is aborted, a new one is made, the state is rolled
back.  Prints JSON: seconds from the last step of a round to the third one of the next (`pause_s`), and how long the new
group takes (`group_s`); GPU memory, threads and open files after the first and after the last recovery.  Without a GPU,
the group is gloo's.  Needs torch and this repository's src on PYTHONPATH (or ripstop installed).
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TIMEOUT_S = 120.0


def worker() -> None:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from ripstop import train

    is_gpu = torch.cuda.is_available()
    device = torch.device("cuda", 0) if is_gpu else torch.device("cpu")
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(16))).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    state = train.State(model=model, optimizer=optimizer, step=0)
    log = open(os.environ["PROBE_LOG"], "a", buffering=1)
    last_step = time.time()

    def say(event: str, **more: object) -> None:
        log.write(json.dumps({"t": time.time(), "event": event, "pid": os.getpid(), **more}) + "\n")

    @train.elastic
    def main() -> None:
        nonlocal last_step
        before = last_step
        say("entered")
        dist.init_process_group("nccl" if is_gpu else "gloo")
        replica = DistributedDataParallel(model, device_ids=[0] if is_gpu else None)
        dist.all_reduce(torch.ones(1 << 20, device=device))
        say("grouped")
        restored = state.restore()
        done = 0
        while True:
            optimizer.zero_grad()
            replica(torch.ones(8, 1024, device=device)).square().mean().backward()
            optimizer.step()
            state.step += 1
            state.commit()
            train.heartbeat(state.step)
            done += 1
            if is_gpu:
                torch.cuda.synchronize()
            last_step = time.time()
            if done == 3:
                free = torch.cuda.mem_get_info()[0] if is_gpu else 0
                say(
                    "step",
                    restored=restored,
                    pause=last_step - before,
                    used=torch.cuda.mem_get_info()[1] - free if is_gpu else 0,
                    allocated=torch.cuda.memory_allocated() if is_gpu else 0,
                    threads=len(os.listdir("/proc/self/task")),
                    files=len(os.listdir("/proc/self/fd")),
                    rss=int(Path("/proc/self/statm").read_text().split()[1]) * 4096,
                )
            time.sleep(0.005)

    main()


def events(log: Path) -> list[dict]:
    lines = log.read_text().splitlines(keepends=True) if log.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def wait_for_step(log: Path, count: int, job: subprocess.Popen[bytes]) -> dict:
    end = time.monotonic() + TIMEOUT_S
    while time.monotonic() < end:
        found = [event for event in events(log) if event["event"] == "step"]
        if len(found) >= count:
            return found[count - 1]
        if job.poll() is not None:
            raise SystemExit(f"the job has ended with {job.returncode}")
        time.sleep(0.005)
    raise SystemExit(f"no recovery {count - 1} within {TIMEOUT_S:g} s; last: {events(log)[-3:]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recoveries", type=int, default=50)
    parser.add_argument("--ripstop", default=f"{sys.executable} -m ripstop")
    args = parser.parse_args()
    ripstop = shlex.split(args.ripstop)
    with tempfile.TemporaryDirectory(prefix="inplace-") as folder:
        log = Path(folder, "log")
        env = {**os.environ, "PROBE_LOG": str(log), "GPU_INPLACE_WORKER": "1", "OMP_NUM_THREADS": "1"}
        name = f"inplace-{os.getpid()}"
        command = [*ripstop, "run", f"--rdzv-id={name}", "--nproc-per-node=1", "--log-dir", folder, __file__]
        with open(Path(folder, "agent.log"), "wb") as out:
            job = subprocess.Popen(command, env=env, stdout=out, stderr=subprocess.STDOUT)
        try:
            steps = [wait_for_step(log, 1, job)]
            for number in range(args.recoveries):
                subprocess.run([*ripstop, "restart", "-j", name], check=True, env=env, stdout=subprocess.DEVNULL)
                steps.append(wait_for_step(log, number + 2, job))
        except BaseException:
            print(Path(folder, "agent.log").read_text(errors="replace")[-4000:], file=sys.stderr)
            raise
        finally:
            job.terminate()
            job.wait()
        seconds = [step["pause"] for step in steps[1:]]
        entered = [event["t"] for event in events(log) if event["event"] == "entered"]
        grouped = [event["t"] for event in events(log) if event["event"] == "grouped"]
        kept = ("used", "allocated", "threads", "files", "rss")
        found = {
            "recoveries": args.recoveries,
            "processes": len({step["pid"] for step in steps}),
            "all_restored": all(step["restored"] for step in steps[1:]),
            "pause_s": {"median": statistics.median(seconds), "max": max(seconds)},
            "group_s": statistics.median(
                after - before for before, after in zip(entered[1:], grouped[1:], strict=False)
            ),
            "after_first": {key: steps[1][key] for key in kept},
            "after_last": {key: steps[-1][key] for key in kept},
            "seconds": [round(value, 4) for value in seconds],
        }
        print(json.dumps(found, indent=1))


if __name__ == "__main__":
    if os.environ.get("GPU_INPLACE_WORKER"):
        worker()
    else:
        main()
