#!/usr/bin/env python3
"""Kill a worker again and again as soon as its standby is ready; measure the recoveries and what is left behind.

    python bench/standby_soak.py [--kills 200] [--cuda] [--json FILE]

Prints the time from a kill to the next training step, how many of the recoveries took a standby, and the processes,
open files and memory of the job after the first and after the last recovery.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

WORKER = """
import os, time
import torch
import torch.distributed as dist
from torch import nn, optim
from ripstop import train

device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if os.environ["SOAK_CUDA"] == "1" else torch.device("cpu")
dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
model = nn.Linear(64, 64, device=device)
optimizer = optim.SGD(model.parameters(), lr=0.01)
for step in range(1_000_000):
    optimizer.zero_grad()
    model(torch.ones(8, 64, device=device)).square().mean().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
    if step == 0:
        if device.type == "cuda":
            torch.cuda.synchronize()
        with open(os.environ["SOAK_LOG"], "a") as file:
            file.write(f"{time.time()} {os.getpid()} {os.environ['LOCAL_RANK']}\\n")
    train.heartbeat(step)
    time.sleep(0.01)
"""
TIMEOUT_S = 120.0


def wait_for(look, what: str):
    end = time.monotonic() + TIMEOUT_S
    while time.monotonic() < end:
        if found := look():
            return found
        time.sleep(0.01)
    raise TimeoutError(f"no {what} within {TIMEOUT_S:.0f} s")


def events(folder: Path) -> list[dict]:
    found = []
    for path in folder.rglob("events.jsonl"):
        for line in path.read_text().splitlines():
            try:
                found.append(json.loads(line))
            except ValueError:  # the last line, being written
                continue
    return found


def family(pid: int) -> list[int]:
    """This process and its descendants."""
    found = [pid]
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += [other for child in task.read_text().split() for other in family(int(child))]
        except OSError:
            continue
    return found


def resources(agent: int) -> dict[str, int]:
    status = dict(line.split(":", 1) for line in Path(f"/proc/{agent}/status").read_text().splitlines())
    used = {
        "processes": len(family(agent)),
        "agent's files": len(list(Path(f"/proc/{agent}/fd").iterdir())),
        "agent's MiB": int(status["VmRSS"].split()[0]) // 1024,
    }
    try:
        gpu = subprocess.check_output(["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"])
        used["GPU's MiB"] = int(gpu.split()[0])
    except (OSError, subprocess.CalledProcessError):
        pass
    return used


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--cuda", action="store_true")
    parser.add_argument("--json")
    args = parser.parse_args()
    workers = 1 if args.cuda else 2
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.py").write_text(WORKER)
        log, logs = folder / "steps", folder / "logs"
        log.touch()
        env = {**os.environ, "SOAK_LOG": str(log), "SOAK_CUDA": str(int(args.cuda)), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "ripstop", "run", "--standalone", f"--nproc-per-node={workers}"]
        command += ["--standby=auto", f"--max-restarts={args.kills}", "--restart-backoff=0", f"--log-dir={logs}"]
        with (folder / "output").open("wb") as output:
            agent = subprocess.Popen([*command, str(folder / "train.py")], env=env, stdout=output, stderr=output)
        try:
            figures = soak(agent.pid, args.kills, workers, log, logs)
        except TimeoutError as error:
            sys.exit(f"{error}; the job's output ends:\n{(folder / 'output').read_text()[-3000:]}")
        finally:
            left = family(agent.pid)
            agent.send_signal(signal.SIGTERM)
            agent.wait()
        figures["left after the end"] = sum(Path(f"/proc/{pid}").exists() for pid in left)
    seconds = figures["seconds"]
    print(f"{args.kills} kills, {figures['by standby']} recoveries by standbys, kill → next step: "
          f"median {statistics.median(seconds):.3f} s, maximum {max(seconds):.3f} s")  # fmt: skip
    for key in ("after the first", "after the last", "left after the end"):
        print(f"  {key}: {figures[key]}")
    if args.json:
        Path(args.json).write_text(json.dumps(figures, indent=1))


def soak(agent: int, kills: int, workers: int, log: Path, logs: Path) -> dict:
    seconds: list[float] = []
    first: dict[str, int] = {}

    def steps() -> list[list[str]]:
        return [line.split() for line in log.read_text().splitlines()]

    def ready() -> bool:
        """Whether all standbys are ready since the round's workers started."""
        kinds = [(e["kind"], e) for e in events(logs) if e["kind"] in ("standbys_ready", "workers_started")]
        last = kinds[-1] if kinds else ("", {})
        return last[0] == "standbys_ready" and len(last[1]["local_ranks"]) == workers

    def next_round(kill: int) -> list[list[str]]:
        """The workers' first steps after this many kills; returns when their standbys are ready, too."""
        wait_for(lambda: len(steps()) == workers * (kill + 1), f"step after kill {kill}")
        wait_for(ready, f"standbys after kill {kill}")
        return steps()[-workers:]

    current = next_round(0)
    for kill in range(1, kills + 1):
        began = time.time()
        os.kill(int(current[-1][1]), signal.SIGKILL)
        current = next_round(kill)
        seconds.append(max(float(step[0]) for step in current) - began)
        first = first or resources(agent)
    taken = sum(e["standbys"] == workers for e in events(logs) if e["kind"] == "workers_started")
    return {"seconds": seconds, "by standby": taken, "after the first": first, "after the last": resources(agent)}


if __name__ == "__main__":
    main()
