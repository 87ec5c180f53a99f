"""Process groups by `tcp://` at the launcher's store, by `tcp://` at the script's own, and by `file://`."""

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

# The variable tells torch that the launcher hosts the store.  A script that hosts its own must change it.
os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
meet(f"tcp://127.0.0.1:{os.environ['OWN_PORT']}")
print("ok", flush=True)
