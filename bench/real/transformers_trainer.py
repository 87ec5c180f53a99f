"""A small GPT-2 with random weights, trained by transformers' Trainer."""

import tempfile

import torch
from report import say
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

say("imported")


class RandomTokens(torch.utils.data.Dataset):
    def __len__(self):
        return 100_000

    def __getitem__(self, index):
        tokens = torch.randint(0, 128, (32,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


class Report(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        say("step")


config = GPT2Config(vocab_size=128, n_positions=32, n_embd=32, n_layer=2, n_head=2)
with tempfile.TemporaryDirectory() as directory:
    arguments = TrainingArguments(
        output_dir=directory,
        max_steps=100_000,
        per_device_train_batch_size=2,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        logging_strategy="no",
    )
    Trainer(GPT2LMHeadModel(config), arguments, train_dataset=RandomTokens(), callbacks=[Report()]).train()
