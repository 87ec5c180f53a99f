"""A Lightning training on two ranks whose second rank is killed once, after the step $KILL_AT."""

import json
import os
import signal
import sys
import warnings
from pathlib import Path

import pytorch_lightning as lightning
import torch
from pytorch_lightning import Callback
from torch.utils.data import DataLoader, TensorDataset

from ripstop import train
from ripstop.train.lightning import MemoryCheckpoint

warnings.filterwarnings("ignore")


class Kill(Callback):
    def on_train_batch_end(self, trainer, *_):
        marker = Path(os.environ["MARKER"])
        if trainer.global_rank == 1 and trainer.global_step == int(os.environ["KILL_AT"]) and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)


class Line(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, index):
        features, targets = batch
        return torch.nn.functional.mse_loss(self.layer(features), targets)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


lightning.seed_everything(0, verbose=False)
inputs = torch.linspace(-1, 1, 64).unsqueeze(1)
dataset = TensorDataset(inputs, 3 * inputs + 1)
sampler = train.Sampler(dataset, 8)
loader = sampler.batches(DataLoader(dataset, batch_sampler=sampler))
memory = MemoryCheckpoint()
trainer = lightning.Trainer(
    accelerator="cpu", devices=2, strategy="ddp", max_epochs=3, logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False, callbacks=[memory, Kill()],
)  # fmt: skip
model = Line()
path = memory.ckpt_path()
started = torch.load(path, weights_only=False)["global_step"] if path else 0
trainer.fit(model, loader, ckpt_path=path)
weights = [parameter.item().hex() for parameter in model.parameters()]
sys.stdout.write(json.dumps({"started": started, "ended": trainer.global_step, "weights": weights}) + "\n")
