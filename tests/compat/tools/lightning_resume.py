"""PyTorch Lightning: `ModelCheckpoint` and `fit(ckpt_path="last")`."""

import sys
import warnings

import pytorch_lightning as lightning
import torch
from fault import STEPS, maybe_die, say
from pytorch_lightning.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

warnings.filterwarnings("ignore")
first = None


class Line(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, index):
        global first
        first = self.trainer.global_step if first is None else first
        maybe_die(self.trainer.global_step)
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


lightning.seed_everything(0, verbose=False)
trainer = lightning.Trainer(
    accelerator="cpu", devices=2, strategy="ddp", max_steps=STEPS, logger=False, enable_progress_bar=False,
    enable_model_summary=False, default_root_dir=sys.argv[1],
    callbacks=[ModelCheckpoint(dirpath=sys.argv[1], every_n_train_steps=10, save_last=True)],
)  # fmt: skip
loader = DataLoader(TensorDataset(torch.randn(160, 4)), batch_size=8)
trainer.fit(Line(), loader, ckpt_path="last")
say(first, trainer.global_step, "pytorch-lightning")
