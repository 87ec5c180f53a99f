"""A small DDP training that resumes from its checkpoint: what a script needs to survive the loss of a worker.

    ripstop run --standalone --nproc-per-node=2 --max-restarts=3 examples/ddp_resume.py --checkpoint /tmp/demo.pt

There is nothing of ripstop in it.  Every worker loads the newest checkpoint when it starts, and rank 0 writes one every
few steps, by rename, so that a kill in the middle of writing leaves the old one.  It is loaded after the process group
has met: by then nobody who could write another is left of the round before, and all load the same.
"""

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    args = arguments()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    first = resume(args.checkpoint, model, optimizer)
    print(f"worker {dist.get_rank()} is process {os.getpid()}\n", end="", flush=True)  # one write: lines do not mix
    dist.barrier()
    if dist.get_rank() == 0:
        print(f"training from step {first} to {args.steps}, {dist.get_world_size()} workers", flush=True)
    train(args, DistributedDataParallel(model), optimizer, first)
    dist.destroy_process_group()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, required=True, help="the file to resume from and to write")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save-every", type=int, default=10, help="steps between checkpoints")
    parser.add_argument("--step-time", type=float, default=0.05, help="seconds that a step takes at least")
    return parser.parse_args()


def train(
    args: argparse.Namespace, model: DistributedDataParallel, optimizer: torch.optim.Optimizer, first: int
) -> None:
    rank = dist.get_rank()
    for step in range(first, args.steps):
        noise = torch.Generator().manual_seed(step * 1000 + rank)  # the same data again when a step is done again
        inputs = torch.randn(32, 16, generator=noise)
        loss = torch.nn.functional.mse_loss(model(inputs), inputs.sum(dim=1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        time.sleep(args.step_time)
        if rank == 0 and (step + 1) % args.save_every == 0:
            save(args.checkpoint, model.module, optimizer, step + 1)
            print(f"step {step + 1:4d}  loss {loss.item():.4f}  saved", flush=True)


def save(path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    new = path.with_suffix(".new")
    torch.save({"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, new)
    new.replace(path)


def resume(path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the checkpoint where there is one; the step to begin with."""
    if not path.exists():
        return 0
    state = torch.load(path)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


if __name__ == "__main__":
    main()
