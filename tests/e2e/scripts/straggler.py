"""Trains with DistributedDataParallel on the CPU for $STEPS steps.

A step of each rank takes 0.05 s, and of rank $SLOW four times as long while the file $WHEN exists.  With $JITTER, it
takes up to this many seconds more, at random.
"""

import os
import random
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ripstop import train

dist.init_process_group("gloo")
rank = dist.get_rank()
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loss_sum = torch.zeros(1)

for step in range(int(os.environ.get("STEPS", "1000000"))):
    train.heartbeat(step)
    is_slow = os.environ.get("SLOW") == str(rank) and os.path.exists(os.environ["WHEN"])
    time.sleep((0.2 if is_slow else 0.05) + random.random() * float(os.environ.get("JITTER", "0")))
    loss = model(torch.randn(16, 64)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    loss_sum = loss.detach().clone().reshape(1)
    dist.all_reduce(loss_sum)  # as many scripts do to log the loss
