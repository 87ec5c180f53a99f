"""For training scripts: state that outlives a worker, and progress reports.  Does nothing outside a ripstop job.

from ripstop import train

state = train.State(model=model, optimizer=optimizer, step=0)
state.restore()
while state.step < 1000:
    ...
    state.step += 1
    state.commit()
    train.heartbeat(state.step)

Only `State` needs torch.
"""

from typing import TYPE_CHECKING, Any

from ripstop.train.reports import checkpoint_saved, heartbeat

if TYPE_CHECKING:
    from ripstop.train.state import State

__all__ = ["State", "checkpoint_saved", "heartbeat"]


def __getattr__(name: str) -> Any:
    if name == "State":
        from ripstop.train.state import State

        return State
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
