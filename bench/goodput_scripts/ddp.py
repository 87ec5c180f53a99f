"""An ordinary DDP script: saves a checkpoint every few seconds, loads it at the start.  For every launcher."""

import time

import torch.distributed as dist
from common import SAVE_EVERY_S, Pace, load, log, loss_of, make_model, save
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    log(event="start")
    dist.init_process_group("gloo")
    model, optimizer = make_model()
    first = 0
    if state := load():
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    train(model, optimizer, first)
    dist.destroy_process_group()


def train(model, optimizer, step: int) -> None:
    replica = DistributedDataParallel(model)
    rank, world = dist.get_rank(), dist.get_world_size()
    saved, pace = time.monotonic(), Pace()
    while True:
        optimizer.zero_grad()
        loss_of(replica, step, rank).backward()
        optimizer.step()
        pace.wait()
        step += 1
        if rank == 0:
            log(event="step", step=step, world=world, writer="rank 0")
            if time.monotonic() - saved > SAVE_EVERY_S:
                save({"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()})
                saved = time.monotonic()


if __name__ == "__main__":
    main()
