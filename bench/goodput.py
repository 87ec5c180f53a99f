#!/usr/bin/env python3
"""Useful training steps under one schedule of faults, launcher by launcher.

    python bench/goodput.py --peers PEERS/bin [--seconds 300] [--cpus-each 2] [--json F]

Two nodes (agents on this machine) with one worker each train one DDP model.  Every launcher gets the same seeded
schedule: mostly workers are killed; once an agent is killed and started again after a second; once a node is lost
(agent and worker) and back after five.  Agents are killed on the second node only: the first one hosts torchrun's
rendezvous.

Goodput is the work that was kept, in steps of two workers, against the rate of the same script without faults and
without a launcher.  Losses, in % of the possible work:
  down        no step was made
  recomputed  steps that were made and lost, because the training went back to an earlier one
  alone       one worker trained without the other
  other       the rest: steps that took longer (saving, committing, restarting beside)

Launchers run one after the other.  With --cpus-each, they run at the same time, each on processors of its own.

A launcher that is not installed is named as such and left out.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parent / "goodput_scripts"
AGENT_AWAY_S, NODE_AWAY_S = 1.0, 5.0
START_TIMEOUT_S = 120.0
LOSSES = ("down", "recomputed", "alone", "other")


@dataclass(frozen=True)
class Fault:
    at: float  # seconds after the first step
    kind: str  # worker | agent | node
    node: int


def schedule(seed: int, seconds: float, mean: float) -> list[Fault]:
    """Faults half to one and a half mean intervals apart; the last interval is free of them."""
    rng = random.Random(seed)
    times = []
    at = rng.uniform(0.5, 1.5) * mean
    while at < seconds - mean / 2:
        times.append(at)
        at += rng.uniform(0.5, 1.5) * mean
    kinds = ["worker"] * len(times)
    for place, kind in zip(rng.sample(range(len(times)), min(2, len(times))), ("node", "agent"), strict=False):
        kinds[place] = kind
    return [Fault(t, kind, rng.randrange(2) if kind == "worker" else 1) for t, kind in zip(times, kinds, strict=True)]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@dataclass
class Launcher:
    """How a launcher starts one node.  `{port}` is the job's port, `{node}` the node's number."""

    name: str
    command: list[str]
    script: str = "ddp.py"
    env: dict[str, str] = field(default_factory=dict)
    service: list[str] = field(default_factory=list)  # a process of the job besides the agents


def launchers(peers: Path | None, ripstop: str) -> list[Launcher | str]:
    """The launchers at their best documented settings; a string says why one is missing."""
    c10d = ["--nnodes=1:2", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:{port}"]
    c10d += ["--rdzv-id=goodput", "--local-addr=127.0.0.1", "--max-restarts=1000"]
    quick = ["--monitor-interval=0.1", "--rdzv-conf=last_call_timeout=2,join_timeout=60"]
    heartbeats = [
        "--ft-initial-rank-heartbeat-timeout=1000000",
        "--ft-rank-heartbeat-timeout=1000000",
    ]  # the script sends none
    own_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    found: list[Launcher | str] = []

    def peer(name: str, program: str, *arguments: str, **more: object) -> None:
        if peers is None or not (peers / program).exists():
            found.append(f"{name}: not installed: no {program} in {peers or '--peers'}; see requirements/peers.txt")
        else:
            found.append(Launcher(name, [str(peers / program), *arguments], **more))  # type: ignore[arg-type]

    peer("torchrun", "torchrun", *c10d, *quick, env=own_store)
    peer(
        "ft_launcher", "ft_launcher", *c10d, quick[0], f"{quick[1]},upscaling_enabled=True", *heartbeats, env=own_store
    )
    if peers is not None and (peers / "torchft_lighthouse").exists():
        lighthouse = [str(peers / "torchft_lighthouse"), "--min_replicas=1", "--quorum_tick_ms=50"]
        lighthouse += ["--join_timeout_ms=1000", "--heartbeat_timeout_ms=1000", "--bind=127.0.0.1:{port}"]
        own = ["--nnodes=1", "--nproc-per-node=1", "--max-restarts=1000", "--monitor-interval=0.1"]
        own += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
        env = {"TORCHFT_LIGHTHOUSE": "http://127.0.0.1:{port}", "REPLICA_GROUP_ID": "{node}", "NUM_REPLICA_GROUPS": "2"}
        env["RUST_LOG"] = "warn"
        peer("torchft", "torchrun", *own, script="torchft_ddp.py", env=env, service=lighthouse)
    else:
        peer("torchft", "torchft_lighthouse")
    # The faults are not the fault of a node.  With a secret, a State has copies on the other node.
    run = [ripstop, "run", *c10d, "--rdzv-conf=last_call_timeout=2,quarantine_failures=0"]
    secret = {"RIPSTOP_TOKEN": "goodput"}
    standby = ["--standby=1", "--standby-until=elastic"]
    ours = [
        Launcher("ripstop", run, "ddp.py", env=secret),
        Launcher("ripstop State", run, "state.py", env=secret),
        Launcher("ripstop elastic", run, "elastic.py", env=secret),
        Launcher("ripstop elastic+standby", [*run, *standby], "elastic.py", env=secret),
    ]
    return [*found, *ours]


class Job:
    """The processes of one job.  Each carries the job's token and its node in its environment, so that the job can end
    exactly its own."""

    def __init__(self, launcher: Launcher, directory: Path) -> None:
        self.launcher, self.directory = launcher, directory
        self.token = f"goodput-{os.getpid()}-{random.randrange(10**9)}"
        self.values = {"port": str(free_port())}
        self.agents: dict[int, subprocess.Popen[bytes]] = {}
        if launcher.service:
            self.agents[-1] = self._start(launcher.service, -1)

    def _start(self, command: Iterable[str], node: int) -> subprocess.Popen[bytes]:
        def fill(text: str) -> str:
            for name, value in {**self.values, "node": str(node)}.items():
                text = text.replace("{" + name + "}", value)
            return text

        (self.directory / "tmp").mkdir(exist_ok=True)
        own = {
            "GOODPUT_DIR": str(self.directory),
            "GOODPUT_NODE": str(node),
            "GOODPUT_TOKEN": f"{self.token}:{node}",
            "TMPDIR": str(self.directory / "tmp"),
            "XDG_RUNTIME_DIR": str(self.directory / "tmp"),
            "OMP_NUM_THREADS": "1",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
        }
        with open(self.directory / f"node{node}.out", "ab") as out:
            return subprocess.Popen(
                [fill(word) for word in command],
                env={**os.environ, **own, **{name: fill(value) for name, value in self.launcher.env.items()}},
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def start(self, node: int) -> None:
        self.agents[node] = self._start([*self.launcher.command, str(SCRIPTS / self.launcher.script)], node)

    def processes(self, node: int) -> list[int]:
        token = f"GOODPUT_TOKEN={self.token}:{node}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and token in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:
                pass
        return found

    def kill_node(self, node: int) -> None:
        kill(self.agents[node].pid)
        while left := self.processes(node):
            for pid in left:
                kill(pid)
            try:
                self.agents[node].wait(0.01)
            except subprocess.TimeoutExpired:
                pass
        self.agents[node].wait()

    def stop(self) -> None:
        for node in list(self.agents):
            self.kill_node(node)

    def events(self) -> list[dict]:
        events = []
        for file in self.directory.glob("*.jsonl"):
            for line in file.read_text().splitlines():
                try:
                    events.append(json.loads(line))
                except ValueError:
                    pass  # cut by a kill
        return sorted(events, key=lambda event: event["t"])

    def worker(self, node: int) -> int | None:
        """The pid of the node's worker, if it is alive."""
        started = [event for event in self.events() if event["event"] == "start" and event["node"] == node]
        if started and started[-1]["pid"] in self.processes(node):
            return int(started[-1]["pid"])
        return None


def kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def wait_for_step(job: Job, world: int) -> float:
    end = time.time() + START_TIMEOUT_S
    while time.time() < end:
        for event in job.events():
            if event["event"] == "step" and event["world"] == world:
                return float(event["t"])
        time.sleep(0.1)
    raise TimeoutError(f"no step of {world} workers after {START_TIMEOUT_S:.0f} s")


def wait_for_port(port: int) -> None:
    end = time.time() + START_TIMEOUT_S
    while time.time() < end:
        with socket.socket() as s:
            if s.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise TimeoutError(f"nothing listens on port {port} after {START_TIMEOUT_S:.0f} s")


def inject(job: Job, faults: list[Fault], began: float, seconds: float) -> list[dict]:
    """Carries out the schedule, and says what each fault met."""
    actions: list[tuple[float, str, int]] = [(fault.at, fault.kind, fault.node) for fault in faults]
    done = []
    while actions:
        actions.sort()
        at, kind, node = actions.pop(0)
        if at >= seconds:
            break
        time.sleep(max(0.0, began + at - time.time()))
        met = True
        if kind == "worker":
            pid = job.worker(node)
            met = pid is not None
            if pid is not None:
                kill(pid)
        elif kind == "agent":
            kill(job.agents[node].pid)
            actions.append((at + AGENT_AWAY_S, "back", node))
        elif kind == "node":
            job.kill_node(node)
            actions.append((at + NODE_AWAY_S, "back", node))
        else:  # its supervisor removes what the agent left behind, as the end of a container does, and starts it again
            job.kill_node(node)
            job.start(node)
        if kind != "back":
            done.append({"at": round(at, 1), "kind": kind, "node": node, "met": met})
    time.sleep(max(0.0, began + seconds - time.time()))
    return done


