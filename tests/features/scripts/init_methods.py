"""Process groups by `tcp://` at the launcher's store, by `tcp://` at one of our own, and by `file://`."""

import os

import torch
import torch.distributed as dist

rank = int(os.environ["RANK"])
address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]


def meet(method: str) -> None:
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=2)
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == 2
    dist.barrier()
    dist.destroy_process_group()


meet(f"tcp://{address}:{port}")
meet(f"file://{os.environ['SCRATCH']}/meeting")

# The launcher says that it hosts the store; a script that wants to host one itself says that it does not.
os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
meet(f"tcp://127.0.0.1:{os.environ['OWN_PORT']}")
print("ok", flush=True)
