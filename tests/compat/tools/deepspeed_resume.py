"""DeepSpeed on CPUs: ZeRO 1, `save_checkpoint` and `load_checkpoint`."""

import sys

import deepspeed
import torch
from fault import STEPS, maybe_die, say

deepspeed.init_distributed(dist_backend="gloo")
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
settings = {
    "train_micro_batch_size_per_gpu": 8,
    "zero_optimization": {"stage": 1},
    "zero_allow_untested_optimizer": True,
}
engine, *_ = deepspeed.initialize(
    model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=settings, dist_init_required=False
)
engine.load_checkpoint(sys.argv[1])
first = engine.global_steps
while engine.global_steps < STEPS:
    maybe_die(engine.global_steps)
    inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(engine.global_steps))
    engine.backward(engine(inputs).square().mean())
    engine.step()
    if engine.global_steps % 10 == 0:
        engine.save_checkpoint(sys.argv[1])
say(first, engine.global_steps, "deepspeed")
torch.distributed.destroy_process_group()
