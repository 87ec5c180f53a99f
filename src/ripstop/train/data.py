"""Data seen exactly once, over kills and resizes: `Sampler` for map-style data sets, `Stream` for iterables.

Rules: (1) the order of samples depends on the seed and the epoch alone, never on the number of workers; (2) a position
counts samples that all workers together have received, so it means the same for every number of workers; (3) it counts
what the training loop has received, not what a DataLoader has prefetched; (4) every worker has the same number of
batches.  The end of an epoch therefore fills its last batch with the first samples of the next epoch.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sized
from copy import deepcopy
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

import torch
from torch.utils.data import IterableDataset, default_collate, get_worker_info


def _data_replica(rank: int | None, num_replicas: int | None) -> tuple[int, int]:
    """This worker's rank and the number of workers: as given, or of the process group, or of the environment."""
    if rank is not None and num_replicas is not None:
        return rank, num_replicas
    if torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


class Batches:
    """A loader whose batches move the position of its `Sampler` or `Stream`, also in a loop of a framework."""

    def __init__(self, source: "_DataLoop", loader: Iterable[Any]) -> None:
        self._source, self._loader = source, loader

    def __iter__(self) -> Iterator[Any]:
        return self._source._counted_data_batches(self._loader)

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]  # TypeError if it has none

    def state_dict(self) -> dict[str, Any]:
        return self._source.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._source.load_state_dict(state_dict)


class _DataLoop(ABC):
    """What `Sampler` and `Stream` share: the size of a global batch, this worker's part of it, and the loop."""

    def __init__(self, global_batch_size: int, rank: int | None, num_replicas: int | None) -> None:
        if global_batch_size < 1:
            raise ValueError(f"global_batch_size={global_batch_size}: it must be at least 1")
        if (rank is None) != (num_replicas is None):
            raise ValueError(f"rank={rank}, num_replicas={num_replicas}: give both or neither")
        if rank is not None and num_replicas is not None and not 0 <= rank < num_replicas:
            raise ValueError(f"rank={rank}: with num_replicas={num_replicas} it must be from 0 to {num_replicas - 1}")
        self.global_batch_size = global_batch_size
        self._given = rank, num_replicas
        self._iteration = 0  # how often the position was set or a loop began; an older loop must not move it

    def batches(self, loader: Iterable[Any]) -> Batches:
        """What the training loop iterates over: the batches of a loader of this object, each of which it counts."""
        return Batches(self, loader)

    @abstractmethod
    def _counted_data_batches(self, loader: Iterable[Any]) -> Iterator[Any]: ...

    @abstractmethod
    def state_dict(self) -> dict[str, Any]: ...

    @abstractmethod
    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...

    def _share(self) -> tuple[int, int]:
        rank, world = _data_replica(*self._given)
        if self.global_batch_size < world:
            raise ValueError(
                f"global_batch_size={self.global_batch_size} is below the number of workers ({world}): "
                f"every worker needs a sample of every batch; use {world} or more"
            )
        return rank, world

    def _begin_loop(self) -> int:
        self._iteration += 1
        return self._iteration

    def _check_loop(self, iteration: int) -> None:
        if iteration != self._iteration:
            raise RuntimeError(
                "this loop over batches() is out of date: meanwhile the position was restored, or another loop began; "
                "begin a new loop"
            )


