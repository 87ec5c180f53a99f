#!/usr/bin/env python3
"""What a commit of `train.State` costs, and a restore: against a plain copy of the same bytes, torch.save and DCP.

    python bench/commit_probe.py [--gb 10] [--device cuda] [--kills 5] [--json results.json]

The state is a model and AdamW's moments.  It needs torch and this repository's `src` on PYTHONPATH, no agent: the
agent's memory is served from a thread of this process, and workers are its children.  Numbers are medians of `--runs`.

    copy       each tensor into prepared memory: the host's, and from a GPU pinned; and into new memory
    blocking   commit(blocking=True), after the buffers are made
    overlapped the part of a step's time that commit() adds, for steps of --step-ms (GPU)
    restore    in a new process: with a new optimizer, whose moments are new memory; and again, into tensors that exist
    kills      SIGKILL at random moments of a training loop that commits in every step; every restore must be whole
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

TENSOR_BYTES = 64 << 20
WARM_UP = 4  # commits until all buffers exist


# the agent's side -----------------------------------------------------------------------------------------------------


def serve(path: str) -> None:
    """Keep buffers for any process, as rank 0 of one."""
    from ripstop.workers.state_memory import StateMemory, WorkerIdentity

    loop = asyncio.new_event_loop()

    async def listen() -> None:
        global _memory
        _memory = StateMemory(path, lambda pid: WorkerIdentity(1, 0, 1, range(1)))
        _memory.listen()

    threading.Thread(target=loop.run_forever, daemon=True).start()
    asyncio.run_coroutine_threadsafe(listen(), loop).result()


def child(what: str, args: argparse.Namespace, folder: str) -> subprocess.Popen[str]:
    options = [f"--gb={args.gb}", f"--device={args.device}", f"--runs={args.runs}", f"--step-ms={args.step_ms}"]
    env = {**os.environ, "RIPSTOP_SOCKET": f"{folder}/{what[:1]}", "TORCHELASTIC_RUN_ID": "probe"}
    command = [sys.executable, __file__, "--worker", what, "--folder", folder, *options]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)


def result(process: subprocess.Popen[str]) -> dict:
    output, _ = process.communicate()
    if process.returncode:
        sys.exit(f"a worker exited with {process.returncode}")
    return json.loads(output.splitlines()[-1])


def kill_workers(args: argparse.Namespace, folder: str) -> dict:
    """Kill a training worker at random moments; the next one checks what it restores."""
    steps = []
    for _ in range(args.kills):
        process = child("kill", args, folder)
        assert process.stdout is not None
        for line in process.stdout:  # its first line: what it restored; then one for each step
            if line.startswith("step"):
                break
            steps.append(json.loads(line)["step"])
        time.sleep(random.random() * 3 * args.step_ms / 1000)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        if process.returncode != -signal.SIGKILL:
            sys.exit(f"a killed worker exited with {process.returncode}: a restore was not whole")
    return {"kills": args.kills, "restored steps": steps}


# a worker -------------------------------------------------------------------------------------------------------------


def make(args: argparse.Namespace):
    """A model of a third of the bytes, and its optimizer."""
    import torch

    count = max(1, round(args.gb * 1e9 / 3 / TENSOR_BYTES))
    side = TENSOR_BYTES // 4 // 4096
    weights = [torch.full((side, 4096), 0.01, device=args.device) for _ in range(count)]
    model = torch.nn.ParameterList(weights)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def step(model, optimizer, number: int) -> None:
    import torch

    for parameter in model:
        if parameter.grad is None:
            parameter.grad = torch.empty_like(parameter)
        parameter.grad.fill_(0.5 + number % 3)
    optimizer.step()


def state_tensors(model, optimizer) -> list:
    return [t for p in model for t in (p.detach(), *map(optimizer.state[p].get, ("exp_avg", "exp_avg_sq")))]


def sums(model, optimizer):
    """A checksum of each tensor, on its device."""
    import torch

    return torch.stack(
        [tensor.detach().view(torch.int32).sum(dtype=torch.int64) for tensor in state_tensors(model, optimizer)]
    )


def size(model) -> int:
    return 3 * sum(parameter.nbytes for parameter in model)


def synchronize(args: argparse.Namespace) -> None:
    import torch

    if args.device == "cuda":
        torch.cuda.synchronize()


def timed(args: argparse.Namespace, what, runs: int | None = None) -> float:
    seconds = []
    for _ in range(runs or args.runs):
        synchronize(args)
        began = time.perf_counter()
        what()
        synchronize(args)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def commit_worker(args: argparse.Namespace) -> dict:
    import torch

    from ripstop import train

    model, optimizer = make(args)
    step(model, optimizer, 0)
    state = train.State(model=model, optimizer=optimizer, sums=sums(model, optimizer), step=0)
    state.restore()
    bytes_ = size(model)
    found: dict = {"device": args.device, "torch": torch.__version__, "GB": bytes_ / 1e9, "tensors": 3 * len(model)}
    if args.device == "cuda":
        found["gpu"] = torch.cuda.get_device_name()

    live = state_tensors(model, optimizer)
    target = [torch.zeros(t.shape, dtype=t.dtype, pin_memory=args.device == "cuda") for t in live]

    def copy() -> None:
        for a, b in zip(target, live, strict=True):
            a.copy_(b, non_blocking=True)

    copy()
    found["copy GB/s"] = bytes_ / timed(args, copy) / 1e9
    target.clear()
    found["copy to new memory GB/s"] = bytes_ / timed(args, lambda: [t.to("cpu", copy=True) for t in live], 1) / 1e9

    began = time.perf_counter()
    state.commit(blocking=True)
    found["first commit s"] = time.perf_counter() - began
    for _ in range(WARM_UP):
        state.commit(blocking=True)
    blocking = timed(args, lambda: state.commit(blocking=True))
    found["blocking GB/s"] = bytes_ / blocking / 1e9
    found["blocking / copy time"] = found["copy GB/s"] / found["blocking GB/s"]
    if args.device == "cuda":
        found |= overlapped(args, state, model, optimizer)
    state.step += 1
    state.sums = sums(model, optimizer)
    state.commit(blocking=True)
    found |= savers(args, model, optimizer, bytes_)
    return found


def overlapped(args: argparse.Namespace, state, model, optimizer) -> dict:
    """Steps of products of square matrices and an optimizer's step, with and without commits."""
    import torch

    a = torch.randn(8192, 8192, device=args.device, dtype=torch.bfloat16)

    def products(count: int) -> None:
        for _ in range(count):
            torch.mm(a, a)

    products(10)
    optimizer_s = timed(args, lambda: step(model, optimizer, 0), 5)
    product_s = timed(args, lambda: products(50)) / 50
    count = max(1, round((args.step_ms / 1000 - optimizer_s) / product_s))
    calls = []
    live = state_tensors(model, optimizer)
    pinned = [torch.zeros(t.shape, dtype=t.dtype, pin_memory=True) for t in live]
    side = torch.cuda.Stream()

    def plain_copy() -> None:
        """The least that can be done: the same bytes into pinned memory on a side stream."""
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for a, b in zip(pinned, live, strict=True):
                a.copy_(b, non_blocking=True)

    def commit() -> None:
        began = time.perf_counter()
        state.commit()
        calls.append(time.perf_counter() - began)

    def loop(after_step, steps: int = 10) -> float:
        """Seconds a step on the GPU, without a wait between steps.  The copy after the last step is not counted."""
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        synchronize(args)
        began.record()
        for _ in range(steps):
            products(count)
            torch.cuda.current_stream().wait_stream(side)
            step(model, optimizer, 1)
            ended.record()
            after_step()
        synchronize(args)
        return began.elapsed_time(ended) / 1e3 / steps

    loop(commit, 3)
    seconds = {"": [], " with plain copy": [], " with commit": []}
    for _ in range(3):  # in turn: the GPU's clock changes with its temperature
        for name, after_step in zip(seconds, (lambda: None, plain_copy, commit), strict=True):
            seconds[name].append(loop(after_step))
    plain, copied, committed = (statistics.median(values) for values in seconds.values())
    return {
        "step ms": plain * 1e3,
        "step with plain copy ms": copied * 1e3,
        "step with commit ms": committed * 1e3,
        "plain copy stall %": 100 * (copied - plain) / plain,
        "overlapped stall %": 100 * (committed - plain) / plain,
        "commit call ms": statistics.median(calls) * 1e3,
        "optimizer ms": optimizer_s * 1e3,
    }


