"""The flight recorder has the collectives that gloo ran."""

import pickle

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace

dist.init_process_group("gloo")
for _ in range(3):
    dist.all_reduce(torch.ones(4))
dist.barrier()
trace = pickle.loads(_dump_fr_trace(includeStackTraces=False))
names = [entry["profiling_name"] for entry in trace["entries"]]
assert sum("all_reduce" in name for name in names) == 3, names
dist.destroy_process_group()
print("ok", flush=True)
