"""FSDP2 training with `train.State`.  Appends ranks, step and a digest of the whole state to $LOSSES.RANK at the start
and at $HOLDS="step:ranks,…", where a round of so many ranks waits for its end.
"""

import hashlib
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from ripstop import train

RANK = int(os.environ["RANK"])
STEPS = 9


def digest(*states: dict) -> str:
    found = hashlib.sha256()

    def add(value) -> None:
        if isinstance(value, dict):
            for key, part in value.items():
                found.update(str(key).encode())
                add(part)
        elif isinstance(value, torch.Tensor):
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            found.update(bytes(whole.contiguous().view(-1).view(torch.uint8).tolist()))

    for state in states:
        add(state)
    return found.hexdigest()[:16]


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 14), nn.ReLU(), nn.Linear(14, 5))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    state = train.State(model=model, optimizer=optimizer, step=0)
    state.restore()

    def note() -> None:
        line = f"{dist.get_world_size()} {state.step} {digest(model.state_dict(), optimizer.state_dict())}\n"
        with open(f"{os.environ['LOSSES']}.{RANK}", "a") as file:
            file.write(line)

    note()
    while state.step < STEPS:
        optimizer.zero_grad()
        model(torch.randn(4, 6)).square().mean().backward()
        optimizer.step()
        state.step += 1
        state.commit()
        if f"{state.step}:{dist.get_world_size()}" in os.environ.get("HOLDS", "").split(","):
            note()
            Path(f"{os.environ['LOSSES']}.held{RANK}-{state.step}").touch()
            signal.pause()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
