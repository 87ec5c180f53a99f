"""`torch.numa.binding`: options for binding workers to processors; `system/numa_binding.py` implements the modes."""

from dataclasses import dataclass
from enum import Enum

from ripstop.model.config import Numa

__all__ = ["AffinityMode", "NumaOptions"]


class AffinityMode(str, Enum):  # noqa: UP042 - torch's is a str and an Enum, and prints as one
    """All modes bind near the GPU whose number is the worker's local rank."""

    NODE = Numa.NODE.value
    SOCKET = Numa.SOCKET.value
    EXCLUSIVE = Numa.EXCLUSIVE.value
    CORE_COMPLEX = Numa.CORE_COMPLEX.value


@dataclass(frozen=True)
class NumaOptions:
    """A binding that is impossible is an error, unless it may fall back to no binding."""

    affinity_mode: AffinityMode
    should_fall_back_if_binding_fails: bool = False
