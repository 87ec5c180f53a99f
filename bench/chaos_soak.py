#!/usr/bin/env python3
"""Many recoveries of one job from mixed faults: does it ever hang, and does anything grow?

    python bench/chaos_soak.py [--faults 1000] [--seed 7] [--json F]

Three nodes (agents on this machine) with one worker each train with `train.State`, and elect their coordinator.
`ripstop chaos` injects the faults, one after the other: workers are killed, crash, exit and run out of memory; agents
are killed and suspended, also the coordinator's; connections are closed.  An agent that was killed is started again, as
a scheduler does.  All faults must heal.  Prints JSON: the results by kind; open files, threads, children and memory of
each agent, at the first and at the last look (an agent that was killed starts again with few); the steps that were
repeated; and the processes that are left when the job has been stopped.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil

NODES = 3
RUN_ID = f"soak-{os.getpid()}"  # several soaks can run side by side
HEAL_WITHIN_S = 120
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 60.0
LOOK_INTERVAL_S = 2.0
PLAN = """
every = "0.1s"
count = {count}
heal_within = "{heal_within}s"
[[fault]]
kind = "worker-kill"
[[fault]]
kind = "worker-kill"
[[fault]]
kind = "worker-kill"
[[fault]]
kind = "worker-segv"
[[fault]]
kind = "worker-segv"
[[fault]]
kind = "worker-exit"
[[fault]]
kind = "worker-exit"
[[fault]]
kind = "worker-oom"
[[fault]]
kind = "agent-kill"
[[fault]]
kind = "agent-kill"
node = "coordinator"
[[fault]]
kind = "agent-stop"
duration = "4s"
[[fault]]
kind = "connection-drop"
"""
SCRIPT = """
import os, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from ripstop import train

dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.AdamW(model.parameters())
state = train.State(model=model, optimizer=optimizer, step=0)
state.restore()
replica = DistributedDataParallel(model)
log = open(os.environ["SOAK_STEPS"], "a", buffering=1) if dist.get_rank() == 0 else None
while True:
    optimizer.zero_grad()
    replica(torch.randn(4, 64)).square().mean().backward()
    optimizer.step()
    time.sleep(0.02)
    state.step += 1
    state.commit()
    train.heartbeat(state.step)
    if log:
        print(state.step, file=log)
