#!/usr/bin/env python3
"""What strangers at the coordinator's port cost a job that trains: its steps, and its coordinator's processor time.

    python bench/siege.py [--seconds 10] [--passes 2] [--json F]

Two nodes of one worker each train on this machine (gloo; a step is an all_reduce and a pause of 20 ms, in which a GPU
would compute); one of them has the coordinator in its agent.  Attacks and calm take turns: calm, the first attack,
calm, the next, and all of it again.  An attack's steps a second are compared with those of the calm right before and
right after it, half as long each; of several passes, the median counts.

Strangers would have machines of their own.  Here they get what the job leaves of this one (SCHED_IDLE), and the rate
they reached is printed.  The processor time is that of the agent with the coordinator, from /proc, less what it takes
in a calm: what an attack costs us, whoever else is on the machine.  At last a worker is killed, in a calm and in a
crowd: how long until there are steps again says whether the agent had time for it.
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
from tests.certificates import Authority  # noqa: E402 - they are found only now
from tests.e2e.harness import SCRIPTS, Job  # noqa: E402

TOKEN = "bench"
SETTLE = 1.0  # seconds after an attack until the calm counts
ATTACKS = {  # how many connections each makes, and in which part of the time
    "no-secret": (1000, 1.0),
    "wrong-secret": (1000, 1.0),
    "other-job": (1000, 1.0),
    "replay": (1000, 1.0),
    "slow": (1000, 0.5),
    "huge": (200, 1.0),
    "idle": (10_000, 0.5),
}
TLS_ATTACKS = {"plain": (1000, 1.0), "expired": (1000, 1.0)}
CROWD = "idle"


class Stage:
    """A job that trains, and what strangers do to it."""

    def __init__(self, job: Job, seconds: float, *flags: str, **env: str) -> None:
        self.job, self.seconds = job, seconds
        self.env = {**os.environ, "ATTACK_TOKEN": TOKEN, **env}
        for _ in range(2):
            job.node("--max-restarts=2", *flags, nnodes="2")
        job.steps(2)
        self.host = psutil.Process(next(agent.pid for agent in job.agents if "joined from" in agent.err))

    def calm(self) -> dict:
        time.sleep(SETTLE)
        return self.window(lambda: time.sleep(self.seconds / 2))

    def attack(self, kind: str, count: int, part: float) -> dict:
        return self.window(lambda: self.strangers(kind, count, part).communicate()[0])

    def strangers(self, kind: str, count: int, part: float) -> subprocess.Popen:
        where, spread = f"127.0.0.1:{self.job.port}", str(part * self.seconds)
        argv = [sys.executable, SCRIPTS / "attack.py", kind, where, str(self.seconds), str(count), spread]
        process = subprocess.Popen(argv, env=self.env, stdout=subprocess.PIPE)
        os.sched_setscheduler(process.pid, os.SCHED_IDLE, os.sched_param(0))
        return process

    def window(self, wait) -> dict:
        """Steps a second and the coordinator's share of a core, while something is waited for."""
        began, busy = time.time(), sum(self.host.cpu_times()[:2])
        told = wait()
        ended, cpu = time.time(), sum(self.host.cpu_times()[:2]) - busy
        steps = sum(began <= h["t"] < ended for h in self.job.worker_events(event="step", rank=0))
        seconds = ended - began
        return {"rate": steps / seconds, "seconds": seconds, "cpu": cpu, **(json.loads(told) if told else {})}

    def recovery(self) -> float:
        """Seconds from a worker's death to the next step."""
        worker = self.job.worker_events(event="start", rank=1)[-1]["pid"]
        died = time.time()
        os.kill(worker, signal.SIGKILL)
        return self.job.steps(2, after=died)["t"] - died


def compare(before: dict, during: dict, after: dict) -> dict:
    calm = (before["rate"] + after["rate"]) / 2
    idle = (before["cpu"] + after["cpu"]) / (before["seconds"] + after["seconds"])
    cpu = during["cpu"] - idle * during["seconds"]
    return {
        **{name: during[name] for name in ("tried", "refused", "accepted")},
        "calm_rate": calm,
        "siege_rate": during["rate"],
        "kept": during["rate"] / calm,
        "a_second": during["tried"] / during["seconds"],
        "cpu_share": cpu / during["seconds"],
        "cpu_ms_each": 1e3 * cpu / during["tried"],
    }


def besiege(stage: Stage, attacks: dict, passes: int) -> dict[str, list[dict]]:
    found: dict[str, list[dict]] = {kind: [] for kind in attacks}
    before = stage.calm()
    for _ in range(passes):
        for kind, (count, part) in attacks.items():
            during, after = stage.attack(kind, count, part), stage.calm()
            found[kind].append(compare(before, during, after))
            before = after
    assert len(stage.job.worker_events(event="start")) == 2, "the job was restarted"
    return found


def show(kind: str, runs: list[dict]) -> dict:
    middle = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    each = ", ".join(f"{100 * run['kept']:.1f}" for run in runs)
    print(
        f"{kind:13} {middle['tried']:6.0f} connections, {middle['a_second']:5.0f}/s  "
        f"{middle['refused']:6.0f} cut off or refused  {max(run['accepted'] for run in runs)} let in   "
        f"{middle['calm_rate']:5.1f} -> {middle['siege_rate']:5.1f} steps/s  {100 * middle['kept']:5.1f} % ({each})   "
        f"coordinator {100 * middle['cpu_share']:4.1f} % of a core, {middle['cpu_ms_each']:.2f} ms each",
        flush=True,
    )
    return {**middle, "runs": runs}


def in_a_crowd(stage: Stage) -> dict[str, float]:
    """How long a job is down for a worker's death, without strangers and with them."""
    calm = stage.recovery()
    time.sleep(SETTLE)
    crowd = stage.strangers(CROWD, *ATTACKS[CROWD])
    time.sleep(stage.seconds / 4)
    siege = stage.recovery()
    crowd.communicate()
    print(f"after a worker's death: steps again in {calm:.2f} s, with {CROWD} strangers at the port {siege:.2f} s")
    return {"calm": calm, "siege": siege}


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
        stage = Stage(job, options.seconds)
        for kind, runs in besiege(stage, ATTACKS, options.passes).items():
            figures[kind] = show(kind, runs)
        figures["recovery"] = in_a_crowd(stage)
    with tempfile.TemporaryDirectory() as folder, new_job(folder) as job:
        authority = Authority(Path(folder))
        good, bad = authority.node(), authority.node("late", expired=True)
        conf = f"--rdzv-conf=tls_cert={good.cert},tls_key={good.key},tls_ca={good.ca}"
        stage = Stage(job, options.seconds, conf, ATTACK_CERT=str(bad.cert), ATTACK_KEY=str(bad.key))
        for kind, runs in besiege(stage, TLS_ATTACKS, options.passes).items():
            figures[kind] = show(kind, runs)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
