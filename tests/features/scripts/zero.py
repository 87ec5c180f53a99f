"""ZeroRedundancyOptimizer: each rank keeps its share of Adam's state, and the result is plain Adam's."""

import os

import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

rank = int(os.environ["RANK"])
dist.init_process_group("gloo")


def train(sharded: bool) -> torch.Tensor:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(8, 8) for _ in range(4)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers))
    if sharded:
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    else:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.full((2, 8), step + rank + 1.0)).square().mean().backward()
        optimizer.step()
    if sharded:
        assert len(optimizer.optim.state) < 8, "this rank keeps the state of all parameters"
    return torch.cat([p.detach().flatten() for p in model.parameters()])


torch.testing.assert_close(train(sharded=True), train(sharded=False))
dist.destroy_process_group()
print("ok", flush=True)