def account(events: list[dict], began: float, faults: list[dict], seconds: float, rate: float) -> dict:
    """Kept work and losses of the time from `began` on, as parts of the possible work."""
    kept: dict[int, float] = {}  # step -> its part of the work of two workers
    last: dict[str, int] = {}  # by who wrote it
    recomputed = 0
    gaps: list[tuple[float, float]] = []  # begin and length of down times
    end, before = began + seconds, began
    for event in events:
        if event["event"] != "step" or not began < event["t"] <= end:
            continue
        step, writer = event["step"], event["writer"]
        if step <= last.get(writer, -1):  # the training went back
            undone = [number for number in kept if number >= step]
            recomputed += len(undone)
            for number in undone:
                del kept[number]
            last = {other: min(number, step) for other, number in last.items()}
        last[writer] = step
        kept.setdefault(step, event["world"] / 2)
        gaps.append((before - began, event["t"] - before))
        before = event["t"]
    gaps.append((before - began, end - before))
    gaps = [(at, gap - 1 / rate) for at, gap in gaps if gap > 3 / rate]
    for fault, following in zip(faults, [*(f["at"] for f in faults[1:]), seconds], strict=True):
        fault["down_s"] = round(sum(gap for at, gap in gaps if fault["at"] - 0.2 <= at < following - 0.2), 2)
    possible, useful = rate * seconds, sum(kept.values())
    lost = {
        "down": sum(gap for _, gap in gaps) / seconds,
        "recomputed": recomputed / possible,
        "alone": (len(kept) - useful) / possible,
    }
    lost["other"] = 1 - useful / possible - sum(lost.values())
    return {"goodput": useful / possible, "useful_steps": useful, "lost": lost, "faults": faults}


def measure(launcher: Launcher, faults: list[Fault], seconds: float, logs: Path | None) -> dict:
    """What happened under this launcher, for `account`."""
    directory = Path(tempfile.mkdtemp(prefix="goodput-"))
    job = Job(launcher, directory)
    try:
        job.start(0)
        wait_for_port(int(job.values["port"]))  # so that the first node is the one that hosts the rendezvous
        job.start(1)
        began = wait_for_step(job, world=2)
        done = inject(job, faults, began, seconds)
        return {"events": job.events(), "began": began, "faults": done}
    except (TimeoutError, OSError) as e:
        tails = [out.read_text(errors="replace")[-1500:] for out in sorted(directory.glob("node*.out"))]
        return {"error": f"{type(e).__name__}: {e}", "output": "".join(tails)}
    finally:
        job.stop()
        if logs:
            logs.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(logs / launcher.name, ignore_errors=True)
            shutil.move(directory, logs / launcher.name)
        shutil.rmtree(directory, ignore_errors=True)


