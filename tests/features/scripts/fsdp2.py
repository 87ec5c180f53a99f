"""FSDP2: sharded parameters, with the same result as training the whole model in one process."""

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

rank = int(os.environ["RANK"])
dist.init_process_group("gloo")
inputs = [torch.randn(4, 8, generator=torch.Generator().manual_seed(r)) for r in range(2)]


def build() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))


def train(model: torch.nn.Module, batch: torch.Tensor) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()


sharded, whole = build(), build()
mesh = init_device_mesh("cpu", (2,))
for layer in (sharded[0], sharded[2], sharded):
    fully_shard(layer, mesh=mesh)
assert all(isinstance(p, DTensor) and p.to_local().numel() * 2 == p.numel() for p in sharded.parameters())
train(sharded, inputs[rank])
train(whole, torch.cat(inputs))
for mine, theirs in zip(sharded.parameters(), whole.parameters(), strict=True):
    torch.testing.assert_close(mine.full_tensor(), theirs.data)
dist.destroy_process_group()
print("ok", flush=True)
