#!/usr/bin/env python3
"""What attacks on the coordinator's port cost a job that trains: its step rate, and its coordinator's CPU time.

    python bench/attacks.py [--seconds 10] [--passes 2] [--json F]

Two nodes of one worker each train on this machine (gloo; a step is an all_reduce and a pause of 20 ms, in which a GPU
would compute); one of them hosts the coordinator in its agent.  Each attack runs between two baseline windows of half
its length, and its step rate is compared with theirs.  Of several passes, the median counts.

Real attackers use machines of their own.  Here they get the CPU time that the job leaves free (SCHED_IDLE), and their
connection rate is printed.  The CPU time is that of the agent with the coordinator, from /proc, minus its CPU time in
the baseline.  At the end a worker is killed without and with idle connections at the port: the time until the next
step shows whether the agent still reacts fast.
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

import psutil

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from tests.certificates import Authority  # noqa: E402 - found through the path above
from tests.e2e.harness import SCRIPTS, Job  # noqa: E402

TOKEN = "bench"
SETTLE_S = 1.0  # after an attack, before the next baseline window
ATTACKS = {  # the number of connections, and the part of the time in which they open
    "no-secret": (1000, 1.0),
    "wrong-secret": (1000, 1.0),
    "other-job": (1000, 1.0),
    "replay": (1000, 1.0),
    "slow": (1000, 0.5),
    "huge": (200, 1.0),
    "idle": (10_000, 0.5),
}
TLS_ATTACKS = {"plain": (1000, 1.0), "expired": (1000, 1.0)}
RECOVERY_ATTACK = "idle"


class Trial:
    """A job that trains, and attacks on it."""

    def __init__(self, job: Job, seconds: float, *flags: str, **env: str) -> None:
        self.job, self.seconds = job, seconds
        self.env = {**os.environ, "ATTACK_TOKEN": TOKEN, **env}
        for _ in range(2):
            job.node("--max-restarts=2", *flags, nnodes="2")
        job.steps(2)
        self.host = psutil.Process(next(agent.pid for agent in job.agents if "joined from" in agent.err))

    def baseline(self) -> dict:
        time.sleep(SETTLE_S)
        return self.window(lambda: time.sleep(self.seconds / 2))

    def attack(self, kind: str, count: int, part: float) -> dict:
        return self.window(lambda: self.start_attack(kind, count, part).communicate()[0])

    def start_attack(self, kind: str, count: int, part: float) -> subprocess.Popen:
        where, spread = f"127.0.0.1:{self.job.port}", str(part * self.seconds)
        argv = [sys.executable, SCRIPTS / "attack.py", kind, where, str(self.seconds), str(count), spread]
        process = subprocess.Popen(argv, env=self.env, stdout=subprocess.PIPE)
        os.sched_setscheduler(process.pid, os.SCHED_IDLE, os.sched_param(0))
        return process

    def window(self, wait) -> dict:
        """Steps a second and the coordinator's CPU time, during `wait`."""
        began, busy = time.time(), sum(self.host.cpu_times()[:2])
        output = wait()
        ended, cpu = time.time(), sum(self.host.cpu_times()[:2]) - busy
        steps = sum(began <= h["t"] < ended for h in self.job.worker_events(event="step", rank=0))
        seconds = ended - began
        return {"rate": steps / seconds, "seconds": seconds, "cpu": cpu, **(json.loads(output) if output else {})}

    def recovery(self) -> float:
        """Seconds from a worker's death to the next step."""
        worker = self.job.worker_events(event="start", rank=1)[-1]["pid"]
        died = time.time()
        os.kill(worker, signal.SIGKILL)
        return self.job.steps(2, after=died)["t"] - died


def compare(before: dict, during: dict, after: dict) -> dict:
    baseline = (before["rate"] + after["rate"]) / 2
    idle = (before["cpu"] + after["cpu"]) / (before["seconds"] + after["seconds"])
    cpu = during["cpu"] - idle * during["seconds"]
    return {
        **{name: during[name] for name in ("tried", "rejected", "accepted")},
        "baseline_rate": baseline,
        "attack_rate": during["rate"],
        "kept": during["rate"] / baseline,
        "a_second": during["tried"] / during["seconds"],
        "cpu_share": cpu / during["seconds"],
        "cpu_ms_each": 1e3 * cpu / during["tried"],
    }


def run_attacks(trial: Trial, attacks: dict, passes: int) -> dict[str, list[dict]]:
    found: dict[str, list[dict]] = {kind: [] for kind in attacks}
    before = trial.baseline()
    for _ in range(passes):
        for kind, (count, part) in attacks.items():
            during, after = trial.attack(kind, count, part), trial.baseline()
            found[kind].append(compare(before, during, after))
            before = after
    assert len(trial.job.worker_events(event="start")) == 2, "the job was restarted"
    return found


def show(kind: str, runs: list[dict]) -> dict:
    middle = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    each = ", ".join(f"{100 * run['kept']:.1f}" for run in runs)
    print(
        f"{kind:13} {middle['tried']:6.0f} connections, {middle['a_second']:5.0f}/s  "
        f"{middle['rejected']:6.0f} disconnected or rejected  {max(run['accepted'] for run in runs)} accepted   "
        f"{middle['baseline_rate']:5.1f} -> {middle['attack_rate']:5.1f} steps/s  "
        f"{100 * middle['kept']:5.1f} % ({each})   "
        f"coordinator {100 * middle['cpu_share']:4.1f} % of a core, {middle['cpu_ms_each']:.2f} ms each",
        flush=True,
    )
    return {**middle, "runs": runs}


def recovery_under_attack(trial: Trial) -> dict[str, float]:
    """Seconds from a worker's death to the next step, without and with an attack."""
    baseline = trial.recovery()
    time.sleep(SETTLE_S)
    attack = trial.start_attack(RECOVERY_ATTACK, *ATTACKS[RECOVERY_ATTACK])
    time.sleep(trial.seconds / 4)
    under_attack = trial.recovery()
    attack.communicate()
    print(f"from a worker's death to the next step: {baseline:.2f} s, with idle connections {under_attack:.2f} s")
    return {"baseline": baseline, "under_attack": under_attack}


def new_job(folder: str) -> Job:
    return Job(Path(folder), TRAIN_STEPS="10000000", RIPSTOP_TOKEN=TOKEN)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--passes", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    figures: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as folder, new_job(folder) as job:
        trial = Trial(job, options.seconds)
        for kind, runs in run_attacks(trial, ATTACKS, options.passes).items():
            figures[kind] = show(kind, runs)
        figures["recovery"] = recovery_under_attack(trial)
    with tempfile.TemporaryDirectory() as folder, new_job(folder) as job:
        authority = Authority(Path(folder))
        good, bad = authority.node(), authority.node("late", expired=True)
        conf = f"--rdzv-conf=tls_cert={good.cert},tls_key={good.key},tls_ca={good.ca}"
        trial = Trial(job, options.seconds, conf, ATTACK_CERT=str(bad.cert), ATTACK_KEY=str(bad.key))
        for kind, runs in run_attacks(trial, TLS_ATTACKS, options.passes).items():
            figures[kind] = show(kind, runs)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
