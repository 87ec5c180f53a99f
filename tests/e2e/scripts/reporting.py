"""Reports its steps and checkpoints, and writes a log line a step; never imports torch.

The worker of rank $SLOW takes three times as long for a step.  $SAYS is a line for its log.  When the file $WHEN
exists, the worker of rank $RAISE raises an exception with the text $SAYS, and that of rank $HANG hangs in `load_batch`.
"""

import os
import sys
import time

from ripstop.train import checkpoint_saved, heartbeat

RANK, RESTART = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
STEP_S = float(os.environ.get("STEP_S", "0.05"))
SAYS = os.environ.get("SAYS", "")

if SAYS:
    print(SAYS, file=sys.stderr, flush=True)


def train_step(step: int) -> None:
    time.sleep(STEP_S * (3 if os.environ.get("SLOW") == str(RANK) else 1))
    heartbeat(step)
    print(f"[rank {RANK}] step {step}: loss {2.5 / (1 + step / 40):.4f}", file=sys.stderr, flush=True)
    if step % 50 == 0 and RANK == 0:
        checkpoint_saved(step, f"/checkpoints/step-{step}")


def load_batch() -> None:
    while True:
        time.sleep(60)


def is_time_for(fault: str) -> bool:
    """Whether this worker has this fault now."""
    return os.environ.get(fault) == str(RANK) and RESTART == 0 and os.path.exists(os.environ["WHEN"])


for step in range(RESTART * 100, 1_000_000):
    train_step(step)
    if is_time_for("RAISE"):
        raise RuntimeError(SAYS)
    if is_time_for("HANG"):
        load_batch()
