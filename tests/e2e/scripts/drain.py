"""Counts steps with `train.State`, a collective in each.

Writes "PID WORLD restored STEP" to $STEPS_LOG.RANK at the start, and "PID WORLD STEP" before each commit.

With $OWN, each rank has a state of its own, and checks it after a restore.  With $EMA, there is a second State, which
must be of the same step.  $EVERY is the interval of commits, $STEP_S the time of a step.
"""

import os
import time

import torch
import torch.distributed as dist

from ripstop import train

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
values = {"weights": torch.zeros(1000)}
if os.environ.get("OWN"):
    values["own"] = torch.zeros(1000)
state = train.State(step=0, **values)
state.restore()
ema = train.State("ema", step=0, **values) if os.environ.get("EMA") else None
if ema is not None:
    ema.restore()
    assert ema.step == state.step, (ema.step, state.step)
every = int(os.environ["EVERY"]) if "EVERY" in os.environ else None
log = open(f"{os.environ['STEPS_LOG']}.{rank}", "a", buffering=1)
log.write(f"{os.getpid()} {world} restored {state.step}\n")
assert torch.equal(state.weights, torch.full((1000,), float(state.step)))
if os.environ.get("OWN"):
    assert torch.equal(state.own, torch.full((1000,), float(state.step * (rank + 1)))), state.own[0]
while True:
    time.sleep(float(os.environ.get("STEP_S", "0.02")))
    dist.all_reduce(torch.ones(1))
    state.step += 1
    state.weights += 1
    if os.environ.get("OWN"):
        state.own += rank + 1
    log.write(f"{os.getpid()} {world} {state.step}\n")
    if ema is not None:  # commits before the other
        ema.step += 1
        ema.commit(every)
    state.commit(every)
