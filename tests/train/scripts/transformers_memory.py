"""A training with transformers' Trainer on two ranks whose second rank is killed once, after the step $KILL_AT."""

import json
import os
import signal
import sys
import tempfile
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from ripstop.train.transformers import MemoryCheckpoint


class Kill(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        marker = Path(os.environ["MARKER"])
        if args.process_index == 1 and state.global_step == int(os.environ["KILL_AT"]) and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)


torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=16, n_positions=16, n_embd=16, n_layer=1, n_head=2))
tokens = [{"input_ids": (torch.arange(8) + n) % 16, "labels": (torch.arange(8) + n) % 16} for n in range(48)]
memory = MemoryCheckpoint()
with tempfile.TemporaryDirectory() as directory:
    arguments = TrainingArguments(
        output_dir=directory, use_cpu=True, num_train_epochs=2, per_device_train_batch_size=4, report_to=[],
        save_strategy="no", logging_strategy="no", disable_tqdm=True, learning_rate=0.01,
    )  # fmt: skip
    trainer = Trainer(model=model, args=arguments, train_dataset=tokens, callbacks=[memory, Kill()])
    checkpoint = memory.checkpoint()
    started = json.loads(Path(checkpoint, "trainer_state.json").read_text())["global_step"] if checkpoint else 0
    result = trainer.train(resume_from_checkpoint=checkpoint)
weights = [parameter.sum().item().hex() for parameter in model.parameters()]
sys.stdout.write(json.dumps({"started": started, "ended": result.global_step, "weights": weights}) + "\n")