def savers(args: argparse.Namespace, model, optimizer, bytes_: int) -> dict:
    """torch.save and DCP's async_save of the same state, to the temporary directory."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    found: dict = {}
    folder = Path(tempfile.mkdtemp(dir=args.folder))
    content = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    try:
        found["torch.save GB/s"] = bytes_ / timed(args, lambda: torch.save(content, folder / "save"), 1) / 1e9
        (folder / "save").unlink()
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
        flat = {f"model.{key}": value for key, value in model.state_dict().items()}
        for number, moments in optimizer.state_dict()["state"].items():
            flat |= {f"optimizer.{number}.{key}": value for key, value in moments.items()}
        began = time.perf_counter()
        future = dcp.async_save(flat, checkpoint_id=str(folder / "dcp"))
        found["DCP async_save stall s"] = time.perf_counter() - began
        future.result()
        found["DCP async_save GB/s"] = bytes_ / (time.perf_counter() - began) / 1e9
        dist.destroy_process_group()
    except Exception as error:  # a full disk, or a torch without it: the other numbers count
        found["savers"] = repr(error)[:200]
    return found


def restore_worker(args: argparse.Namespace) -> dict:
    from ripstop import train

    model, optimizer = make(args)
    state = train.State(model=model, optimizer=optimizer, sums=None, step=0)
    synchronize(args)
    began = time.perf_counter()
    assert state.restore()
    synchronize(args)
    new = time.perf_counter() - began
    assert sums(model, optimizer).equal(state.sums), "the restored state is not the committed one"
    again = timed(args, state.restore)
    assert sums(model, optimizer).equal(state.sums), "the restored state is not the committed one"
    bytes_ = size(model)
    return {"restore GB/s": bytes_ / new / 1e9, "restore again GB/s": bytes_ / again / 1e9, "restore s": new}


def kill_worker(args: argparse.Namespace) -> dict:
    import torch

    from ripstop import train

    model, optimizer = make(args)
    state = train.State(model=model, optimizer=optimizer, sums=None, step=0)
    if state.restore() and not sums(model, optimizer).equal(state.sums):
        sys.exit("a torn commit was restored")
    print(json.dumps({"step": state.step}), flush=True)
    a = torch.randn(2048, 2048, device=args.device)
    while True:
        for _ in range(20):
            torch.mm(a, a)
        step(model, optimizer, state.step)
        state.step += 1
        state.sums = sums(model, optimizer)
        state.commit()
        print("step", state.step, flush=True)


WORKERS = {"commit": commit_worker, "restore": restore_worker, "kill": kill_worker}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--device", default="")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--step-ms", type=float, default=200.0)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--json")
    parser.add_argument("--worker", choices=WORKERS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        print(json.dumps(WORKERS[args.worker](args)))
        return
    if not args.device:
        import torch

        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory() as folder:
        serve(f"{folder}/c")  # for the commit and restore workers
        os.symlink("c-state", f"{folder}/r-state")
        found = result(child("commit", args, folder))
        print(json.dumps(found, indent=2), flush=True)  # in case that a later part fails
        found |= result(child("restore", args, folder))
        found["restore / copy to new memory rate"] = found["restore GB/s"] / found["copy to new memory GB/s"]
        found["restore again / copy rate"] = found["restore again GB/s"] / found["copy GB/s"]
        serve(f"{folder}/k")
        small = argparse.Namespace(**{**vars(args), "gb": min(args.gb, 1.0)})
        found |= kill_workers(small, folder)
    print(json.dumps(found, indent=2))
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
