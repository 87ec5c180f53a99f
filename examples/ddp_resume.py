"""A small DDP training that resumes from its checkpoint: all that a script needs to survive the loss of a worker.

    ripstop run --standalone --nproc-per-node=2 --max-restarts=3 examples/ddp_resume.py --checkpoint /tmp/demo.pt

It does not import ripstop.  Every worker loads the newest checkpoint when it starts.  Rank 0 writes one every few steps
and renames it into place, so that a kill during the write leaves the old one.  Workers load it after
`init_process_group`: by then all workers of the previous round have ended, so all load the same checkpoint.
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
    print(
        f"worker {dist.get_rank()} is process {os.getpid()}\n", end="", flush=True
    )  # one write, so that lines do not mix
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
    parser.add_argument("--step-time", type=float, default=0.05, help="minimum seconds for a step")
    return parser.parse_args()


def train(
    args: argparse.Namespace, model: DistributedDataParallel, optimizer: torch.optim.Optimizer, first: int
) -> None:
    rank = dist.get_rank()
    for step in range(first, args.steps):
        noise = torch.Generator().manual_seed(step * 1000 + rank)  # the same data when a step is repeated
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
    """Load the checkpoint if there is one; return the first step."""
    if not path.exists():
        return 0
    state = torch.load(path)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


if __name__ == "__main__":
    main()
