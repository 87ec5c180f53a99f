"""Pipelining: two stages on two ranks, four microbatches, and the loss of the whole model."""

import os

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

rank = int(os.environ["RANK"])
dist.init_process_group("gloo")
torch.manual_seed(0)
stages = [torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)]
x, target = torch.randn(8, 8), torch.randn(8, 8)
stage = PipelineStage(stages[rank], stage_index=rank, num_stages=2, device=torch.device("cpu"))
schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=torch.nn.functional.mse_loss)
if rank == 0:
    schedule.step(x)
else:
    losses: list[torch.Tensor] = []
    schedule.step(target=target, losses=losses)
    expected = torch.nn.functional.mse_loss(stages[1](stages[0](x)), target)
    torch.testing.assert_close(torch.stack(losses).mean(), expected)
assert stages[rank].weight.grad is not None
dist.destroy_process_group()
print("ok", flush=True)
