#!/usr/bin/env python3
"""What watching costs: step time of a 2-worker gloo job with everything off (A) and everything on (B), A-B-A-B…

python bench/overhead.py [--pairs 4] [--steps 1500] [--json bench/results/overhead.json]

Everything on: a heartbeat every step, hang detection, Prometheus' page read once a second, and a reader of the stream
of events.  Off: the job alone; events are written then, too.  What this ripstop cannot do is left out, and said.  The
agent's CPU time is its share of a core while the job runs, the coordinator's in it.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

import psutil

from ripstop.protocol import secret

HERE = Path(__file__).parent
TOKEN, RUN_ID = "overhead", "overhead"
TIMEOUT_S = 600
HELP = subprocess.check_output([sys.executable, "-m", "ripstop", "run", "--help"], text=True)

# What "everything on" is.  Of the job: its flags and environment, None for what is not there.  Of its readers: a path.
CAN_REPORT = importlib.util.find_spec("ripstop.train") is not None
PARTS = {
    "heartbeat every step": ([], {"HEARTBEAT": "1"}) if CAN_REPORT else None,
    "hang detection": (["--hang-timeout=30"], {}) if "--hang-timeout" in HELP else None,
}
METRICS = "/metrics"
STREAM = "/api/v1/events"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    for name, part in PARTS.items():
        if part is None:
            print(f"not here, and left out: {name}")
    runs: dict[str, list[dict]] = {"off": [], "on": []}
    for number in range(args.pairs):
        for kind in ("off", "on"):
            runs[kind].append(result := run(args.steps, on=kind == "on"))
            print(f"{number + 1} {kind:3} {summary(result)}", flush=True)
    off, on = (statistics.median(r["step_ms"] for r in runs[kind]) for kind in ("off", "on"))
    paired = [b["step_ms"] / a["step_ms"] - 1 for a, b in zip(runs["off"], runs["on"], strict=True)]
    agent = statistics.median(r["agent_percent"] for r in runs["on"])
    print(
        f"median step: off {off:.3f} ms, on {on:.3f} ms: {100 * (on / off - 1):+.2f} % "
        f"(pairs: {', '.join(f'{100 * p:+.2f}' for p in paired)}); agent {agent:.2f} % of a core"
    )
    if args.json:
        left_out = [name for name, part in PARTS.items() if part is None]
        figures = {"off_ms": off, "on_ms": on, "change": on / off - 1, "pairs": paired, "agent_percent": agent}
        args.json.write_text(json.dumps({**figures, "left_out": left_out, "runs": runs}, indent=1) + "\n")


def run(steps: int, *, on: bool) -> dict:
    """One job; its median step in milliseconds and its agent's share of a core."""
    with tempfile.TemporaryDirectory() as folder:
        port, out = free_port(), Path(folder, "out.json")
        parts = [part for part in PARTS.values() if part is not None] if on else []
        env = {**os.environ, "STEPS": str(steps), "OUT": str(out), "OMP_NUM_THREADS": "1", "RIPSTOP_TOKEN": TOKEN}
        flags = [flag for part in parts for flag in part[0]]
        for part in parts:
            env |= part[1]
        command = [
            *(sys.executable, "-m", "ripstop", "run", "--nnodes=1", "--nproc-per-node=2", f"--rdzv-id={RUN_ID}"),
            *("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}"),
            *(f"--log-dir={folder}/logs", *flags, str(HERE / "steps.py")),
        ]
        job = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        over = threading.Event()
        readers = [MetricsCollector(port, over), Follower(port, over)] if on else []
        for reader in readers:
            reader.start()
        agent = Agent(psutil.Process(job.pid), over)
        agent.start()
        _, said = job.communicate(timeout=TIMEOUT_S)
        over.set()
        for thread in (*readers, agent):
            thread.join()
        if job.returncode:
            raise SystemExit(f"the job failed:\n{said}")
        times = json.loads(out.read_text())["step_s"]
    reads = {reader.name: reader.count for reader in readers}
    return {"step_ms": 1e3 * statistics.median(times), "agent_percent": agent.percent, "reads": reads}


class Agent(threading.Thread):
    """The agent's CPU time in percent of a core, from when the workers run until it is over."""

    def __init__(self, process: psutil.Process, over: threading.Event) -> None:
        super().__init__()
        self._process, self._over = process, over
        self.percent = 0.0

    def run(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            while not self._over.is_set() and len(self._process.children(recursive=True)) < 3:  # a zygote, two workers
                self._over.wait(0.1)
            self._over.wait(1.0)
            first = last = self._look()
            while not self._over.wait(1.0):
                last = self._look()
                self.percent = 100 * (last[1] - first[1]) / (last[0] - first[0])

    def _look(self) -> tuple[float, float]:
        used = self._process.cpu_times()
        return time.monotonic(), used.user + used.system


class Reader(threading.Thread):
    """Reads something of the job while it runs."""

    def __init__(self, port: int, over: threading.Event) -> None:
        super().__init__(name=type(self).__name__.lower(), daemon=True)
        self.count = 0
        self._over = over
        self._url = f"http://127.0.0.1:{port}"
        self._headers = {"Authorization": f"Bearer {secret.api_token_from_secret(TOKEN, RUN_ID)}"}

    def open(self, path: str, **headers: str):
        request = urllib.request.Request(self._url + path, headers={**self._headers, **headers})
        return urllib.request.urlopen(request, timeout=10)


class MetricsCollector(Reader):
    """Prometheus, once a second."""

    def run(self) -> None:
        while not self._over.wait(1.0):
            with contextlib.suppress(OSError), self.open(METRICS) as page:
                self.count += b"ripstop_worker_cpu_seconds_total{" in page.read()


class Follower(Reader):
    """Somebody who follows the events; nobody, where there is no such stream."""

    def run(self) -> None:
        while not self._over.wait(0.5):
            with contextlib.suppress(OSError), self.open(STREAM, Accept="text/event-stream") as stream:
                for line in stream:
                    self.count += line.startswith(b"data:")


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def summary(result: dict) -> str:
    reads = ", ".join(f"{name} {count}" for name, count in result["reads"].items())
    return f"step {result['step_ms']:.3f} ms, agent {result['agent_percent']:.2f} % of a core  {reads}"


if __name__ == "__main__":
    main()
