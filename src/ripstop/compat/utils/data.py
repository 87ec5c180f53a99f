"""torch.distributed.elastic.utils.data: iterates over datasets after a restart; imports torch for its sampler."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized
from typing import Any, Generic, TypeVar

import torch
from torch.utils.data.distributed import DistributedSampler

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


class ElasticDistributedSampler(DistributedSampler[Any]):
    """A `DistributedSampler` of the items from `start_index` on, for an epoch that continues after a restart.

    The order depends only on the epoch and `start_index`, so all ranks of any world size use the same.  Items are
    repeated from the beginning, as often as needed, until every rank has the same number.
    """

    def __init__(
        self, dataset: Any, num_replicas: int | None = None, rank: int | None = None, start_index: int = 0
    ) -> None:
        super().__init__(dataset=dataset, num_replicas=num_replicas, rank=rank)
        if not isinstance(dataset, Sized):
            raise TypeError(f"a sampler needs a dataset with a length, and {type(dataset).__name__} has no __len__")
        if start_index >= len(dataset):
            raise ValueError(
                f"start_index={start_index}: the dataset has {len(dataset)} items; "
                "start below that, or at 0 of the next epoch"
            )
        self.start_index = start_index
        left = len(dataset) - start_index
        self.num_samples = -(-left // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator()
        generator.manual_seed(self.epoch)
        left = len(self.dataset) - self.start_index  # type: ignore[arg-type]
        order = (torch.randperm(left, generator=generator) + self.start_index).tolist()
        padded = order * -(-self.total_size // left)
        return iter(padded[self.rank : self.total_size : self.num_replicas])

    def __len__(self) -> int:
        return int(self.num_samples)
