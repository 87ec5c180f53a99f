"""A small character-level language model, trained on cloth.txt; it survives kills and resizing.

    ripstop run --standalone --nproc-per-node=2 --max-restarts=3 examples/language_model.py --checkpoint /tmp/lm.pt

In addition to ddp_resume.py it shows how to handle data.  Progress is counted in samples over all workers, not in
steps: after a restart, also with another number of workers, every sample of an epoch is still used once.
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
SPAN = 64  # letters of context
SAMPLES = (len(DATA) - 1) // SPAN - 1  # in an epoch; each epoch starts at another offset
BATCH = 4  # samples per worker and step


class Model(nn.Module):
    """A transformer with two layers that predicts the next letter."""

    mask: torch.Tensor

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.letters = nn.Embedding(len(LETTERS), width)
        self.positions = nn.Embedding(SPAN, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(width, len(LETTERS))
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(SPAN), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size = x.shape[1]
        hidden = self.letters(x) + self.positions.weight[:size]
        logits: torch.Tensor = self.out(self.layers(hidden, mask=self.mask[:size, :size], is_causal=True))
        return logits


def main() -> None:
    args = arguments()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    print(f"worker {rank} is process {os.getpid()}\n", end="", flush=True)  # one write, so that lines do not mix
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    seen = resume(args.checkpoint, model, optimizer)
    if rank == 0:
        print(f"training from sample {seen}, {dist.get_world_size()} workers", flush=True)
    train(args, model, optimizer, seen)
    if rank == 0:
        print(f"finished: loss {loss_on_text(model):.3f}\n{generate(model, 'A tear ')}", flush=True)
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
    """The next `BATCH` samples of the endless shuffled sequence: inputs and targets."""
    starts = []
    for number in range(first, first + BATCH):
        epoch, index = divmod(number, SAMPLES)
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(epoch))  # the same on every worker
        starts.append(int(order[index]) * SPAN + epoch * 23 % SPAN)
    return torch.stack([DATA[s : s + SPAN] for s in starts]), torch.stack([DATA[s + 1 : s + 1 + SPAN] for s in starts])


def save(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, seen: int) -> None:
    new = path.with_suffix(".new")  # a kill during the write leaves the old one
    torch.save({"seen": seen, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, new)
    new.replace(path)


def resume(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the checkpoint if there is one; return its number of samples."""
    if not path.exists():
        return 0
    state = torch.load(path)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["seen"])


@torch.no_grad()
def loss_on_text(model: nn.Module) -> float:
    inputs, targets = DATA[: SAMPLES * SPAN].view(-1, SPAN), DATA[1 : SAMPLES * SPAN + 1].view(-1, SPAN)
    return nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).item()


@torch.no_grad()
def generate(model: nn.Module, prompt: str, length: int = 120) -> str:
    chosen = [LETTERS.index(letter) for letter in prompt]
    for _ in range(length):
        probabilities = model(torch.tensor([chosen[-SPAN:]]))[0, -1].softmax(dim=0)
        chosen.append(int(torch.multinomial(probabilities, 1)))
    return "".join(LETTERS[index] for index in chosen)


if __name__ == "__main__":
    main()
