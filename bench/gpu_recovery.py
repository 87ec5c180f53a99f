#!/usr/bin/env python3
r"""A worker killed under NCCL (one GPU, world size 1) -> its first training step again, phase by phase.

    python bench/gpu_recovery.py --launcher torchrun="torchrun" --launcher ripstop="ripstop run" \
        --launcher standby="ripstop run --standby=auto" [--model 1.3b] [--runs 3]

Each run kills the worker `--faults` times, each time after at least `--seconds` of training.  A first run of each
launcher is not counted: it leaves torch's bytecode and pages in the caches, as on a machine that trains every day.
Prints the medians of every phase in seconds, and the ratio to the first launcher.  Needs a CUDA GPU and torch in the
environment of each launcher.
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
from pathlib import Path

PROBE = Path(__file__).resolve().parent / "gpu_probe.py"
TMPFS = Path("/dev/shm")
PHASES = {
    "restart": "start",
    "import": "imported",
    "cuda": "cuda",
    "nccl": "nccl",
    "model": "model",
    "first step": "step",
}


def recoveries(launcher: str, faults: int, model: str, seconds: float) -> list[dict[str, float]]:
    """The phases of each recovery of one job."""
    with tempfile.TemporaryDirectory(dir=TMPFS if TMPFS.is_dir() else None) as folder:
        log = Path(folder) / "log"
        env = {
            **os.environ,
            "PROBE_LOG": str(log),
            "PROBE_FAULTS": str(faults),
            "PROBE_MODEL": model,
            "PROBE_SECONDS": str(seconds),
            "PROBE_CHECKPOINT": str(Path(folder) / "checkpoint.pt"),
        }
        env.pop("PYTHONDONTWRITEBYTECODE", None)  # it would have torchrun compile torch at every start
        command = [*shlex.split(launcher), "--standalone", "--nproc-per-node=1", f"--max-restarts={faults}", str(PROBE)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, check=False)
        if done.returncode:
            sys.exit(f"{launcher}: exit {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
        events = [json.loads(line) for line in log.read_text().splitlines()]
    out = []
    for n in range(faults):
        at = next(e["t"] for e in events if e["event"] == "fault" and e["restart"] == n)
        phases = {}
        for phase, event in PHASES.items():
            t = next(e["t"] for e in events if e["event"] == event and e["restart"] == n + 1)
            phases[phase] = t - at
            at = t
        out.append({**phases, "total": sum(phases.values())})
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launcher", action="append", required=True, metavar="NAME=COMMAND")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--faults", type=int, default=2)
    parser.add_argument("--model", choices=("small", "1.3b"), default="small")
    parser.add_argument("--seconds", type=float, default=8.0, help="of training before each fault")
    parser.add_argument("--json")
    args = parser.parse_args()
    launchers = dict(x.split("=", 1) for x in args.launcher)
    raw: dict[str, list[dict[str, float]]] = {name: [] for name in launchers}
    for command in launchers.values():
        recoveries(command, 1, args.model, 0.0)
    for _ in range(args.runs):
        for name, command in launchers.items():
            for phases in recoveries(command, args.faults, args.model, args.seconds):
                raw[name].append(phases)
                print(f"  {name:12}", *(f"{k} {v:.3f}" for k, v in phases.items()), flush=True)
    columns = [*PHASES, "total"]
    print(f"\n{'seconds':14}" + "".join(f"{c:>12}" for c in columns) + f"{'ratio':>8}")
    first = None
    for name, rows in raw.items():
        medians = {c: statistics.median(r[c] for r in rows) for c in columns}
        first = first or medians["total"]
        print(f"{name:14}" + "".join(f"{medians[c]:12.3f}" for c in columns) + f"{first / medians['total']:7.1f}x")
    if args.json:
        Path(args.json).write_text(json.dumps(raw, indent=1))


if __name__ == "__main__":
    main()
