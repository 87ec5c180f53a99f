"""A DDP training with PyTorch Lightning, which finds its processes made already."""

import json
import os
import sys
import warnings

import pytorch_lightning as lightning
import torch
from torch.utils.data import DataLoader, TensorDataset

warnings.filterwarnings("ignore")


class Line(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, index):
        features, targets = batch
        return torch.nn.functional.mse_loss(self.layer(features), targets)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.3)


lightning.seed_everything(0, verbose=False)
inputs = torch.linspace(-1, 1, 64).unsqueeze(1)
trainer = lightning.Trainer(
    accelerator="cpu", devices=2, strategy="ddp", max_epochs=10, logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False,
)  # fmt: skip
model = Line()
trainer.fit(model, DataLoader(TensorDataset(inputs, 3 * inputs + 1), batch_size=8))
weight = model.layer.weight.item()
said = [trainer.global_rank, trainer.world_size, abs(weight - 3) < 0.5, trainer.num_devices]
sys.stdout.write(json.dumps([*said, "round_1" in os.environ["TORCHELASTIC_ERROR_FILE"]]) + "\n")
