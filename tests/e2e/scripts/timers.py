"""Rank 1 hangs in a block that torch's own timer guards; both leave another such block in time."""

import os
import time

from torch.distributed.elastic import timer

timer.configure(timer.FileTimerClient(os.environ["TORCHELASTIC_TIMER_FILE"]))
with timer.expires(after=60, scope="a quick part"):
    pass
if os.environ["RANK"] == "1":
    with timer.expires(after=0.3, scope="the part that hangs"):
        time.sleep(600)
time.sleep(600)
