"""What the pods of test_nodes.py run: a DDP job on gloo that checkpoints, and notes every step of every rank.

steps.py FOLDER: FOLDER/steps gets a line `TIME POD RANK WORLD STEP` for each step of each rank, FOLDER/checkpoint the
model every fifth step, FOLDER/end ends it.
"""

import os
import socket
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ripstop import train

folder = Path(sys.argv[1])
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
model = DistributedDataParallel(torch.nn.Linear(16, 16))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
checkpoint, partial = folder / "checkpoint", folder / f"checkpoint.{os.getpid()}.{socket.gethostname()}"
step = 0
if checkpoint.exists():
    state = torch.load(checkpoint)
    model.module.load_state_dict(state["model"])
    step = state["step"]

over = torch.zeros(1)
while not over.item():
    model(torch.randn(8, 16)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    with (folder / "steps").open("a") as steps:
        steps.write(f"{time.time():.3f} {socket.gethostname()} {rank} {world} {step}\n")
    if rank == 0 and step % 5 == 0:
        torch.save({"model": model.module.state_dict(), "step": step}, partial)
        partial.rename(checkpoint)
    train.heartbeat(step)
    over.fill_((folder / "end").exists())
    dist.all_reduce(over)
    time.sleep(0.1)
print(f"rank {rank} is done at step {step}", flush=True)
dist.destroy_process_group()
