"""Workers that stop making progress: $HANG="kind:rank", in the first round only.

Kinds: `sleep` in a function of its own, `other` in another collective than the others, `gpu` in a collective that the
GPU does not come to, `exit` in an exit handler; `beat` is no hang: all go on until they are stopped.  With $GLOO or
$NCCL they reduce in every step; with $BEAT they report every step.
"""

import atexit
import json
import os
import time
from importlib import import_module

RANK, RESTART = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
KIND, _, WHO = os.environ.get("HANG", "").partition(":")
MINE = WHO == str(RANK) and RESTART == 0

BACKEND = next((name.lower() for name in ("GLOO", "NCCL") if os.environ.get(name)), "")
DEVICE = "cuda" if BACKEND == "nccl" else "cpu"

if BACKEND:  # by name, so that it is not preloaded for those that do without
    torch, dist = import_module("torch"), import_module("torch.distributed")
    dist.init_process_group(BACKEND)


def say(event: str) -> None:
    happening = {"t": time.time(), "event": event, "rank": RANK, "pid": os.getpid(), "restart": RESTART}
    with open(os.environ["TRAIN_LOG"], "a") as f:
        f.write(json.dumps(happening) + "\n")


def load_batch() -> None:
    time.sleep(10_000)


def forget_to_end() -> None:
    time.sleep(10_000)


def step(number: int) -> None:
    if MINE and KIND == "sleep" and number == 3:
        load_batch()
    if MINE and KIND == "other" and number == 3:
        dist.broadcast(torch.ones(4), 0)
    if MINE and KIND == "gpu" and number == 3:
        torch.cuda._sleep(10**12)  # clock cycles: some minutes
    if BACKEND:
        dist.all_reduce(torch.ones(4, device=DEVICE))
        if DEVICE == "cuda":
            torch.cuda.synchronize()
    if os.environ.get("BEAT"):
        from ripstop import train

        train.heartbeat(number)


for number in range(5):
    step(number)
say("steps")
while KIND == "beat" and RESTART == 0:  # until somebody stops it
    step(number)
    time.sleep(0.01)
if MINE and KIND == "exit":
    atexit.register(forget_to_end)
say("done")
