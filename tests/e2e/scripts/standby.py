"""Reports steps until it is stopped or $STANDBY_END is there; dies in step 3 as $FAULT="kind:rank:restart" asks."""

import json
import os
import time

from ripstop import train

RANK, RESTART = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
step = 0
while not os.path.exists(os.environ["STANDBY_END"]):
    step += 1
    train.heartbeat(step=step)
    event = {"t": time.time(), "event": "step", "step": step, "rank": RANK, "world": int(os.environ["WORLD_SIZE"])}
    event |= {"pid": os.getpid(), "restart": RESTART, "local_rank": os.environ["LOCAL_RANK"]}
    event |= {"warmed": getattr(train, "warmed", None), "gpu": os.environ.get("CUDA_VISIBLE_DEVICES")}
    with open(os.environ["TRAIN_LOG"], "a") as file:
        file.write(json.dumps(event) + "\n")
    time.sleep(0.02)
