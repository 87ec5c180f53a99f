"""Rank 0 ends at once; the others end when a file says so."""

import json
import os
import time
from pathlib import Path

log = Path(os.environ["TRAIN_LOG"])
if os.environ["RANK"] == "0":
    with log.open("a") as f:
        f.write(json.dumps({"t": time.time(), "event": "early"}) + "\n")
else:
    while not log.with_name("go").exists():
        time.sleep(0.01)
