"""Training that can go on in place (`@train.elastic`), and says on disk when each step was done.

Runs under any launcher; without ripstop, nothing is kept and every process begins again.  $PROBE_STARTUP_S seconds of
own start-up stand for the build and the compilation of a model.  $PROBE_FAULT="kill:rank:step": once, in round 0.
"""

import json
import os
import signal
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ripstop import train

LOG = os.environ["PROBE_LOG"]
STEPS = int(os.environ.get("PROBE_STEPS", "60"))
STEP_S = float(os.environ.get("PROBE_STEP_S", "0.02"))

time.sleep(float(os.environ.get("PROBE_STARTUP_S", "0")))
torch.manual_seed(0)
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
state = train.State(model=model, optimizer=optimizer, step=0)


def say(event: str, **more: object) -> None:
    place = {"rank": int(os.environ["RANK"]), "world": int(os.environ["WORLD_SIZE"])}
    with open(LOG, "a") as log:
        log.write(json.dumps({"t": time.time(), "event": event, "pid": os.getpid(), **place, **more}) + "\n")


@train.elastic
def main() -> None:
    dist.init_process_group("gloo")
    replica = DistributedDataParallel(model)
    state.restore()
    while state.step < STEPS:
        if f"kill:{dist.get_rank()}:{state.step}" == os.environ.get("PROBE_FAULT") and not int(
            os.environ["TORCHELASTIC_RESTART_COUNT"]
        ):
            say("fault")
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        replica(torch.ones(1, 64)).square().mean().backward()
        optimizer.step()
        state.step += 1
        state.commit()
        train.heartbeat(state.step)
        say("step", step=state.step)
        time.sleep(STEP_S)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
