#!/usr/bin/env python3
"""Faults of a GPU under a job of one worker with NCCL: is each detected, and when does training go on?

    python bench/gpu_faults.py [--ripstop "python -m ripstop"] [--json F]

  illegal access   a kernel reads an address that does not exist; the CUDA context is lost
  device assert    an assertion fails in a kernel
  endless kernel   a kernel does not end, with --hang-timeout=5
  lost             no process can open the GPU any more, and the worker is killed; the GPU is back after 15 s

`lost` needs root: the job has a mount namespace of its own, in which /dev/null hides the GPU's device.  The worker
commits its state after every step.  Prints JSON, for each fault: the cause that ripstop gives for the next round,
seconds from the fault to the next step, and the steps that were repeated.  Needs a CUDA GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

FAULTS = ("illegal access", "device assert", "endless kernel", "lost")
GPU = "/dev/nvidia0"
AWAY_S = 15.0
TIMEOUT_S = 120.0


def worker() -> None:
    import torch
    import torch.distributed as dist

    from ripstop import train

    folder = Path(os.environ["PROBE_DIR"])
    dist.init_process_group("nccl")
    model = torch.nn.Linear(1024, 1024, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    state = train.State(model=model, optimizer=optimizer, step=0)
    state.restore()
    log = (folder / "steps").open("a", buffering=1)
    while True:
        optimizer.zero_grad()
        loss = model(torch.ones(8, 1024, device="cuda")).square().mean()
        loss.backward()
        optimizer.step()
        dist.all_reduce(torch.ones(1, device="cuda"))
        torch.cuda.synchronize()
        state.step += 1
        state.commit()
        train.heartbeat(state.step)
        log.write(json.dumps({"t": time.time(), "step": state.step, "pid": os.getpid()}) + "\n")
        time.sleep(0.02)
        if (request := folder / "fault").exists():
            fault = request.read_text()
            request.unlink()
            log.write(json.dumps({"t": time.time(), "fault": fault}) + "\n")
            if fault == "illegal access":
                storage = torch._C._construct_storage_from_data_pointer(0x1000, torch.device("cuda", 0), 4096)
                torch.empty(0, dtype=torch.uint8, device="cuda").set_(storage).sum()
            elif fault == "device assert":
                torch.ones(4, device="cuda")[torch.tensor([1 << 40], device="cuda")]
            elif fault == "endless kernel":
                torch.cuda._sleep(1 << 62)
            torch.cuda.synchronize()


def steps(folder: Path) -> list[dict]:
    path = folder / "steps"
    lines = path.read_text().rpartition("\n")[0].splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


def wait_for_step(folder: Path, after: float, not_pid: int = 0) -> dict:
    """The first step after this time, in another process than this one."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        for entry in steps(folder):
            if "step" in entry and entry["t"] > after and entry["pid"] != not_pid:
                return entry
        time.sleep(0.02)
    raise TimeoutError


def try_fault(ripstop: list[str], fault: str, folder: Path) -> dict[str, object]:
    isolate = ["unshare", "--mount", "--propagation=private"] if fault == "lost" else []
    command = [*isolate, *ripstop, "run", "--standalone", "--nproc-per-node=1", "--max-restarts=100"]
    command += ["--hang-timeout=5"] if fault == "endless kernel" else []
    command += [f"--log-dir={folder / 'logs'}", str(Path(__file__).resolve()), "--worker"]
    env = {**os.environ, "PROBE_DIR": str(folder)}
    with (folder / "agent.log").open("wb") as output:
        agent = subprocess.Popen(command, env=env, stdout=output, stderr=output)
    try:
        first = wait_for_step(folder, 0.0)
        wait_for_step(folder, first["t"] + 3)  # torch's first steps are slow
        if fault == "lost":
            enter = ["nsenter", f"--mount=/proc/{agent.pid}/ns/mnt", "--"]
            subprocess.run([*enter, "mount", "--bind", "/dev/null", GPU], check=True)
            since = time.time()
            os.kill(first["pid"], signal.SIGKILL)
            time.sleep(AWAY_S)  # the length of the fault
            subprocess.run([*enter, "umount", GPU], check=True)
        else:
            draft = folder / "draft"
            draft.write_text(fault)
            draft.replace(folder / "fault")
            since = wait_for_fault(folder)
        try:
            again = wait_for_step(folder, since, first["pid"])["t"]
        except TimeoutError:
            again = None
        numbers = [entry["step"] for entry in steps(folder) if "step" in entry]
        return {
            "seconds": None if again is None else round(again - since, 2),
            "repeated_steps": len(numbers) - len(set(numbers)),
            "causes": causes(folder),
        }
    finally:
        agent.terminate()
        agent.wait()


def wait_for_fault(folder: Path) -> float:
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        for entry in steps(folder):
            if "fault" in entry:
                return float(entry["t"])
        time.sleep(0.02)
    raise TimeoutError


def causes(folder: Path) -> list[str]:
    found = [
        json.loads(line) for file in folder.glob("logs/*/job-events.jsonl") for line in file.read_text().splitlines()
    ]
    return [event["why"] for event in found if event["kind"] == "round_formed" and event["round"] > 1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ripstop", default=f"{sys.executable} -m ripstop")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker()
    found: dict[str, object] = {}
    for fault in FAULTS:
        with tempfile.TemporaryDirectory() as folder:
            found[fault] = try_fault(shlex.split(args.ripstop), fault, Path(folder))
            print(json.dumps({fault: found[fault]}), flush=True)
            if found[fault]["seconds"] is None:  # type: ignore[index]
                print((Path(folder) / "agent.log").read_text()[-3000:], file=sys.stderr)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
