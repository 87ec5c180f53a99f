"""Trains with gloo; commits and reports every step; obeys one order, which the file $ORDERS/RANK holds.

Appends a JSON line for every step to $TRAIN_LOG, with the time of the monotonic clock.
"""

import json
import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn

from ripstop import train

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
ROUND = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"  # every round has its own store


def obey() -> None:
    path = f"{os.environ['ORDERS']}/{RANK}"
    if not os.path.exists(path):
        return
    with open(path) as file:
        order = file.read()
    os.unlink(path)  # the next worker of this rank has no order
    match order:
        case "raise":
            raise RuntimeError("the fault that was asked for")
        case "exit":
            os._exit(7)
        case "allocate":
            kept = [b"x" * (64 << 20) for _ in range(40)]
            raise MemoryError(f"{len(kept)} parts were allocated")


def say(step: int) -> None:
    fields = {"t": time.monotonic(), "event": "step", "step": step, "rank": RANK, "world": WORLD, "pid": os.getpid()}
    restart = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    with open(os.environ["TRAIN_LOG"], "a") as file:
        file.write(json.dumps({**fields, "round": ROUND, "restart": restart}) + "\n")
    print(f"step {step}", file=sys.stderr, flush=True)


dist.init_process_group("gloo")
model = nn.parallel.DistributedDataParallel(nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
state = train.State(model=model, optimizer=optimizer, step=0)
state.restore()
while True:
    obey()
    optimizer.zero_grad()
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    state.step += 1
    state.commit()
    train.heartbeat(state.step)
    say(state.step)
    time.sleep(0.05)
