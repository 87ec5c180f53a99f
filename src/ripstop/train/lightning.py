"""A Lightning callback that keeps the Trainer's checkpoints in memory.

    memory = MemoryCheckpoint()
    trainer = Trainer(callbacks=[memory], …)
    trainer.fit(model, ckpt_path=memory.ckpt_path() or "last")

For strategies in which every rank has the whole model, such as DDP.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from ripstop.train.checkpointer import Checkpointer

if "pytorch_lightning" in sys.modules:  # the older name of the same package, with classes of its own
    from pytorch_lightning import Callback
else:
    from lightning.pytorch import Callback


class MemoryCheckpoint(Callback):  # type: ignore[misc]
    """Keeps a checkpoint after every optimizer step; `every` as in `State.commit`."""

    def __init__(self, every: int | str | None = None) -> None:
        self._every = every
        self._checkpointer = Checkpointer("lightning")
        self._directory: tempfile.TemporaryDirectory[str] | None = None
        self._step = 0

    def ckpt_path(self) -> str | None:
        """A file with the newest checkpoint that all ranks have, for `fit`.  Call it once, on every rank."""
        checkpoint = self._checkpointer.load()
        if checkpoint is None:
            return None
        self._directory = tempfile.TemporaryDirectory(prefix="ripstop-")
        path = Path(self._directory.name, "memory.ckpt")
        torch.save(checkpoint, path)
        return str(path)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._step = trainer.global_step
        if self._directory is not None:
            self._directory.cleanup()
            self._directory = None

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step > self._step:  # not while gradients are accumulated
            self._step = trainer.global_step
            self._checkpointer.save(lambda: trainer._checkpoint_connector.dump_checkpoint(False), self._every)