class Sampler(_DataLoop):
    """A batch sampler for `DataLoader(dataset, batch_sampler=sampler)`, with a position that a `State` can save.

        for batch in sampler.batches(loader):  # the rest of the current epoch
            ...

    Each batch has `global_batch_size` samples over all workers.  `drop_last` skips the incomplete batch at the end of
    an epoch instead of filling it from the next one.  Workers that need the same samples (tensor parallelism) get the
    same `rank` of `num_replicas`; by default every worker is one replica.
    """

    def __init__(
        self,
        dataset: Sized,
        global_batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        rank: int | None = None,
        num_replicas: int | None = None,
    ) -> None:
        super().__init__(global_batch_size, rank, num_replicas)
        self.length = len(dataset)
        if self.length < (global_batch_size if drop_last else 1):
            raise ValueError(f"the data set has {self.length} samples: too few for one batch of {global_batch_size}")
        self.seed, self.shuffle, self.drop_last = seed, shuffle, drop_last
        self.seen = 0  # samples of all epochs that all workers together have received
        self._drawn = 0  # the same for what the DataLoader has drawn
        self._is_counted = False  # whether batches() was ever used
        self._orders: dict[int, torch.Tensor] = {}

    @property
    def epoch(self) -> int:
        """The epoch of the next batch, from 0."""
        return self._skip_tail(self.seen) // self.length

    def __len__(self) -> int:
        """The batches of an epoch.  An epoch that gave samples to the one before can have one less."""
        whole, rest = divmod(self.length, self.global_batch_size)
        return whole + (rest > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[list[int]]:
        """The numbers of this worker's samples, batch by batch, from the position to the end of the epoch."""
        rank, world = self._share()
        start = self._skip_tail(self.seen)
        end = (start // self.length + 1) * self.length
        while start < end:
            stop = start + self.global_batch_size
            self._drawn = start = self._skip_tail(stop)
            yield self._data_sample_numbers(stop - self.global_batch_size + rank, stop, world)

    def _counted_data_batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        self._is_counted = True
        iteration = self._begin_loop()
        for batch in loader:
            self._check_loop(iteration)
            seen = self._skip_tail(self._skip_tail(self.seen) + self.global_batch_size)
            if seen > self._drawn:
                raise RuntimeError(
                    "the loader gave a batch that it did not draw from this sampler; "
                    "write DataLoader(dataset, batch_sampler=sampler)"
                )
            self.seen = seen
            yield batch

    def state_dict(self) -> dict[str, Any]:
        if self._drawn and not self._is_counted:
            raise RuntimeError(
                "the position is unknown: a loader draws from this sampler, but nothing counts the loop's batches; "
                "write `for batch in sampler.batches(loader)`"
            )
        return {"seen": self.seen, "length": self.length, "seed": self.seed, "shuffle": self.shuffle}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        ours = {"length": self.length, "seed": self.seed, "shuffle": self.shuffle}
        if other := {key: state_dict.get(key) for key in ours if state_dict.get(key) != ours[key]}:
            raise ValueError(
                f"the saved position belongs to another order of samples: it has {other}, this sampler has "
                f"{ {key: ours[key] for key in other} }; use the same data set, seed and shuffle"
            )
        self._begin_loop()
        self.seen, self._drawn = state_dict["seen"], 0

    def _skip_tail(self, seen: int) -> int:
        """With `drop_last`: the begin of the next epoch, if this one has no whole batch left."""
        left = self.length - seen % self.length
        return seen + left if self.drop_last and left < self.global_batch_size else seen

    def _data_sample_numbers(self, start: int, stop: int, stride: int) -> list[int]:
        samples: list[int] = []
        while start < stop:
            epoch, place = divmod(start, self.length)
            part = self._order(epoch)[place : stop - epoch * self.length : stride].tolist()
            samples += part
            start += len(part) * stride
        return samples

    def _order(self, epoch: int) -> torch.Tensor:
        if not self.shuffle:
            epoch = 0
        if epoch not in self._orders:
            self._orders = {old: order for old, order in self._orders.items() if old == epoch - 1}
            generator = torch.Generator().manual_seed(self.seed + epoch)  # the order of torch's DistributedSampler
            order = torch.randperm(self.length, generator=generator) if self.shuffle else torch.arange(self.length)
            self._orders[epoch] = order
        return self._orders[epoch]


@dataclass(frozen=True, slots=True)
class _Marked:
    """A batch of a `Stream`, on its way from a DataLoader's worker process, and the position after it."""

    batch: Any
    position: dict[str, Any]

    def pin_memory(self) -> "_Marked":
        from torch.utils.data._utils.pin_memory import pin_memory

        return _Marked(pin_memory(self.batch), self.position)


class Stream(_DataLoop, IterableDataset[_Marked]):
    """A position for an iterable data set: `DataLoader(stream, batch_size=None)`, with any number of worker processes.

        for batch in stream.batches(loader):  # the rest of the current epoch
            ...

    The data set must give the same items in the same order on every worker of the job; each takes its part of every
    global batch.  If it has `set_epoch`, that is called before every epoch.  If it has `state_dict` and
    `load_state_dict`, it continues from its own state; `use_dataset_state=False` is for a state that is not exact.
    Otherwise the items before the position are read and skipped.
    """

    def __init__(
        self,
        dataset: Iterable[Any],
        global_batch_size: int,
        *,
        collate_fn: Callable[[list[Any]], Any] = default_collate,
        drop_last: bool = False,
        use_dataset_state: bool = True,
        rank: int | None = None,
        num_replicas: int | None = None,
    ) -> None:
        super().__init__(global_batch_size, rank, num_replicas)
        self.dataset, self.collate_fn, self.drop_last = dataset, collate_fn, drop_last
        has_state = hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")
        self._has_state = use_dataset_state and has_state
        self._after: dict[str, Any] = {"epoch": 0, "seen": 0, "dataset": None}
        self._part: tuple[int, int] | None = None

    @property
    def epoch(self) -> int:
        """The epoch of the next batch, from 0."""
        return int(self._after["epoch"])

    def __iter__(self) -> Iterator[_Marked]:
        if self._part is None:
            raise RuntimeError("nothing counts the batches of the loop; write `for batch in stream.batches(loader)`")
        rank, world = self._part
        process = get_worker_info()
        mine, processes = (process.id, process.num_workers) if process else (0, 1)
        torch.utils.data._utils.worker._worker_info = None  # or the data set may split itself between the processes
        if process and hasattr(self.dataset, "set_epoch"):
            self.dataset = deepcopy(self.dataset)  # its epoch may be in memory that it shares with the other processes
        this_epoch, items = self.epoch, self._data_items()
        following = next(items, None)
        for number in count():  # the process of a DataLoader that gives this batch: number % processes
            is_mine, part, size, state = number % processes == mine, [], 0, None
            while size < self.global_batch_size and following is not None:
                epoch, seen, item = following
                if is_mine and size % world == rank:
                    part.append(item)
                size += 1
                if is_mine and self._has_state and size == self.global_batch_size:
                    state = deepcopy(self.dataset.state_dict())  # type: ignore[attr-defined]
                following = next(items, None)  # read ahead, because the position after an epoch is the next one's begin
            if size == 0 or (self.drop_last and (size < self.global_batch_size or epoch > this_epoch)):
                return
            if size < self.global_batch_size:
                raise RuntimeError(
                    f"the last batch has {size} items instead of {self.global_batch_size}, and a second pass over the "
                    "data set gives none; pass an iterable that can be iterated again, or drop_last=True"
                )
            if following is None or following[0] > epoch:
                epoch, seen, state = epoch + 1, 0, None
            if is_mine:
                yield _Marked(self.collate_fn(part), {"epoch": epoch, "seen": seen, "dataset": state})
            if epoch > this_epoch:
                return

    def _data_items(self) -> Iterator[tuple[int, int, Any]]:
        """The items from the position on, over the ends of epochs: epoch, number in the epoch from 1, item."""
        epoch, seen, state = self._after["epoch"], self._after["seen"], self._after["dataset"]
        while True:
            if hasattr(self.dataset, "set_epoch"):
                self.dataset.set_epoch(epoch)
            if state is not None and self._has_state:
                self.dataset.load_state_dict(deepcopy(state))  # type: ignore[attr-defined]
                items: Iterator[Any] = iter(self.dataset)
            else:
                items = islice(self.dataset, seen, None)
            for item in items:
                seen += 1
                yield epoch, seen, item
            if seen == 0:
                return
            epoch, seen, state = epoch + 1, 0, None

    def _counted_data_batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        if getattr(loader, "persistent_workers", False):
            raise ValueError("persistent_workers=True keeps an old position in the loader's processes; use False")
        self._part = self._share()
        iteration = self._begin_loop()
        epoch = self.epoch
        for marked in loader:
            self._check_loop(iteration)
            if not isinstance(marked, _Marked):
                raise TypeError(
                    f"the loader gave a {type(marked).__name__} that is no batch of this stream; "
                    "write DataLoader(stream, batch_size=None)"
                )
            self._after = marked.position
            yield marked.batch
        self._check_loop(iteration)
        if self.epoch == epoch:
            self._after = {"epoch": epoch + 1, "seen": 0, "dataset": None}

    def state_dict(self) -> dict[str, Any]:
        return dict(self._after)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._begin_loop()
        self._after = dict(state_dict)