def fault_free_rate(python: str, seconds: float) -> float:
    """Steps per second of ddp.py with two workers, started without a launcher."""
    directory = Path(tempfile.mkdtemp(prefix="goodput-"))
    env = {"WORLD_SIZE": "2", "RANK": "{node}", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "{port}"}
    job = Job(Launcher("none", [python], env=env), directory)
    try:
        for node in range(2):
            job.start(node)
        began = wait_for_step(job, world=2)
        time.sleep(seconds + 1)
        steps = [e for e in job.events() if e["event"] == "step" and began < e["t"] <= began + seconds]
        return len(steps) / seconds
    finally:
        job.stop()
        shutil.rmtree(directory, ignore_errors=True)


def run_all(chosen: list[Launcher], faults: list[Fault], a: argparse.Namespace) -> list[dict]:
    """Measure each launcher, in turn or side by side."""

    def run(number: int, launcher: Launcher) -> dict:
        if a.cpus_each:  # of this thread, and of the processes that it starts
            os.sched_setaffinity(0, range(number * a.cpus_each, (number + 1) * a.cpus_each))
        print(f"running {launcher.name}", file=sys.stderr, flush=True)
        return measure(launcher, faults, a.seconds, a.logs)

    if a.cpus_each and len(chosen) * a.cpus_each > (os.cpu_count() or 1):
        sys.exit(f"--cpus-each={a.cpus_each}: {len(chosen)} launchers need more than {os.cpu_count()} processors")
    with ThreadPoolExecutor(len(chosen) if a.cpus_each else 1) as threads:
        return list(threads.map(run, range(len(chosen)), chosen))


def print_table(results: dict[str, dict]) -> None:
    print(f"{'launcher':24}{'goodput':>9}" + "".join(f"{loss:>12}" for loss in LOSSES) + "   down after each fault, s")
    for name, result in results.items():
        if "error" in result:
            print(f"{name:24}{result['error']}\n{result.get('output', '')}")
            continue
        lost = "".join(f"{100 * result['lost'][loss]:10.1f} %" for loss in LOSSES)
        downs = " ".join(f"{fault['kind'][0]}{fault['down_s'] if fault['met'] else '-'}" for fault in result["faults"])
        print(f"{name:24}{100 * result['goodput']:7.1f} %{lost}   {downs}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, help="the bin directory of the peers' virtual environment")
    parser.add_argument("--ripstop", default=str(Path(sys.executable).parent / "ripstop"))
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--mean", type=float, default=20.0, help="mean time between faults, in seconds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--cpus-each", type=int, default=0, help="run the launchers side by side, on this number of processors each"
    )
    parser.add_argument("--only", help="names of launchers, with commas between")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--logs", type=Path, help="keep each launcher's output and events there")
    a = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that jobs are stopped
    faults = schedule(a.seed, a.seconds, a.mean)
    print("faults: " + ", ".join(f"{f.at:.0f} s {f.kind} {f.node}" for f in faults))
    rates = [fault_free_rate(sys.executable, min(a.seconds, 30.0))]
    found = launchers(a.peers, a.ripstop)
    missing = dict(each.split(": ", 1) for each in found if isinstance(each, str))
    chosen = [each for each in found if isinstance(each, Launcher) and (not a.only or each.name in a.only.split(","))]
    runs = {name: {"error": why} for name, why in missing.items()}
    runs |= zip([each.name for each in chosen], run_all(chosen, faults, a), strict=True)
    rates.append(fault_free_rate(sys.executable, min(a.seconds, 30.0)))
    rate = max(rates)  # another load on the machine only lowers it
    print("fault-free, before and after: " + ", ".join(f"{rate:.1f} steps/s" for rate in rates) + "\n")
    results = {
        name: run if "error" in run else account(**run, seconds=a.seconds, rate=rate) for name, run in runs.items()
    }
    print_table(results)
    if a.json:
        figures = {"seconds": a.seconds, "seed": a.seed, "fault_free_steps_per_s": rates}
        a.json.write_text(
            json.dumps({**figures, "faults": [asdict(f) for f in faults], "results": results}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
