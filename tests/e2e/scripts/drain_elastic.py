"""Counts steps in place with `train.elastic`, a collective in each.

Writes "PID WORLD restored STEP" to $STEPS_LOG.RANK at each entry, and "PID WORLD STEP" before each commit.  With $OWN,
each rank has a state of its own.
"""

import os
import time

import torch
import torch.distributed as dist

from ripstop import train

state = train.State(step=0, weights=torch.zeros(1000), own=torch.zeros(1000))


@train.elastic
def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    state.restore()
    with open(f"{os.environ['STEPS_LOG']}.{rank}", "a", buffering=1) as log:
        log.write(f"{os.getpid()} {world} restored {state.step}\n")
        assert torch.equal(state.weights, torch.full((1000,), float(state.step)))
        while True:
            time.sleep(0.02)
            dist.all_reduce(torch.ones(1))
            state.step += 1
            state.weights += 1
            state.own += rank if os.environ.get("OWN") else 0
            log.write(f"{os.getpid()} {world} {state.step}\n")
            state.commit()


main()
