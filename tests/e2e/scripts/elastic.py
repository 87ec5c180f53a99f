"""Data-parallel training that goes on in place after faults.  Appends to $LOSSES.RANK a line "# PID ENTRY STEP" at each
entry of the function, and "step loss" with exact losses after each step.

$FAULTS="rank:when:what,…", each once: after the step of this number, `kill` before its commit, `after` it, `stop`
(SIGSTOP), `raise`, or `follow`: kill when the fault before it in the list has happened; or, in the round after so many
restarts, kill while `forming` its groups or `restoring` its state.
$FSDP: the model is sharded.  $STEPS, $HOLD="step:ranks": a round of so many ranks waits there until it is over.
"""

import os
import signal
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ripstop import train

LOSSES = os.environ["LOSSES"]
STEPS = int(os.environ.get("STEPS", "12"))
IS_SHARDED = bool(os.environ.get("FSDP"))
FIRST_RANK = int(os.environ["RANK"])
entries = 0


def is_due(when: int, *kinds: str) -> str:
    for number, spec in enumerate(filter(None, os.environ.get("FAULTS", "").split(","))):
        rank, *moment = spec.split(":")
        if moment[1] in kinds and moment[0] == str(when):
            if moment[1] == "after":
                dist.barrier()  # every rank has this commit
            if rank == os.environ["RANK"]:
                while moment[1] == "follow" and not os.path.exists(f"{LOSSES}.fault{number - 1}"):
                    time.sleep(0.01)
                try:
                    os.close(os.open(f"{LOSSES}.fault{number}", os.O_CREAT | os.O_EXCL))
                except FileExistsError:
                    continue
                return moment[1]
    return ""


def inject(when: int, *kinds: str) -> None:
    match is_due(when, *kinds):
        case "":
            return
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "raise":
            raise ValueError("the script's own error")
        case "restoring":
            threading.Timer(0.002, os.kill, (os.getpid(), signal.SIGKILL)).start()
        case _:
            os.kill(os.getpid(), signal.SIGKILL)


def make_model() -> nn.Module:
    torch.manual_seed(FIRST_RANK)
    return nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 1))


def make_state(model: nn.Module) -> train.State:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return train.State(model=model, optimizer=optimizer, step=0)


if not IS_SHARDED:
    kept_model = make_model()
    kept_state = make_state(kept_model)


@train.elastic
def main() -> None:
    global entries
    entries += 1
    restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    inject(restarts, "forming")
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    pair = dist.new_group(sorted({0, ranks - 1}))
    if IS_SHARDED:
        torch.manual_seed(0)
        model = make_model()
        fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
        state = make_state(model)
    else:
        model = nn.parallel.DistributedDataParallel(kept_model, find_unused_parameters=True)
        state = kept_state
    inject(restarts, "restoring")
    state.restore()
    with open(f"{LOSSES}.{rank}", "a", buffering=1) as losses:
        losses.write(f"# {os.getpid()} {entries} {state.step}\n")
        while state.step < STEPS:
            loss = model(torch.randn(4, 8)).square().mean()
            state.optimizer.zero_grad()
            loss.backward()
            if rank in (0, ranks - 1):
                dist.all_reduce(torch.ones(1), group=pair)
            state.optimizer.step()
            state.step += 1
            losses.write(f"{state.step} {loss.item().hex()}\n")
            inject(state.step, "kill", "stop", "raise", "follow")
            state.commit()
            inject(state.step, "after")
            if os.environ.get("HOLD") == f"{state.step}:{ranks}":
                Path(f"{LOSSES}.held{rank}").touch()
                while True:
                    train.heartbeat(state.step)
                    time.sleep(0.01)
        dist.barrier()


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
