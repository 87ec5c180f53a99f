"""Trains nothing, and quickly: every rank takes steps by itself, and tells of them as `train.py` does."""

import json
import os
import time

step = 0
while True:
    step += 1
    happening = {
        "t": time.time(),
        "event": "step",
        "step": step,
        "rank": int(os.environ["RANK"]),
        "world": int(os.environ["WORLD_SIZE"]),
        "pid": os.getpid(),
        "restart": int(os.environ["TORCHELASTIC_RESTART_COUNT"]),
    }
    with open(os.environ["TRAIN_LOG"], "a") as file:
        file.write(json.dumps(happening) + "\n")
    time.sleep(0.02)
