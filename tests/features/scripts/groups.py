"""Point-to-point batches, groups and subgroups, and a barrier that reports the missing rank."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist

rank = int(os.environ["RANK"])
dist.init_process_group("gloo")

got = torch.zeros(1)
ops = [dist.P2POp(dist.isend, torch.tensor([rank + 1.0]), 1 - rank), dist.P2POp(dist.irecv, got, 1 - rank)]
for work in dist.batch_isend_irecv(ops):
    work.wait()
assert got.item() == 2 - rank

alone = [dist.new_group([0]), dist.new_group([1])][rank]
value = torch.tensor([rank + 1.0])
dist.all_reduce(value, group=alone)
assert value.item() == rank + 1
both = dist.new_group([0, 1], timeout=timedelta(seconds=30), group_desc="both")
dist.all_reduce(value, group=both)
assert value.item() == 3
mine, groups = dist.new_subgroups_by_enumeration([[0], [1]])
assert len(groups) == 2 and dist.get_world_size(mine) == 1

dist.monitored_barrier(timeout=timedelta(seconds=30))
if rank == 0:
    try:
        dist.monitored_barrier(timeout=timedelta(milliseconds=300))
    except RuntimeError as error:
        assert "Rank 1" in str(error), error
    else:
        raise AssertionError("a barrier that rank 1 never reached let rank 0 through")
dist.barrier(group=both)
dist.destroy_process_group()
print("ok", flush=True)
