#!/usr/bin/env python3
"""What strangers at the coordinator's port cost a job that trains: its step rate before, while, and after.

    python bench/siege.py [--seconds 10] [--json F]

Two nodes of one worker each train on this machine (gloo, a step is an all_reduce and 20 ms); one of them hosts the
coordinator.  Each attack of tests/e2e/scripts/attack.py then runs so long, with less claim to the processors than the
job, for a stranger would have its own.  The rate while it ran is compared to that of as many seconds right before it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from tests.e2e.harness import SCRIPTS, Job  # noqa: E402 - it is found only now

TOKEN = "bench"
ATTACKS = {  # and how many connections each makes
    "no-secret": 500,
    "wrong-secret": 500,
    "other-job": 500,
    "replay": 500,
    "half-open": 500,
    "slow": 500,
    "huge": 100,
    "idle": 10_000,
}


def rate(job: Job, start: float, end: float) -> float:
    steps = [h for h in job.happenings(event="step", rank=0) if start <= h["t"] < end]
    return len(steps) / (end - start)


def attack(job: Job, kind: str, seconds: float) -> dict[str, float]:
    argv = [sys.executable, SCRIPTS / "attack.py", kind, f"127.0.0.1:{job.port}", str(seconds), str(ATTACKS[kind])]
    done = subprocess.run(argv, env={**os.environ, "ATTACK_TOKEN": TOKEN}, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    figures = {}
    with tempfile.TemporaryDirectory() as folder, Job(Path(folder), TRAIN_STEPS="10000000", RIPSTOP_TOKEN=TOKEN) as job:
        job.node(nnodes="2")
        job.node(nnodes="2")
        job.steps(2)
        for kind in ATTACKS:
            before = time.time()
            time.sleep(options.seconds)
            tally = attack(job, kind, options.seconds)
            calm, siege = rate(job, before, tally["began"]), rate(job, tally["began"], tally["ended"])
            figures[kind] = {**tally, "calm": calm, "siege": siege}
            print(
                f"{kind:13} {tally['tried']:6} connections  {tally['refused']:6} cut off or refused  "
                f"{tally['accepted']} let in   {calm:5.1f} -> {siege:5.1f} steps/s  {100 * siege / calm:5.1f} %",
                flush=True,
            )
        assert len(job.happenings(event="start")) == 2, "the job was restarted"
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
