"""torch.distributed.elastic.utils.data: `CyclingIterator`, and `ElasticDistributedSampler`, which imports torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from ripstop.compat.utils.sampler import ElasticDistributedSampler

__all__ = ["CyclingIterator", "ElasticDistributedSampler"]

T = TypeVar("T")


class CyclingIterator(Generic[T]):
    """The items of `generator_fn(epoch)` for each epoch from `start_epoch` up to `n`, one after the other.

    An epoch without items is skipped; the epoch `start_epoch` always runs, even if it is past `n`.
    """

    def __init__(self, n: int, generator_fn: Callable[[int], Iterator[T]], start_epoch: int = 0) -> None:
        self._n = n
        self._epoch = start_epoch
        self._generator_fn = generator_fn
        self._iter = generator_fn(start_epoch)

    def __iter__(self) -> CyclingIterator[T]:
        return self

    def __next__(self) -> T:
        while True:
            for item in self._iter:
                return item
            if self._epoch >= self._n - 1:
                raise StopIteration
            self._epoch += 1
            self._iter = self._generator_fn(self._epoch)


def __getattr__(name: str) -> object:
    if name == "ElasticDistributedSampler":
        from ripstop.compat.utils.sampler import ElasticDistributedSampler

        return ElasticDistributedSampler
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
