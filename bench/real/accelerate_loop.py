"""A small network in a training loop of one's own, with accelerate and a scheduler of transformers."""

import torch
from accelerate import Accelerator
from report import say
from torch import nn
from transformers import get_linear_schedule_with_warmup

say("imported")
accelerator = Accelerator(cpu=True)
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = get_linear_schedule_with_warmup(optimizer, 10, 100_000)
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(100_000, 32)), batch_size=4)
model, optimizer, scheduler, data = accelerator.prepare(model, optimizer, scheduler, data)
for (batch,) in data:
    optimizer.zero_grad()
    accelerator.backward(model(batch).square().mean())
    optimizer.step()
    scheduler.step()
    say("step")
