"""The same training with ripstop.train.State: commits every step to memory.

It saves and loads the same checkpoints as ddp.py, for what memory does not survive.
"""

import time

import torch.distributed as dist
from common import SAVE_EVERY_S, Pace, load, log, loss_of, make_model, save
from torch.nn.parallel import DistributedDataParallel

from ripstop import train


def main() -> None:
    log(event="start")
    dist.init_process_group("gloo")
    model, optimizer = make_model()
    state = train.State(model=model, optimizer=optimizer, step=0)
    if not state.restore() and (saved := load()):
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        state.step = saved["step"]
    loop(model, optimizer, state)
    dist.destroy_process_group()


def loop(model, optimizer, state: train.State) -> None:
    replica = DistributedDataParallel(model)
    rank, world = dist.get_rank(), dist.get_world_size()
    saved, pace = time.monotonic(), Pace()
    while True:
        optimizer.zero_grad()
        loss_of(replica, state.step, rank).backward()
        optimizer.step()
        pace.wait()
        state.step += 1
        state.commit()
        if rank == 0:
            log(event="step", step=state.step, world=world, writer="rank 0")
            if time.monotonic() - saved > SAVE_EVERY_S:
                save({"step": state.step, "model": model.state_dict(), "optimizer": optimizer.state_dict()})
                saved = time.monotonic()


if __name__ == "__main__":
    main()
