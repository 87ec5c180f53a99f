"""`train.Checkpointer`: for scripts that have checkpoints of their own.

It keeps in memory what the script would give to `torch.save`, and gives it back after a restart of the workers.  The
script saves to disk as before, less often, for the losses that memory does not survive.
"""

from collections.abc import Callable
from typing import Any

from ripstop.train.state import State


class _CheckpointerValue:
    """The only value of a Checkpointer's State."""

    def __init__(self) -> None:
        self.value: Any = None

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value() if callable(self.value) else self.value}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.value = state_dict["value"]


class Checkpointer:
    """Every rank calls `load` once, before the first `save`, and `save` after the same steps (as for `State`)."""

    def __init__(self, name: str = "checkpoint") -> None:
        self._checkpoint = _CheckpointerValue()
        self._state = State(name, checkpoint=self._checkpoint)
        self._is_loaded = False

    def load(self) -> Any:
        """The newest object that all ranks have, in memory or on disk; None if there is none: load a file then."""
        self._is_loaded = True
        self._state.restore()
        value, self._checkpoint.value = self._checkpoint.value, None
        return value

    def save(self, checkpoint: Any | Callable[[], Any], every: int | str | None = None) -> bool:
        """Keep this object, with its tensors, or what this function returns.  Returns whether this call kept it.

        `every` as in `State.commit`; a function is only called if it is time.
        """
        if not self._is_loaded:
            raise RuntimeError("save() comes after load(): call checkpointer.load() once, before the training loop")
        self._checkpoint.value = checkpoint
        try:
            return self._state.commit(every)
        finally:
            self._checkpoint.value = None
