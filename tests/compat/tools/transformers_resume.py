"""transformers' Trainer: checkpoints on disk and `resume_from_checkpoint`."""

import sys

import torch
from fault import STEPS, maybe_die, say
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

first = 0


class Tokens(torch.utils.data.Dataset):
    def __len__(self):
        return 4096

    def __getitem__(self, index):
        tokens = torch.randint(0, 64, (8,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


class Fault(TrainerCallback):
    def on_train_begin(self, args, state, control, **kwargs):
        global first
        first = state.global_step

    def on_step_begin(self, args, state, control, **kwargs):
        maybe_die(state.global_step)


config = GPT2Config(vocab_size=64, n_positions=8, n_embd=16, n_layer=1, n_head=2)
arguments = TrainingArguments(
    output_dir=sys.argv[1], max_steps=STEPS, per_device_train_batch_size=2, use_cpu=True, report_to=[],
    save_steps=10, disable_tqdm=True, logging_strategy="no",
)  # fmt: skip
trainer = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=Tokens(), callbacks=[Fault()])
trainer.train(resume_from_checkpoint=get_last_checkpoint(sys.argv[1]))
say(first, trainer.state.global_step, "transformers")
torch.distributed.destroy_process_group()
