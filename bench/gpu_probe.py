"""A GPU training script that records when each phase of its start was over, and kills itself a few times.

Used by `gpu_recovery.py`; runs unchanged under torchrun and under ripstop.  PROBE_MODEL names the model: `small` is one
linear layer; `1.3b` is a transformer of 1.3 billion parameters (random weights, bf16, AdamW) that saves a checkpoint to
PROBE_CHECKPOINT, a path on tmpfs, and loads it after a restart.
"""

import json
import os
import signal
import time
from pathlib import Path

T0 = time.time()
LOG = os.environ["PROBE_LOG"]
RESTART = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
FAULTS = int(os.environ.get("PROBE_FAULTS", "1"))
STEPS_BEFORE_FAULT = 10
# A standby takes its time to warm up.  Under every launcher the worker lives at least this long.
SECONDS_BEFORE_FAULT = float(os.environ.get("PROBE_SECONDS", "0"))

WIDTH, LAYERS, HEADS, VOCABULARY, CONTEXT = 2048, 24, 16, 32_000, 512


def record(event: str, at: float | None = None) -> None:
    with open(LOG, "a") as file:
        file.write(json.dumps({"t": at or time.time(), "event": event, "restart": RESTART}) + "\n")


record("start", T0)
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn, optim  # noqa: E402
from torch.nn import functional  # noqa: E402

record("imported")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = (t.view(batch, length, HEADS, -1).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embedding(tokens)))


def small(device: torch.device):
    model = nn.Linear(1024, 1024, device=device)
    optimizer = optim.SGD(model.parameters(), lr=0.01)
    return model, optimizer, lambda: model(torch.randn(64, 1024, device=device)).square().mean()


def large(device: torch.device):
    checkpoint = Path(os.environ["PROBE_CHECKPOINT"])
    with torch.device("meta" if checkpoint.exists() else device):
        model = Transformer().to(torch.bfloat16)
    if not checkpoint.exists():
        optimizer = optim.AdamW(model.parameters(), fused=True)
    else:
        saved = torch.load(checkpoint, map_location=device, mmap=True)
        model.load_state_dict(saved["model"], assign=True)
        optimizer = optim.AdamW(model.parameters(), fused=True)
        optimizer.load_state_dict(saved["optimizer"])

    def loss() -> torch.Tensor:
        tokens = torch.randint(VOCABULARY, (4, CONTEXT + 1), device=device)
        return functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())

    return model, optimizer, loss


def main() -> None:
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    torch.ones(1, device=device).add_(1)
    torch.cuda.synchronize()
    record("cuda")
    dist.init_process_group("nccl", device_id=device)
    dist.all_reduce(torch.ones(1, device=device))
    torch.cuda.synchronize()
    record("nccl")
    is_large = os.environ.get("PROBE_MODEL", "small") == "1.3b"
    model, optimizer, loss = (large if is_large else small)(device)
    torch.cuda.synchronize()
    record("model")
    for step in range(STEPS_BEFORE_FAULT):
        optimizer.zero_grad()
        loss().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        torch.cuda.synchronize()
        if step == 0:
            record("step")
    if is_large and not Path(os.environ["PROBE_CHECKPOINT"]).exists():
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, os.environ["PROBE_CHECKPOINT"])
    if RESTART < FAULTS:
        time.sleep(max(0.0, T0 + SECONDS_BEFORE_FAULT - time.time()))
        record("fault")
        os.kill(os.getpid(), signal.SIGKILL)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
