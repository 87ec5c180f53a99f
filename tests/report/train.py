"""A training loop with faults: $FAULTS="kind:rank:step,…", of the kinds `raise`, `hang` and `oom`, each of them once.

Steps and checkpoints are reported; a restart continues from the last checkpoint, which rank 0 writes to $STATE.
"""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

from ripstop import train

RANK = int(os.environ["RANK"])
STEPS, STEP_S = int(os.environ.get("STEPS", "100")), float(os.environ.get("STEP_S", "0.05"))
STATE = Path(os.environ["STATE"])


def load_batch(step: int) -> torch.Tensor:
    for fault in filter(None, os.environ.get("FAULTS", "").split(",")):
        kind, rank, at = fault.split(":")
        done = STATE.with_name(f"fault-{kind}-{at}")
        if (int(rank), int(at)) != (RANK, step) or done.exists():
            continue
        done.touch()
        if kind == "hang":
            read_shard()
        if kind == "raise":
            raise ValueError(f"shard-{step:05d}.tar: checksum mismatch <script>alert('shard')</script>")
        if kind == "oom":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB; 79.1 GiB in use")
    return torch.ones(4) * step


def read_shard() -> None:
    time.sleep(10_000)


def main() -> None:
    dist.init_process_group("gloo")
    step = int(STATE.read_text()) if STATE.exists() else 0
    print("starting at step", step, flush=True)
    while step < STEPS:
        batch = load_batch(step)
        dist.all_reduce(batch)
        time.sleep(STEP_S)
        step += 1
        train.heartbeat(step)
        if RANK == 0 and step % 20 == 0:
            STATE.write_text(str(step))
            train.checkpoint_saved(step, str(STATE))
    dist.barrier()


if __name__ == "__main__":
    main()
