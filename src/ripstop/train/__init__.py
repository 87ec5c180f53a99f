"""For training scripts: state that outlives a worker, data seen exactly once, and progress reports.

from ripstop import train

state = train.State(model=model, optimizer=optimizer, sampler=sampler, step=0)
state.restore()
for batch in sampler.batches(loader):
    ...
    state.step += 1
    state.commit()
    train.heartbeat(state.step)

Reports need no torch.  Nothing here needs a ripstop job: without one, nothing is reported or kept.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ripstop.train.reports import checkpoint_saved, heartbeat

if TYPE_CHECKING:
    from ripstop.train.checkpointer import Checkpointer
    from ripstop.train.data import Sampler, Stream
    from ripstop.train.elastic_session import elastic
    from ripstop.train.state import State

__all__ = ["Checkpointer", "Sampler", "State", "Stream", "checkpoint_saved", "elastic", "heartbeat"]

_MODULES = {  # imported when they are first used: they need torch
    "Checkpointer": "checkpointer",
    "Sampler": "data",
    "State": "state",
    "Stream": "data",
    "elastic": "elastic_session",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
