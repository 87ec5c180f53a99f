"""What a training script may tell its launcher.  Needs no torch, and does nothing outside of a job of ours.

from ripstop import train

for step, batch in enumerate(batches):
    ...
    train.heartbeat(step)
"""

from ripstop.train.reports import checkpoint_saved, heartbeat

__all__ = ["checkpoint_saved", "heartbeat"]
