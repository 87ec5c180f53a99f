"""For training scripts: progress reports to the launcher, and data that is seen exactly once.

from ripstop import train

for step, batch in enumerate(batches):
    ...
    train.heartbeat(step)

Reports need no torch and do nothing outside a ripstop job.  The rest imports torch when it is first used.
"""

from typing import TYPE_CHECKING, Any

from ripstop.train.reports import checkpoint_saved, heartbeat

if TYPE_CHECKING:
    from ripstop.train.data import Sampler, Stream

__all__ = ["Sampler", "Stream", "checkpoint_saved", "heartbeat"]

_MODULES = {"Sampler": "data", "Stream": "data"}  # imported with their first use, because they import torch


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
