"""Training whose ranks all have different state, kept by `train.State`.

Writes to $TRAIN_LOG where each rank starts and each step it has committed.  Ends at $STEPS, or when rank 0 finds the
file $END, and exits with code 3 if a restored state is not the one of its step, or not of the same step on all ranks.
"""

import json
import os
import time

import torch
import torch.distributed as dist

from ripstop import train

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
STEPS = int(os.environ.get("STEPS", "1000000"))
PAUSE_S = float(os.environ.get("PAUSE_S", "0.02"))
SIZE = int(os.environ.get("SHARD_BYTES", "400000")) // 4


def note(event: str, step: int, **more: object) -> None:
    line = {
        "t": time.monotonic(),
        "event": event,
        "rank": RANK,
        "world": WORLD,
        "step": step,
        "pid": os.getpid(),
        **more,
    }
    with open(os.environ["TRAIN_LOG"], "a") as log:
        log.write(json.dumps(line) + "\n")


def main() -> None:
    dist.init_process_group("gloo")
    state = train.State(shard=torch.full((SIZE,), float(RANK)), step=0)
    state.restore()
    steps: list[object] = [None] * WORLD
    dist.all_gather_object(steps, state.step)
    is_right = steps == [state.step] * WORLD and bool((state.shard == RANK + state.step).all())
    note("start", state.step, source=state.restored_from, commits=state.commits)
    if not is_right:
        os._exit(3)
    last = torch.zeros(1)
    while state.step < STEPS and not last:
        time.sleep(PAUSE_S)
        last.fill_(RANK == 0 and os.path.exists(os.environ.get("END", "")))
        dist.all_reduce(last)
        state.shard += 1
        state.step += 1
        state.commit()
        note("step", state.step)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
