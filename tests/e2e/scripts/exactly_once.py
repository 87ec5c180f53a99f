"""A loop over a DataLoader with worker processes.  Appends "step sample,sample,…" to $SAMPLES.RANK before each commit.

$KILLS="rank:step,…" asks for SIGKILL after the step's commit, each once.  The position is saved to $SAMPLES.position at
the end and loaded at the start, for a job with another number of ranks.
"""

import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from ripstop import train

FILE = os.environ["SAMPLES"]
RANK = int(os.environ["RANK"])
STEPS = int(os.environ["STEPS"])


def kill(step: int) -> None:
    for spec in filter(None, os.environ.get("KILLS", "").split(",")):
        marker = Path(f"{FILE}.killed-{spec}")
        if spec == f"{RANK}:{step}" and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    dist.init_process_group("gloo")
    dataset = torch.arange(40)
    sampler = train.Sampler(dataset, 6, seed=3)
    loader = DataLoader(dataset, batch_sampler=sampler, num_workers=2, prefetch_factor=3)
    state = train.State(sampler=sampler, step=0)
    position = Path(f"{FILE}.position")
    if not state.restore() and position.exists():
        state.step, saved = torch.load(position)
        sampler.load_state_dict(saved)
    with open(f"{FILE}.{RANK}", "a") as log:
        while state.step < STEPS:
            for batch in sampler.batches(loader):
                dist.all_reduce(torch.ones(1))
                state.step += 1
                log.write(f"{state.step} {','.join(map(str, batch.tolist()))}\n")
                log.flush()
                state.commit()
                kill(state.step)
                if state.step == STEPS:
                    break
    if RANK == 0:
        torch.save((state.step, sampler.state_dict()), position)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
