"""A worker's NUMA binding from `NumaOptions`: the parent decides (`system/numa_binding.py`), the worker applies it.

Only the options' attributes are used, so torch's class works as well as ripstop's.
"""

import logging
import os
from collections.abc import Callable
from typing import Any

from msgspec import Struct

from ripstop.model.config import Binding, Numa
from ripstop.model.errors import RipstopError
from ripstop.system import linux

_MPOL_PREFERRED = 1
log = logging.getLogger(__name__)


class Bind(Struct, frozen=True):
    """Applies a binding when the worker calls it."""

    binding: Binding
    policy_call: int | None

    def __call__(self) -> None:
        import ctypes

        os.sched_setaffinity(0, self.binding.cpus)
        if self.binding.memory is None or self.policy_call is None:
            return
        node, long = self.binding.memory, ctypes.c_long
        mask = (ctypes.c_uint64 * (node // 64 + 1))()
        mask[node // 64] = 1 << node % 64
        ctypes.CDLL(None).syscall(long(self.policy_call), long(_MPOL_PREFERRED), mask, long(len(mask) * 64 + 1))


def multiprocessing_numa_binding(numa_options: Any, local_rank: int) -> Callable[[], None] | None:
    """A function that binds this worker; None for no binding, or if it is impossible and a fallback is allowed."""
    if numa_options is None:
        return None
    from ripstop.system.numa_binding import bindings
    from ripstop.system.numa_topology import gpu_numa_nodes, read_topology

    mode = Numa(getattr(numa_options.affinity_mode, "value", numa_options.affinity_mode))
    try:
        gpus = gpu_numa_nodes(os.environ).nodes
        binding = bindings("numa_options", mode, read_topology(), gpus, local_rank + 1)[local_rank]
    except RipstopError as error:
        if not numa_options.should_fall_back_if_binding_fails:
            raise
        log.warning("worker %s is not bound: %s", local_rank, error)
        return None
    return Bind(binding, linux.memory_policy_syscall() if binding.memory is not None else None)
