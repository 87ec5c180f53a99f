"""A callback for transformers' Trainer that keeps its checkpoints in memory.

    memory = MemoryCheckpoint()
    trainer = Trainer(callbacks=[memory], …)
    trainer.train(resume_from_checkpoint=memory.checkpoint() or get_last_checkpoint(output_dir))

For models of which every rank has the whole, as with DDP; not for PEFT adapters, FSDP or DeepSpeed.
"""

import dataclasses
import json
import random
import tempfile
from pathlib import Path
from typing import Any

import numpy
import torch
from transformers import TrainerCallback

from ripstop.train.checkpointer import Checkpointer


class MemoryCheckpoint(TrainerCallback):  # type: ignore[misc]
    """Keeps a checkpoint after every optimizer step; `every` as in `State.commit`."""

    def __init__(self, every: int | str | None = None) -> None:
        self._every = every
        self._checkpointer = Checkpointer("transformers")
        self._directory: tempfile.TemporaryDirectory[str] | None = None

    def checkpoint(self) -> str | None:
        """A directory with the newest checkpoint that all ranks have, for `train`.

        Call it once, on every rank.  The files have the names of the Trainer's own.
        """
        kept = self._checkpointer.load()
        if kept is None:
            return None
        self._directory = tempfile.TemporaryDirectory(prefix="ripstop-")
        directory = Path(self._directory.name)
        torch.save(kept["model"], directory / "pytorch_model.bin")
        torch.save(kept["optimizer"], directory / "optimizer.pt")
        torch.save(kept["scheduler"], directory / "scheduler.pt")
        for name in ("rng_state.pth", f"rng_state_{kept['rank']}.pth"):
            torch.save(kept["random"], directory / name)
        (directory / "trainer_state.json").write_text(json.dumps(kept["trainer"]))
        return self._directory.name

    def on_step_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        if self._directory is not None:  # the Trainer has read the random states too
            self._directory.cleanup()
            self._directory = None
        self._checkpointer.save(lambda: _transformers_checkpoint(args.process_index, state, **parts), self._every)


def _transformers_checkpoint(
    rank: int, trainer: Any, model: Any, optimizer: Any, lr_scheduler: Any, **_: Any
) -> dict[str, Any]:
    random_states = {"python": random.getstate(), "numpy": numpy.random.get_state(), "cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        random_states["cuda"] = torch.cuda.get_rng_state()
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": lr_scheduler.state_dict(),
        "random": random_states,
        "rank": rank,
        "trainer": dataclasses.asdict(trainer),
    }
