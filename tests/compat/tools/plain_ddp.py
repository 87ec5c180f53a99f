"""A DDP step with nothing but torch."""

import json
import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(1, 1))
model(torch.ones(1, 1) * dist.get_rank()).sum().backward()
gradient = next(model.parameters()).grad
said = [dist.get_rank(), dist.get_world_size(), gradient.item(), "round_1" in os.environ["TORCHELASTIC_ERROR_FILE"]]
sys.stdout.write(json.dumps(said) + "\n")
dist.destroy_process_group()
