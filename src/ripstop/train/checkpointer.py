"""`train.Checkpointer`: for scripts that have checkpoints of their own.

It keeps in memory what the script would give to `torch.save`, and gives it back after a restart of the workers.  The
script saves to disk as before, less often, for the losses that memory does not survive.
"""

from typing import Any

from ripstop.train.state import State


class Checkpointer:
    """Every rank calls `load` once, before the first `save`, and `save` after the same steps (as for `State`)."""

    def __init__(self, name: str = "checkpoint") -> None:
        self._state = State(name, checkpoint=None)
        self._is_loaded = False

    def load(self) -> Any:
        """What was saved last, as far as all ranks have it; None if there is nothing: load from disk then."""
        self._is_loaded = True
        self._state.restore()
        checkpoint, self._state.checkpoint = self._state.checkpoint, None
        return checkpoint

    def save(self, checkpoint: Any, every: int | str | None = None) -> bool:
        """Keep this object, with its tensors; `every` as in `State.commit`.  Returns whether this call kept it."""
        if not self._is_loaded:
            raise RuntimeError("save() comes after load(): call checkpointer.load() once, before the training loop")
        self._state.checkpoint = checkpoint
        try:
            return self._state.commit(every)
        finally:
            self._state.checkpoint = None
