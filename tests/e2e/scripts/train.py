"""A tiny elastic training script: gloo all_reduce in every step, the step number kept on disk by rank 0.

Appends JSON lines to $TRAIN_LOG.  $TRAIN_FAULT="kind:rank:step[:restart],…" asks for faults, $TRAIN_STEPS for steps.
"""

import json
import os
import signal
import time

RANK = int(os.environ["RANK"])
WORLD = int(os.environ["WORLD_SIZE"])
RESTART = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
LOG = os.environ["TRAIN_LOG"]


def say(event: str, **more: object) -> None:
    head = {"t": time.time(), "event": event, "rank": RANK, "world": WORLD, "pid": os.getpid(), "restart": RESTART}
    with open(LOG, "a") as f:
        place = {
            "node": int(os.environ["GROUP_RANK"]),
            "host": os.uname().nodename,
            "master": os.environ["MASTER_ADDR"],
        }
        f.write(json.dumps({**head, **place, **more}) + "\n")


def fault(step: int) -> None:
    for spec in filter(None, os.environ.get("TRAIN_FAULT", "").split(",")):
        kind, rank, at, *restart = spec.split(":")
        if (int(rank), int(at)) != (RANK, step) or (restart and int(restart[0]) != RESTART):
            continue
        say("fault", kind=kind, step=step)
        match kind:
            case "raise":
                raise RuntimeError("the fault that was asked for")
            case "exit":
                os._exit(7)
            case "segv":
                os.kill(os.getpid(), signal.SIGSEGV)
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    import torch
    import torch.distributed as dist

    say("start")
    dist.init_process_group("gloo")
    state = LOG + ".step"
    step = 0
    if os.path.exists(state):
        with open(state) as f:
            step = int(f.read() or 0)
    shared = torch.tensor([step])
    dist.broadcast(shared, 0)
    step = int(shared)
    while step < int(os.environ.get("TRAIN_STEPS", "20")):
        fault(step)
        dist.all_reduce(torch.ones(8))
        step += 1
        if RANK == 0:
            with open(state + ".new", "w") as f:
                f.write(str(step))
            os.replace(state + ".new", state)
        say("step", step=step)
        time.sleep(float(os.environ.get("TRAIN_STEP_S", "0.02")))
    dist.barrier()
    dist.destroy_process_group()
    say("done")


if __name__ == "__main__":
    main()
