"""The same training with ripstop.train.State: commits every step to memory."""

import torch.distributed as dist
from common import Pace, log, loss_of, make_model
from torch.nn.parallel import DistributedDataParallel

from ripstop import train


def main() -> None:
    log(event="start")
    dist.init_process_group("gloo")
    model, optimizer = make_model()
    state = train.State(model=model, optimizer=optimizer, step=0)
    state.restore()
    loop(DistributedDataParallel(model), optimizer, state)
    dist.destroy_process_group()


def loop(replica, optimizer, state: train.State) -> None:
    rank, world, pace = dist.get_rank(), dist.get_world_size(), Pace()
    while True:
        optimizer.zero_grad()
        loss_of(replica, state.step, rank).backward()
        optimizer.step()
        pace.wait()
        state.step += 1
        state.commit()
        if rank == 0:
            log(event="step", step=state.step, world=world, writer="rank 0")


if __name__ == "__main__":
    main()
