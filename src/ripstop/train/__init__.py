"""Progress reports from a training script to its launcher.  Needs no torch; does nothing outside a ripstop job.

from ripstop import train

for step, batch in enumerate(batches):
    ...
    train.heartbeat(step)
"""

from ripstop.train.reports import checkpoint_saved, heartbeat

__all__ = ["checkpoint_saved", "heartbeat"]
