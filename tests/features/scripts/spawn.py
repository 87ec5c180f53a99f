"""torch.multiprocessing.spawn in a worker: the new processes have their own process group and shared memory."""

import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def child(index: int, meeting: str, shared: torch.Tensor) -> None:
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=index, world_size=2)
    total = torch.tensor([index + 1.0])
    dist.all_reduce(total)
    shared[index] = total.item()
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        shared = torch.zeros(2).share_memory_()
        mp.spawn(child, (os.path.join(os.environ["SCRATCH"], "meeting"), shared), nprocs=2)
        assert shared.tolist() == [3.0, 3.0]
    dist.barrier()
    dist.destroy_process_group()
    print("ok", flush=True)


if __name__ == "__main__":
    main()