"""


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


class Node:
    """A slot for an agent, which is started again whenever it ends, until `is_stopping`."""

    def __init__(self, number: int, folder: Path, endpoint: str) -> None:
        self.number = number
        self._command = [sys.executable, "-m", "ripstop", "run", f"--nnodes={NODES}", "--nproc-per-node=1"]
        self._command += ["--rdzv-backend=c10d", f"--rdzv-id={RUN_ID}", f"--rdzv-endpoint={endpoint}", "--allow-chaos"]
        self._command += ["--max-restarts=100000", "--restart-backoff=0", f"--log-dir={folder / 'logs'}"]
        self._command += [str(folder / "train.py")]
        self._env = {**os.environ, "SOAK_STEPS": str(folder / "steps"), "RIPSTOP_TOKEN": "soak", "OMP_NUM_THREADS": "1"}
        self._log = (folder / f"agent-{number}.log").open("ab")
        self.starts = 0
        self.is_stopping = False
        self.agent = self._start()
        self._thread = threading.Thread(target=self._supervise, daemon=True)
        self._thread.start()

    def _start(self) -> subprocess.Popen[bytes]:
        self.starts += 1
        return subprocess.Popen(self._command, env=self._env, stdout=self._log, stderr=self._log)

    def _supervise(self) -> None:
        while True:
            self.agent.wait()
            if self.is_stopping:
                return
            self.agent = self._start()

    def look(self) -> dict[str, int] | None:
        try:
            agent = psutil.Process(self.agent.pid)
            with agent.oneshot():
                return {
                    "age": int(time.time() - agent.create_time()),
                    "files": agent.num_fds(),
                    "threads": agent.num_threads(),
                    "children": len(agent.children()),
                    "memory": agent.memory_info().rss,
                }
        except psutil.Error:
            return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--keep", type=Path, help="a directory for the logs")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.keep or Path(temporary)
        folder.mkdir(exist_ok=True)
        (folder / "train.py").write_text(SCRIPT)
        (folder / "plan.toml").write_text(PLAN.format(count=args.faults, heal_within=HEAL_WITHIN_S))
        found = run(folder, args.faults, args.seed)
    print(json.dumps(found, indent=1))
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    sys.exit(1 if found["not_healed"] or found["left_processes"] else 0)


def run(folder: Path, faults: int, seed: int) -> dict[str, object]:
    endpoint = ",".join(f"127.0.0.1:{free_port()}" for _ in range(NODES))
    nodes = [Node(number, folder, endpoint) for number in range(NODES)]
    began = time.monotonic()
    looks: list[list[dict[str, int]]] = [[] for _ in nodes]
    seen: set[int] = set()
    try:
        command = [sys.executable, "-m", "ripstop", "chaos", f"--job={RUN_ID}", f"--plan={folder / 'plan.toml'}"]
        command += [f"--seed={seed}", f"--report={folder / 'report.json'}"]
        env = {**os.environ, "RIPSTOP_TOKEN": "soak"}
        wait_for_training(folder)
        with (folder / "chaos.log").open("wb") as output:
            chaos = subprocess.Popen(command, env=env, stdout=output, stderr=output)
            try:
                while chaos.poll() is None:
                    time.sleep(LOOK_INTERVAL_S)
                    for node, found in zip(nodes, looks, strict=True):
                        seen |= descendants(node.agent.pid)
                        if (look := node.look()) is not None:
                            found.append(look)
            finally:
                chaos.terminate()
                chaos.wait()
        seconds = time.monotonic() - began
    finally:
        for node in nodes:
            node.is_stopping = True
        for node in nodes:
            node.agent.send_signal(signal.SIGTERM)
        for node in nodes:
            try:
                node.agent.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                node.agent.kill()
    report = json.loads((folder / "report.json").read_text())
    return {
        "faults": faults,
        "seed": seed,
        "seconds": round(seconds),
        "by_kind": by_kind(report["faults"]),
        "not_healed": [r for r in report["faults"] if r["outcome"] not in ("healed", "skipped")],
        "steps": repeated_steps(folder / "steps"),
        "agent_starts": [node.starts for node in nodes],
        "agents": [growth(found) for found in looks],
        "left_processes": sorted(pid for pid in seen if is_ours(pid, folder)),
    }


def wait_for_training(folder: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not (folder / "steps").exists():
        if time.monotonic() > deadline:
            logs = "".join(path.read_text(errors="replace")[-2000:] for path in folder.glob("agent-*.log"))
            sys.exit(f"the job did not start to train within {START_TIMEOUT_S:g} s\n{logs}")
        time.sleep(0.1)


def descendants(pid: int) -> set[int]:
    try:
        return {child.pid for child in psutil.Process(pid).children(recursive=True)}
    except psutil.Error:
        return set()


def is_ours(pid: int, folder: Path) -> bool:
    """Whether this process of the job still runs.  Its pid may have been used again."""
    try:
        return psutil.Process(pid).environ().get("SOAK_STEPS", "").startswith(str(folder))
    except psutil.Error:
        return False


def by_kind(results: list[dict]) -> dict[str, dict[str, object]]:
    kinds: dict[str, list[dict]] = collections.defaultdict(list)
    for result in results:
        kinds[result["kind"]].append(result)
    return {
        kind: {
            "outcomes": dict(collections.Counter(result["outcome"] for result in found)),
            "median_s": round(statistics.median([r["seconds"] for r in found if r["seconds"] is not None] or [0]), 2),
            "longest_s": round(max([r["seconds"] for r in found if r["seconds"] is not None] or [0]), 2),
        }
        for kind, found in sorted(kinds.items())
    }


def repeated_steps(path: Path) -> dict[str, int]:
    """Steps that rank 0 has logged, and steps that it has logged again."""
    steps = [int(line) for line in path.read_text().split()]
    return {"last": max(steps), "repeated": len(steps) - len(set(steps))}


def growth(looks: list[dict[str, int]]) -> dict[str, object]:
    """Compare the agent's resources in its first looks with those in its last looks, over all its starts."""
    if not looks:
        return {}
    tenth = max(1, len(looks) // 10)
    parts = {"first": looks[:tenth], "last": looks[-tenth:]}
    return {
        name: {key: round(statistics.median(look[key] for look in part)) for key in looks[0]}
        for name, part in parts.items()
    }


if __name__ == "__main__":
    main()
