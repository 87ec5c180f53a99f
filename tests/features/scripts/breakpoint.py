"""dist.breakpoint: rank 0 reads a debugger's commands from the launcher's stdin while the others wait."""

import os

import torch
import torch.distributed as dist

rank = int(os.environ["RANK"])
dist.init_process_group("gloo")
answer = 1
dist.breakpoint(rank=0)
total = torch.tensor([answer])
dist.all_reduce(total)
assert total.item() == 43, total  # the debugger has set rank 0's answer
dist.destroy_process_group()
print("ok", flush=True)
