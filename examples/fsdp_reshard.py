"""FSDP2 with torch.distributed.checkpoint: a checkpoint can be loaded by another number of workers.

    ripstop run --standalone --nproc-per-node=2 --max-restarts=3 examples/fsdp_reshard.py --checkpoint /tmp/fsdp

Every worker has a shard of the parameters and of the optimizer's state, and writes that shard to the checkpoint.  When
it loads, it reads the parts of the files that belong to its new shard.  Each checkpoint has its own folder.  It is
complete when it has `.metadata`, which is written last: a kill during the save leaves the previous checkpoint.
"""

import argparse
import os
import shutil
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def main() -> None:
    args = arguments()
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    mesh = init_device_mesh(args.device, (int(os.environ["WORLD_SIZE"]),))  # initialises the process group
    print(
        f"worker {dist.get_rank()} is process {os.getpid()}\n", end="", flush=True
    )  # one write, so that lines do not mix
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)).to(args.device)
    for part in (model[0], model[2], model[4], model):
        fully_shard(part, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    first = resume(args.checkpoint, model, optimizer)
    if dist.get_rank() == 0:
        print(f"training from step {first} to {args.steps}, {dist.get_world_size()} workers", flush=True)
    train(args, model, optimizer, first)
    dist.destroy_process_group()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--checkpoint", type=Path, required=True, help="the folder for checkpoints, shared by all nodes"
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save-every", type=int, default=10, help="steps between checkpoints")
    parser.add_argument("--step-time", type=float, default=0.05, help="minimum seconds for a step")
    return parser.parse_args()


def train(args: argparse.Namespace, model: nn.Module, optimizer: torch.optim.Optimizer, first: int) -> None:
    rank = dist.get_rank()
    for step in range(first, args.steps):
        noise = torch.Generator().manual_seed(step * 1000 + rank)  # the same data when a step is repeated
        inputs = torch.randn(32, 16, generator=noise).to(args.device)
        loss = nn.functional.mse_loss(model(inputs), inputs.sum(dim=1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        time.sleep(args.step_time)
        if (step + 1) % args.save_every == 0:
            save(args.checkpoint, model, optimizer, step + 1)
            if rank == 0:
                print(f"step {step + 1:4d}  loss {loss.item():.4f}  saved", flush=True)


def save(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    dcp.save(state_of(model, optimizer, step), checkpoint_id=folder / f"step-{step:08d}")
    if dist.get_rank() == 0:
        for old in complete_checkpoints(folder)[:-2]:
            shutil.rmtree(old)


def resume(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the newest complete checkpoint if there is one; return the first step."""
    choice = [max(complete_checkpoints(folder), default=None)]
    dist.broadcast_object_list(choice, 0)  # the same choice for all, even if they see different files
    if choice[0] is None:
        return 0
    state = state_of(model, optimizer, 0)  # describes the shards to load, and receives them
    dcp.load(state, checkpoint_id=choice[0])
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return int(state["step"])


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> dict[str, Any]:
    of_model, of_optimizer = get_state_dict(model, optimizer)
    return {"model": of_model, "optimizer": of_optimizer, "step": step}


def complete_checkpoints(folder: Path) -> list[Path]:
    return sorted(path.parent for path in folder.glob("step-*/.metadata"))


if __name__ == "__main__":
    main()
