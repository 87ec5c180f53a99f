"""TORCH_DISTRIBUTED_DEBUG=DETAIL detects ranks that disagree, and workers receive GLOO_SOCKET_IFNAME."""

import os

import torch
import torch.distributed as dist

assert dist.get_debug_level() == dist.DebugLevel.DETAIL
assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
rank = int(os.environ["RANK"])
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(2))
try:
    if rank == 0:
        dist.all_reduce(torch.ones(2))
    else:
        dist.broadcast(torch.ones(2), 0)
except RuntimeError as error:
    assert "mismatch" in str(error) or "Detected" in str(error), error
else:
    raise AssertionError("two ranks called different collectives, and torch did not detect it")
print("ok", flush=True)
os._exit(0)  # a group that disagrees cannot be destroyed
