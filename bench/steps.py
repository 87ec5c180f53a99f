"""A gloo training loop that says how long its steps took; with $HEARTBEAT it reports every one of them.

Each step is some arithmetic and an all_reduce.  Rank 0 writes the times of all but the first fifth of them to $OUT.
"""

import json
import os
import time

import torch
import torch.distributed as dist


def main() -> None:
    steps = int(os.environ["STEPS"])
    heartbeat = None
    if os.environ.get("HEARTBEAT"):
        from ripstop.train import heartbeat
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    a = torch.rand(320, 320)
    gradient = torch.ones(250_000)
    times = []
    for step in range(steps):
        began = time.perf_counter()
        for _ in range(4):
            a = torch.tanh(a @ a)
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()
        if heartbeat is not None:
            heartbeat(step)
        times.append(time.perf_counter() - began)
    dist.barrier()
    if dist.get_rank() == 0:
        with open(os.environ["OUT"], "w") as file:
            json.dump({"step_s": times[steps // 5 :]}, file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
