"""A device mesh, and tensors spread over it: sharded, multiplied, gathered."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))  # also initialises the process group
assert mesh["shard"].size() == 2
assert mesh["shard"].get_local_rank() == dist.get_rank()
torch.manual_seed(0)
a, b = torch.randn(6, 4), torch.randn(4, 5)
left = distribute_tensor(a, mesh["shard"], [Shard(0)])
right = distribute_tensor(b, mesh["shard"], [Replicate()])
assert left.to_local().shape == (3, 4)
product = left @ right
assert product.placements == (Shard(0),)
torch.testing.assert_close(product.full_tensor(), a @ b)
torch.testing.assert_close(product.redistribute(mesh["shard"], [Shard(1)]).full_tensor(), a @ b)
dist.destroy_process_group()
print("ok", flush=True)
