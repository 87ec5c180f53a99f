"""torch.distributed.checkpoint: saved by two ranks, loaded into another layout and in the background."""

import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

mesh = init_device_mesh("cpu", (2,))
whole = torch.arange(24.0).reshape(4, 6)
state = {"weight": distribute_tensor(whole, mesh, [Shard(0)]), "step": torch.tensor(7)}
folder = os.path.join(os.environ["SCRATCH"], "dcp")
dcp.save(state, checkpoint_id=folder)

other = {"weight": distribute_tensor(torch.zeros(4, 6), mesh, [Shard(1)]), "step": torch.tensor(0)}
dcp.load(other, checkpoint_id=folder)
torch.testing.assert_close(other["weight"].full_tensor(), whole)
assert int(other["step"]) == 7

alone = {"weight": torch.zeros(4, 6)}
dcp.load(alone, checkpoint_id=folder, no_dist=True)
torch.testing.assert_close(alone["weight"], whole)

dcp.async_save(other, checkpoint_id=folder + "-later").result(60)
assert os.path.exists(os.path.join(folder + "-later", ".metadata"))
dist.barrier()
dist.destroy_process_group()
print("ok", flush=True)
