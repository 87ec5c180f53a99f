"""A script with checkpoints of its own, and `train.Checkpointer`.  Rank 1 is killed once, after step 5.

It writes a file every tenth step only.  Each start is a line of $STARTS.RANK.
"""

import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist

from ripstop import train

RANK = int(os.environ["RANK"])
FILE = Path(os.environ["STARTS"] + ".pt")


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters())
    checkpointer = train.Checkpointer()
    first = 0
    if checkpoint := checkpointer.load() or (torch.load(FILE) if FILE.exists() else None):
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        first = checkpoint["step"]
    with open(f"{os.environ['STARTS']}.{RANK}", "a") as starts:
        starts.write(f"{first} {sum(float(p.sum()) for p in model.parameters()).hex()}\n")
    for step in range(first + 1, 13):
        optimizer.zero_grad()
        model(torch.full((3, 2), float(step))).square().mean().backward()
        dist.all_reduce(torch.ones(1))
        optimizer.step()
        checkpoint = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
        checkpointer.save(checkpoint)
        if step == 10 and RANK == 0:
            torch.save(checkpoint, FILE)
        if step == 5 and RANK == 1 and first == 0:
            os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
    with open(f"{os.environ['STARTS']}.{RANK}", "a") as starts:
        starts.write(f"end {sum(float(p.sum()) for p in model.parameters()).hex()}\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
