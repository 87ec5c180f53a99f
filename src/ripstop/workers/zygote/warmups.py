"""What a standby does before it waits: the first uses of torch and of the GPU, which a worker need not pay for then.

A warm-up must leave nothing that the script could notice but time saved: no process group, no memory in use, no current
device.  `standby_process.py` undoes what it can, and discards the process if it cannot.  This module is imported in
every worker, so it imports next to nothing.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

STEPS = 2  # the second one meets the optimizer's state


def warm_up(function: str, local_rank: int, *, with_gpu: bool = True) -> int:
    """Run the built-in warm-up, then the user's `package.module:function`, if any; return the bytes of GPU memory."""
    torch = sys.modules.get("torch")
    gpu_memory = 0
    if torch is not None:
        cpu_warm_up(torch)
        if with_gpu:
            gpu_memory = gpu_warm_up(torch, warm_up_device())
    if function:
        module, _, name = function.partition(":")
        __import__(module)
        getattr(sys.modules[module], name)(local_rank)
    return gpu_memory


def cpu_warm_up(torch: Any) -> None:
    """One tiny training step: it saves a worker a few milliseconds.  A gloo group would look up host names."""
    model = torch.nn.Linear(64, 64)
    model(torch.ones(32, 64)).relu().sum().backward()
    if "torch._dynamo" in sys.modules:  # optimizers import it
        torch.optim.AdamW(model.parameters()).step()


def warm_up_device() -> int:
    """The index of this worker's GPU among those that it sees; with `--virtual-local-rank` it sees one."""
    return int(os.environ["LOCAL_RANK"])


def visible_warm_up_device(torch: Any) -> int:
    """The index of this worker's GPU; the current one, if the script itself has made fewer GPUs visible."""
    device = warm_up_device()
    return device if device < torch.cuda.device_count() else int(torch.cuda.current_device())


def gpu_warm_up(torch: Any, device: int) -> int:
    """Initialise this worker's GPU; return the bytes of its memory that this process holds, as far as NVML tells."""
    if not torch.cuda.is_available() or device >= torch.cuda.device_count():
        return 0
    before = used_memory_around_warm_up(torch, device)
    with torch.cuda.device(device), torch.random.fork_rng(devices=[device]):
        for dtype in (torch.float32, torch.bfloat16):
            _warm_up_training(torch, dtype)
        if torch.distributed.is_available() and torch.distributed.is_nccl_available():
            _warm_up_nccl(torch)
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    return max(0, used_memory_around_warm_up(torch, device) - before)


def _warm_up_training(torch: Any, dtype: Any) -> None:
    """A few steps of a tiny model."""
    with torch.device("cuda"):
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.LayerNorm(64), torch.nn.Linear(64, 64))
    optimizer = torch.optim.AdamW(model.parameters())
    inputs = torch.full((16, 64), 0.5, device="cuda")
    for _ in range(STEPS):
        with torch.autocast("cuda", dtype, enabled=dtype is not torch.float32):
            loss = torch.nn.functional.gelu(model(inputs)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    loss.item()


def _warm_up_nccl(torch: Any) -> None:
    """One all_reduce in a communicator of its own, outside torch's registry of process groups."""
    group = torch.distributed.ProcessGroupNCCL(torch.distributed.HashStore(), 0, 1)
    group.allreduce([torch.ones(1, device="cuda")]).wait()
    torch.cuda.synchronize()
    group.shutdown()


def used_memory_around_warm_up(torch: Any, device: int) -> int:
    """The GPU's used memory from NVML, which needs no CUDA context; 0 if NVML does not tell."""
    import ctypes

    class MemoryInfo(ctypes.Structure):
        _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]

    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}".encode()
    except (OSError, AttributeError):
        return 0
    handle, info = ctypes.c_void_p(), MemoryInfo()
    if nvml.nvmlInit_v2():
        return 0
    try:
        failed = nvml.nvmlDeviceGetHandleByUUID(uuid, ctypes.byref(handle))
        failed = failed or nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(info))
        return 0 if failed else info.used
    finally:
        nvml.nvmlShutdown()


def check_warmed_gpu() -> None:
    """Raise an error if the GPU that was warmed up is lost."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize(visible_warm_up_device(torch))
