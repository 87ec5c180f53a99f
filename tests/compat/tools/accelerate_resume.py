"""accelerate: `save_state` and `load_state`."""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from fault import STEPS, maybe_die, say

folder = Path(sys.argv[1])
accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
saved = sorted(folder.glob("step-*"))
first = int(saved[-1].name.removeprefix("step-")) if saved else 0
if saved:
    accelerator.load_state(str(saved[-1]))
for step in range(first, STEPS):
    maybe_die(step)
    inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
    accelerator.backward(model(inputs).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    if (step + 1) % 10 == 0:
        accelerator.save_state(str(folder / "saving"))
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            (folder / "saving").rename(folder / f"step-{step + 1}")
        accelerator.wait_for_everyone()
say(first, step + 1, "accelerate")
accelerator.end_training()
