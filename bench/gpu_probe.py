"""A GPU training script that says, on disk, when each phase of its start was over, and kills itself once.

Used by `gpu_recovery.py`; runs unchanged under torchrun and under ripstop.
"""

import json
import os
import signal
import time

T0 = time.time()
LOG = os.environ["PROBE_LOG"]
RESTART = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
FAULTS = int(os.environ.get("PROBE_FAULTS", "1"))


def say(event: str, at: float | None = None) -> None:
    with open(LOG, "a") as f:
        f.write(json.dumps({"t": at or time.time(), "event": event, "restart": RESTART}) + "\n")


def main() -> None:
    say("start", T0)
    import torch
    import torch.distributed as dist

    say("imported")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    model = torch.nn.Linear(1024, 1024, device=device)
    torch.cuda.synchronize()
    say("cuda")
    dist.init_process_group("nccl", device_id=device)
    dist.all_reduce(torch.ones(1, device=device))
    torch.cuda.synchronize()
    say("nccl")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(10):
        loss = model(torch.randn(64, 1024, device=device)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
        optimizer.step()
        torch.cuda.synchronize()
        if step == 0:
            say("step")
    if RESTART < FAULTS:
        say("fault")
        os.kill(os.getpid(), signal.SIGKILL)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
