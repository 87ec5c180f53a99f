"""Data-parallel training over a `train.Sampler`, with `train.State`, for random schedules of faults.

Writes to $TRAIN_LOG where each rank starts, the samples and the exact loss of each step before the all-reduce, each
commit, and each hold.  $HOLDS="step,…": at this step, all ranks wait for the file $TRAIN_LOG.go-STEP.
$KILLS="rank:step:when,…" asks for SIGKILL, each once: before the step's commit, during it, or after it.  With $DROPOUT,
the losses depend on the random states of every rank.
"""

import json
import os
import signal
import threading
import time
import uuid
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ripstop import train

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
STEPS = int(os.environ["STEPS"])
LOG = os.environ["TRAIN_LOG"]
LENGTH, BATCH = 40, 6  # of the data set, of a step
ROUND = [uuid.uuid4().hex]  # of all ranks, as soon as they have met


def note(event: str, step: int, **more: object) -> None:
    who = {"rank": RANK, "world": WORLD, "round": ROUND[0], "pid": os.getpid()}
    line = json.dumps({"t": time.monotonic(), "event": event, "step": step, **who, **more})
    with open(LOG, "a") as log:
        log.write(f"{line}\n")


def kill(step: int, when: str) -> None:
    if f"{RANK}:{step}:{when}" not in os.environ.get("KILLS", "").split(","):
        return
    try:
        os.close(os.open(f"{LOG}.kill-{RANK}-{step}-{when}", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    if when == "during":  # from another thread, while this one copies
        threading.Timer(0.0005, os.kill, (os.getpid(), signal.SIGKILL)).start()
    else:
        os.kill(os.getpid(), signal.SIGKILL)


def hold(step: int) -> None:
    if str(step) in os.environ.get("HOLDS", "").split(",") and not os.path.exists(f"{LOG}.go-{step}"):
        dist.barrier()  # every rank has this commit
        note("hold", step)
        while not Path(f"{LOG}.go-{step}").exists():
            time.sleep(0.005)


def main() -> None:
    dist.init_process_group("gloo")
    dist.broadcast_object_list(ROUND)
    torch.manual_seed(0)
    inputs = torch.randn(LENGTH, 8)
    dataset = TensorDataset(torch.arange(LENGTH), inputs, inputs.sum(1, keepdim=True).sin())
    dropout = nn.Dropout(0.2 if "DROPOUT" in os.environ else 0.0)
    network = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), dropout, nn.Linear(32, 1))
    # DDP orders gradients anew after its first step, and so sums those of three ranks in another order; not with this:
    model = nn.parallel.DistributedDataParallel(network, find_unused_parameters=True)
    torch.manual_seed(RANK)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)
    sampler = train.Sampler(dataset, BATCH, seed=3)
    generator = torch.Generator()  # a DataLoader draws a number from it when a loop begins, also after a restore
    batches = sampler.batches(DataLoader(dataset, batch_sampler=sampler, generator=generator))
    state = train.State(model=model, optimizer=optimizer, schedule=schedule, sampler=sampler, step=0)
    state.restore()
    note("start", state.step, source=state.restored_from)
    hold(state.step)  # also if the commit was made before the workers were killed
    while state.step < STEPS:
        for samples, data, target in batches:
            loss = nn.functional.mse_loss(model(data), target)
            # Before the gradients are added: so these lines of all ranks precede the first commit of any rank.
            note("samples", state.step + 1, samples=samples.tolist())
            note("loss", state.step + 1, loss=loss.item().hex())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            state.step += 1
            kill(state.step, "before")
            kill(state.step, "during")
            state.commit()
            note("commit", state.step)
            kill(state.step, "after")
            hold(state.step)
            if state.step == STEPS:
                break
    dist.barrier()
    del model, state
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
