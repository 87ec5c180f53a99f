"""The same training with torchft: each worker is a replica group; a replica that comes back heals from the other one.

It saves and loads the same checkpoints as ddp.py, for the case that no replica is left.
"""

import os
import time
from datetime import timedelta

from common import SAVE_EVERY_S, Pace, load, log, loss_of, make_model, save
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo


def main() -> None:
    log(event="start")
    model, inner = make_model()

    def state_dict() -> dict:
        return {"model": model.state_dict(), "optimizer": inner.state_dict()}

    def load_state_dict(state: dict) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    node = int(os.environ["GOODPUT_NODE"])
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=10)),
        min_replica_size=1,
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        replica_id=f"node_{node}",
        timeout=timedelta(seconds=10),
        init_sync=False,  # every replica begins with the same weights
    )
    if state := load():
        load_state_dict(state)
        manager.load_state_dict(state["torchft"])
    replica = DistributedDataParallel(manager, model)
    optimizer = Optimizer(manager, inner)
    saved, pace = time.monotonic(), Pace()
    while True:
        optimizer.zero_grad()
        loss_of(replica, manager.current_step(), node).backward()
        before = manager.current_step()
        optimizer.step()
        pace.wait()
        step = manager.current_step()
        if step > before:
            log(event="step", step=step, world=manager.num_participants(), writer=f"replica {node}")
        if manager.participating_rank() == 0 and time.monotonic() - saved > SAVE_EVERY_S:
            save({**state_dict(), "torchft": manager.state_dict()})
            saved = time.monotonic()


if __name__ == "__main__":
    main()
