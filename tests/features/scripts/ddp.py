"""DDP with a communication hook, and `Join` for ranks that have more data than others."""

import os

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

rank = int(os.environ["RANK"])
dist.init_process_group("gloo")
torch.manual_seed(rank)  # DDP has to make the replicas equal
model = DistributedDataParallel(torch.nn.Linear(4, 1))
model.register_comm_hook(None, default_hooks.fp16_compress_hook)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches = 3 + 4 * rank
with Join([model]):
    for _ in range(batches):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
weights = [torch.empty(1, 4) for _ in range(2)]
dist.all_gather(weights, model.module.weight.data)
torch.testing.assert_close(weights[0], weights[1])
del model  # a DDP object that outlives its group can hang its worker
dist.destroy_process_group()
print("ok", flush=True)
