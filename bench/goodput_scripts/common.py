"""What the scripts of goodput.py share: the model, the pace of its steps, ordinary checkpoints, and a log of steps."""

import json
import os
import time

import torch

STEP_S = float(os.environ.get("GOODPUT_STEP_S", "0.03"))
SAVE_EVERY_S = float(os.environ.get("GOODPUT_SAVE_EVERY_S", "5"))
CHECKPOINT = os.environ["GOODPUT_DIR"] + "/checkpoint.pt"
_log = open(f"{os.environ['GOODPUT_DIR']}/{os.environ['GOODPUT_NODE']}-{os.getpid()}.jsonl", "w", buffering=1)


def log(**fields: object) -> None:
    _log.write(
        json.dumps({"t": time.time(), "pid": os.getpid(), "node": int(os.environ["GOODPUT_NODE"]), **fields}) + "\n"
    )


def make_model() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """1.1 million parameters; with the optimizer 9 MB of state."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(512, 1024), torch.nn.Tanh(), torch.nn.Linear(1024, 512))
    return model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)


def loss_of(model: torch.nn.Module, step: int, rank: int) -> torch.Tensor:
    batch = torch.randn(8, 512, generator=torch.Generator().manual_seed(step * 1000 + rank))
    return model(batch).square().mean()


class Pace:
    """Makes every step last as long as on an accelerator that takes STEP_S for it: the processor's work is within."""

    def __init__(self) -> None:
        self.began = time.monotonic()

    def wait(self) -> None:
        time.sleep(max(0.0, self.began + STEP_S - time.monotonic()))
        self.began = time.monotonic()


def save(state: dict) -> None:
    torch.save(state, f"{CHECKPOINT}.{os.getpid()}")
    os.replace(f"{CHECKPOINT}.{os.getpid()}", CHECKPOINT)


def load() -> dict | None:
    return torch.load(CHECKPOINT) if os.path.exists(CHECKPOINT) else None
