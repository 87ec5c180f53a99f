"""`torch.numa.binding`: which processors a worker is bound to; `system/numa.py` says what the modes mean."""

from dataclasses import dataclass
from enum import Enum

from ripstop.model.config import Numa

__all__ = ["AffinityMode", "NumaOptions"]


class AffinityMode(str, Enum):  # noqa: UP042 - torch's is a str and an Enum, and prints as one
    """All are near the GPU whose number is the worker's local rank."""

    NODE = Numa.NODE.value
    SOCKET = Numa.SOCKET.value
    EXCLUSIVE = Numa.EXCLUSIVE.value
    CORE_COMPLEX = Numa.CORE_COMPLEX.value


@dataclass(frozen=True)
class NumaOptions:
    """How to bind; a launch with a binding that cannot be made is refused, unless it may fall back to none."""

    affinity_mode: AffinityMode
    should_fall_back_if_binding_fails: bool = False
