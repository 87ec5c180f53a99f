"""What a standby pays for on its GPU before the fault: the CUDA context, cuBLAS, the first kernels, NCCL.

Rules
1.  Nothing a script could see stays: no process group, no current device, no cached block, no random state changed.
2.  The libraries read their variables (CUDA_*, NCCL_*, PYTORCH_*, TORCH_*) here, once for the process.  So a script
    that sets such a variable itself gets no GPU warm-up (`imports.py` finds it).
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

STEPS = 2  # the second one meets the optimizer's state


def warm_up(local_rank: int) -> int:
    """Warm this process's GPU up; return how many bytes of GPU memory that took, as far as NVML tells."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or local_rank >= torch.cuda.device_count():
        return 0
    before = used_memory(torch, local_rank)
    with torch.cuda.device(local_rank), torch.random.fork_rng(devices=[local_rank]):
        for dtype in (torch.float32, torch.bfloat16):
            _train(torch, dtype)
        if torch.distributed.is_available() and torch.distributed.is_nccl_available():
            _communicate(torch)
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    return max(0, used_memory(torch, local_rank) - before)


def _train(torch: Any, dtype: Any) -> None:
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


def _communicate(torch: Any) -> None:
    """One all_reduce in a communicator of its own, outside torch's registry of process groups."""
    group = torch.distributed.ProcessGroupNCCL(torch.distributed.HashStore(), 0, 1)
    group.allreduce([torch.ones(1, device="cuda")]).wait()
    torch.cuda.synchronize()
    group.shutdown()


def used_memory(torch: Any, local_rank: int) -> int:
    """The GPU's used memory from NVML, which needs no CUDA context; 0 if NVML does not tell."""
    import ctypes

    class MemoryInfo(ctypes.Structure):
        _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]

    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        uuid = f"GPU-{torch.cuda.get_device_properties(local_rank).uuid}".encode()
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
