"""A tiny language model with transformers' Trainer, its weights made up here."""

import json
import os
import sys
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=16, n_positions=16, n_embd=16, n_layer=1, n_head=2))
tokens = [{"input_ids": torch.arange(8) % 4, "labels": torch.arange(8) % 4} for _ in range(32)]
with tempfile.TemporaryDirectory() as directory:
    arguments = TrainingArguments(
        output_dir=directory, use_cpu=True, max_steps=8, per_device_train_batch_size=4, report_to=[],
        save_strategy="no", logging_strategy="no", disable_tqdm=True, learning_rate=0.01,
    )  # fmt: skip
    trainer = Trainer(model=model, args=arguments, train_dataset=tokens)
    result = trainer.train()
said = [arguments.process_index, arguments.world_size, type(trainer.model_wrapped).__name__, result.global_step]
sys.stdout.write(json.dumps([*said, "round_1" in os.environ["TORCHELASTIC_ERROR_FILE"]]) + "\n")
