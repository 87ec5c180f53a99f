#!/usr/bin/env python3
"""Kill a worker of a real training script: how long until the next step, for each launcher in turn.

    python bench/real_recovery.py --launcher torchrun="torchrun" --launcher ripstop="ripstop run" [--runs 3]

The scripts are in bench/real: transformers' Trainer, Lightning, and accelerate, with small models on two CPU workers.
They need `requirements/popular.txt`.  The launchers run in turn, so that a noisy machine is noisy for all of them.

Phases, in seconds after the SIGKILL
  restart   the first new worker's process has started
  imports   both have done their imports
  step      both have done their first step: the time to recover
`start` is the time from the command to the first step of both.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
SCRIPTS = ("transformers_trainer", "lightning_trainer", "accelerate_loop")
PHASES = ("restart", "imports", "step", "start")
TIMEOUT_S = float(os.environ.get("BENCH_TIMEOUT_S", "300"))
STEPS_BEFORE_KILL = 5


def events(log: Path) -> list[dict]:
    if not log.exists():
        return []
    found = []
    for line in log.read_text().splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            pass  # a line cut by a SIGKILL
    return found


def wait_for(job: subprocess.Popen, log: Path, what):
    end = time.time() + TIMEOUT_S
    while time.time() < end:
        if (found := what(events(log))) is not None:
            return found
        if job.poll() is not None:
            raise RuntimeError(f"the job ended with {job.returncode}")
        time.sleep(0.02)
    raise TimeoutError(f"nothing after {TIMEOUT_S:.0f} s; last events: {events(log)[-3:]}")


def both(found: list[dict], event: str, without: set[int]) -> float | None:
    """When both ranks had this event, in processes other than these."""
    first: dict[int, float] = {}
    for e in found:
        if e["event"] == event and e["pid"] not in without:
            first.setdefault(e["rank"], e["t"])
    return max(first.values()) if len(first) == 2 else None


def recover(launcher: str, script: str, work: Path) -> dict[str, float]:
    log = work / "log.jsonl"
    env = {**os.environ, "BENCH_LOG": str(log), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    flags = ["--standalone", "--nproc-per-node=2", "--max-restarts=3", f"--log-dir={work / 'logs'}"]
    began = time.time()
    with open(work / "out", "wb") as out:
        job = subprocess.Popen(
            [*shlex.split(launcher), *flags, str(HERE / "real" / f"{script}.py")],
            env=env,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        start = wait_for(job, log, lambda found: both(found, "step", set())) - began

        def victim(found: list[dict]) -> int | None:
            steps = [e["pid"] for e in found if e["event"] == "step" and e["rank"] == 1]
            return steps[-1] if len(steps) >= STEPS_BEFORE_KILL else None

        pid = wait_for(job, log, victim)
        old = {e["pid"] for e in events(log)}
        killed = time.time()
        os.kill(pid, signal.SIGKILL)
        step = wait_for(job, log, lambda found: both(found, "step", old))
        new = [e for e in events(log) if e["pid"] not in old]
        imported = both(new, "imported", old)
        restart = min(e["started"] for e in new) - killed
        return {"restart": restart, "imports": imported - killed, "step": step - killed, "start": start}
    except Exception:
        sys.stderr.write((work / "out").read_text()[-3000:])
        raise
    finally:
        job.send_signal(signal.SIGTERM)
        try:
            job.wait(30)
        except subprocess.TimeoutExpired:
            job.kill()
            job.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launcher", action="append", required=True, metavar="NAME=COMMAND")
    parser.add_argument("--script", action="append", choices=SCRIPTS)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    launchers = dict(text.partition("=")[::2] for text in args.launcher)
    figures: dict[str, dict[str, list[dict[str, float]]]] = {}
    for script in args.script or SCRIPTS:
        rows = figures[script] = {name: [] for name in launchers}
        for _ in range(args.runs):
            for name, command in launchers.items():
                with tempfile.TemporaryDirectory() as work:
                    rows[name].append(recover(command, script, Path(work)))
        base = None
        for name, runs in rows.items():
            medians = {phase: statistics.median(run[phase] for run in runs) for phase in PHASES}
            base = base or medians
            ratios = f"{base['step'] / medians['step']:5.1f}x step, {base['start'] / medians['start']:4.1f}x start"
            print(f"{script:22} {name:10}", *(f"{p} {s:6.2f}" for p, s in medians.items()), ratios, flush=True)
        if args.json:
            args.json.write_text(json.dumps({"seconds": figures, "cpus": os.cpu_count()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
