"""Data-parallel training whose start-up, before the function with `train.elastic`, is counted: a line in $TRAIN_LOG.

It reports the start-up, each entry of the function and each step, the loss exactly.  $BEFORE is Python code that runs
before the function, in standbys only.  At the steps $HOLD_STEPS, all ranks wait while $HOLD_FILE exists.
"""

import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

from ripstop import train

STEPS = int(os.environ.get("STEPS", "12"))
HOLD_STEPS, HOLD_FILE = os.environ.get("HOLD_STEPS", "").split(","), Path(os.environ.get("HOLD_FILE", "/"))


def say(event: str, **more: object) -> None:
    who = {"rank": int(os.environ["RANK"]), "world": int(os.environ["WORLD_SIZE"]), "pid": os.getpid()}
    who |= {"standby": os.environ.get("RIPSTOP_STANDBY"), "restart": int(os.environ["TORCHELASTIC_RESTART_COUNT"])}
    with open(os.environ["TRAIN_LOG"], "a") as log:
        log.write(json.dumps({"t": time.time(), "event": event, **who, **more}) + "\n")


say("start", port=os.environ["MASTER_PORT"], nice=os.getpriority(os.PRIO_PROCESS, 0))
print("the start-up of the script")
os.environ["SET_BY_SCRIPT"] = "yes"
if os.environ.get("RIPSTOP_STANDBY"):
    exec(os.environ.get("BEFORE", ""))
torch.manual_seed(7)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
state = train.State(model=model, optimizer=optimizer, step=0)


@train.elastic
def main() -> None:
    dist.init_process_group("gloo")
    replica = torch.nn.parallel.DistributedDataParallel(model)
    state.restore()
    print("the function of rank", dist.get_rank())
    mine = {"set": os.environ.get("SET_BY_SCRIPT"), "error_file": os.environ["TORCHELASTIC_ERROR_FILE"]}
    say("enter", step=state.step, nice=os.getpriority(os.PRIO_PROCESS, 0), policy=os.sched_getscheduler(0), **mine)
    while state.step < STEPS:
        optimizer.zero_grad()
        loss = replica(torch.randn(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        state.step += 1
        state.commit()
        train.heartbeat(state.step)
        say("step", step=state.step, loss=loss.item().hex())
        while str(state.step) in HOLD_STEPS and HOLD_FILE.exists():
            train.heartbeat(state.step)
            time.sleep(0.01)
    dist.barrier()


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
    say("end")
