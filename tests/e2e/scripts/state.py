"""Data-parallel training with `train.State`.  Appends "step loss" with exact losses to $LOSSES.RANK.

$KILLS="rank:step:when,…" asks for SIGKILL, each once: before the step's commit, during it, or after it.
$HOLDS="step:ranks,…": after this step, a round of so many ranks waits for its end.
$EVERY is the interval of commits.
"""

import os
import signal
import threading
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from ripstop import train

RANK = int(os.environ.get("RANK", "0"))
STEPS = int(os.environ.get("STEPS", "12"))


def kill(step: int, when: str) -> threading.Timer | None:
    """Kill this process, or start the timer that does."""
    for number, spec in enumerate(filter(None, os.environ.get("KILLS", "").split(","))):
        rank, *moment = spec.split(":")
        if moment != [str(step), when]:
            continue
        if when == "after":
            dist.barrier()  # every rank has this commit
        if rank != str(RANK):
            continue
        try:
            os.close(os.open(f"{os.environ['LOSSES']}.kill{number}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            continue
        if when == "during":  # from another thread, while this one copies
            timer = threading.Timer(0.0005, os.kill, (os.getpid(), signal.SIGKILL))
            timer.start()
            return timer
        os.kill(os.getpid(), signal.SIGKILL)
    return None


def hold(step: int) -> None:
    if f"{step}:{dist.get_world_size()}" in os.environ.get("HOLDS", "").split(","):
        dist.barrier()  # every rank has this commit
        Path(f"{os.environ['LOSSES']}.held{RANK}-{step}").touch()
        signal.pause()


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(RANK)
    net = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 1))
    model = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)
    state = train.State(model=model, optimizer=optimizer, schedule=schedule, step=0)
    restored = state.restore()
    with open(f"{os.environ['LOSSES']}.{RANK}", "a") as losses:
        losses.write(f"# {'restored' if restored else 'started'} at {state.step}\n")
        losses.flush()
        while state.step < STEPS:
            loss = model(torch.randn(4, 8)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            state.step += 1
            losses.write(f"{state.step} {loss.item().hex()}\n")
            losses.flush()
            kill(state.step, "before")
            timer = kill(state.step, "during")
            state.commit(every=os.environ.get("EVERY"))
            if timer:
                timer.join()
            kill(state.step, "after")
            hold(state.step)
    dist.barrier()
    del model, state
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
