"""A small language model, letter by letter, on a page of text that is in this folder; it survives kills and resizing.

    ripstop run --standalone --nproc-per-node=2 --max-restarts=3 examples/language_model.py --checkpoint /tmp/lm.pt

What it shows beyond ddp_resume.py is the data.  Progress is counted in samples that all workers together have seen,
not in steps: after a restart, also one with another number of workers, every sample of an epoch is still seen once.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

TEXT = Path(__file__).with_name("cloth.txt").read_text(encoding="utf-8")
LETTERS = sorted(set(TEXT))
DATA = torch.tensor([LETTERS.index(letter) for letter in TEXT])
SPAN = 64  # letters that the model looks back
SAMPLES = (len(DATA) - 1) // SPAN - 1  # in an epoch; each epoch cuts the text elsewhere
BATCH = 4  # samples of one worker in one step


class Model(nn.Module):
    """A transformer of two layers that guesses the next letter."""

    mask: torch.Tensor

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.letters = nn.Embedding(len(LETTERS), width)
        self.places = nn.Embedding(SPAN, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(width, len(LETTERS))
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(SPAN), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size = x.shape[1]
        hidden = self.letters(x) + self.places.weight[:size]
        answer: torch.Tensor = self.out(self.layers(hidden, mask=self.mask[:size, :size], is_causal=True))
        return answer


def main() -> None:
    args = arguments()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    print(f"worker {rank} is process {os.getpid()}\n", end="", flush=True)  # one write: lines do not mix
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    seen = resume(args.checkpoint, model, optimizer)
    if rank == 0:
        print(f"training from sample {seen}, {dist.get_world_size()} workers", flush=True)
    train(args, model, optimizer, seen)
    if rank == 0:
        print(f"finished: loss {loss_on_the_text(model):.3f}\n{speak(model, 'A tear ')}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def train(args: argparse.Namespace, model: Model, optimizer: torch.optim.Optimizer, seen: int) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    replica = DistributedDataParallel(model)
    saved = seen
    while seen < args.epochs * SAMPLES:
        inputs, targets = batch(seen + rank * BATCH)
        loss = nn.functional.cross_entropy(replica(inputs).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        seen += world * BATCH
        if seen - saved >= args.save_every and rank == 0:
            save(args.checkpoint, model, optimizer, seen)
            saved = seen
            print(f"sample {seen:5d}  loss {loss.item():.3f}  saved", flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, required=True, help="the file to resume from and to write")
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--save-every", type=int, default=256, help="samples between checkpoints")
    return parser.parse_args()


def batch(first: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`BATCH` samples of the endless shuffled sequence, from this one on: what went in, and what came next."""
    starts = []
    for number in range(first, first + BATCH):
        epoch, place = divmod(number, SAMPLES)
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(epoch))  # the same on every worker
        starts.append(int(order[place]) * SPAN + epoch * 23 % SPAN)
    return torch.stack([DATA[s : s + SPAN] for s in starts]), torch.stack([DATA[s + 1 : s + 1 + SPAN] for s in starts])


def save(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, seen: int) -> None:
    new = path.with_suffix(".new")  # a kill in the middle of writing leaves the old one
    torch.save({"seen": seen, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, new)
    new.replace(path)


def resume(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the checkpoint where there is one; how many samples it has seen."""
    if not path.exists():
        return 0
    state = torch.load(path)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["seen"])


@torch.no_grad()
def loss_on_the_text(model: nn.Module) -> float:
    inputs, targets = DATA[: SAMPLES * SPAN].view(-1, SPAN), DATA[1 : SAMPLES * SPAN + 1].view(-1, SPAN)
    return nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).item()


@torch.no_grad()
def speak(model: nn.Module, words: str, length: int = 120) -> str:
    chosen = [LETTERS.index(letter) for letter in words]
    for _ in range(length):
        guess = model(torch.tensor([chosen[-SPAN:]]))[0, -1].softmax(dim=0)
        chosen.append(int(torch.multinomial(guess, 1)))
    return "".join(LETTERS[index] for index in chosen)


if __name__ == "__main__":
    main()
