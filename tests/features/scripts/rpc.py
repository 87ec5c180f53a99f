"""RPC: calls, futures and remote references between two workers."""

import os

import torch
from torch.distributed import rpc

rank = int(os.environ["RANK"])
rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
other = f"worker{1 - rank}"
torch.testing.assert_close(rpc.rpc_sync(other, torch.add, args=(torch.ones(2), rank)), torch.ones(2) + rank)
assert rpc.rpc_async(other, max, args=(rank, 5)).wait() == 5
reference = rpc.remote(other, torch.full, args=((2, 2), 3.0))
torch.testing.assert_close(reference.to_here(), torch.full((2, 2), 3.0))
rpc.shutdown()
print("ok", flush=True)
