"""Samples of committed steps against a plain model, under random kills, resizes and prefetching."""

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, get_worker_info

from ripstop import train


class Prefetching:
    """A loader that is some batches ahead of its reader, as a DataLoader with worker processes is."""

    def __init__(self, batches: Iterable, ahead: int) -> None:
        self.batches, self.ahead = batches, ahead

    def __iter__(self) -> Iterator:
        source = iter(self.batches)
        queue = deque(islice(source, self.ahead))
        for batch in source:
            queue.append(batch)
            yield queue.popleft()
        yield from queue


class Counter(IterableDataset):
    """The items of an epoch: epoch * 1000 + number."""

    def __init__(self, length: int) -> None:
        self.length, self.epoch = length, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        assert get_worker_info() is None  # data sets split themselves between the processes that they know of
        yield from range(self.epoch * 1000, self.epoch * 1000 + self.length)


class CounterWithState(Counter):
    """The same, with a state of its own.  It counts what it reads."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.next, self.start, self.reads = 0, 0, 0

    def __iter__(self) -> Iterator[int]:
        self.next, self.start = self.start, 0
        while self.next < self.length:
            self.next += 1
            self.reads += 1
            yield self.epoch * 1000 + self.next - 1

    def state_dict(self) -> dict:
        return {"next": self.next}

    def load_state_dict(self, state: dict) -> None:
        self.start = state["next"]


class SharedCounter(Counter):
    """Its processes share the epoch, as those of Hugging Face's data sets do."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.shared = torch.tensor(0).share_memory_()

    def set_epoch(self, epoch: int) -> None:
        self.shared.fill_(epoch)
        self.epoch = epoch


@st.composite
def runs_between_kills(draw) -> list[tuple[int, int, int, int, int]]:
    """For each: workers, size of a global batch, batches until the kill, committed ones of them, prefetched batches."""
    runs = []
    for _ in range(draw(st.integers(1, 6))):
        world = draw(st.integers(1, 4))
        received = draw(st.integers(0, 12))
        runs.append(
            (world, draw(st.integers(world, 12)), received, draw(st.integers(0, received)), draw(st.integers(0, 5)))
        )
    return runs


def receive(data, loader: Iterable, most: int) -> Iterator[list[int]]:
    """At most so many batches, over several epochs."""
    left = most
    while left:
        for batch in data.batches(loader):
            yield [int(sample) for sample in batch]
            left -= 1
            if not left:
                return


def committed_samples(make, runs) -> list[int]:
    """The samples of committed steps, in the order of steps, over kills and resizes."""
    samples: list[int] = []
    saved = None
    for world, size, received, committed, ahead in runs:
        ranks = []
        for rank in range(world):
            data, loader = make(size, rank, world, ahead)
            if saved is not None:
                data.load_state_dict(saved)
            steps = [(data.state_dict(), [])]
            steps += [(data.state_dict(), batch) for batch in receive(data, loader, received)]
            ranks.append(steps)
        assert all(ranks[0][committed][0] == steps[committed][0] for steps in ranks), (
            "ranks disagree about the position"
        )
        for step in range(1, committed + 1):
            parts = [steps[step][1] for steps in ranks]
            assert all(parts)  # every rank has a part of every batch
            samples += [parts[number % world][number // world] for number in range(sum(map(len, parts)))]
        saved = ranks[0][committed][0]
    return samples


@given(st.integers(1, 30), st.booleans(), runs_between_kills())
def test_committed_samples_are_those_of_an_uninterrupted_run(length, shuffle, runs):
    def make(size, rank, world, ahead):
        sampler = train.Sampler(range(length), size, seed=7, shuffle=shuffle, rank=rank, num_replicas=world)
        return sampler, Prefetching(sampler, ahead)

    samples = committed_samples(make, runs)
    alone = train.Sampler(range(length), 1, seed=7, shuffle=shuffle, rank=0, num_replicas=1)
    assert samples == [sample for [sample] in receive(alone, alone, len(samples))]
    for epoch in range(len(samples) // length):
        assert sorted(samples[epoch * length : (epoch + 1) * length]) == list(range(length))


@given(st.integers(12, 30), runs_between_kills())
def test_with_drop_last_an_epoch_lacks_at_most_the_rest_of_a_batch(length, runs):
    def make(size, rank, world, ahead):
        sampler = train.Sampler(range(length), size, shuffle=False, drop_last=True, rank=rank, num_replicas=world)
        return sampler, Prefetching(sampler, ahead)

    samples = committed_samples(make, runs)
    for before, after in pairwise([-1, *samples]):
        assert after == before + 1 or (after == 0 and before >= length - 12)


@pytest.mark.parametrize("dataset", [Counter, CounterWithState])
@given(length=st.integers(1, 30), runs=runs_between_kills())
def test_a_stream_gives_each_item_of_committed_steps_once(dataset, length, runs):
    def make(size, rank, world, ahead):
        stream = train.Stream(dataset(length), size, collate_fn=list, rank=rank, num_replicas=world)
        return stream, Prefetching(DataLoader(stream, batch_size=None), ahead)

    samples = committed_samples(make, runs)
    assert samples == [number // length * 1000 + number % length for number in range(len(samples))]


def test_the_order_is_that_of_torchs_distributed_sampler():
    for seed in (1, 2):
        reference = DistributedSampler(range(60), num_replicas=3, rank=1, seed=seed)
        sampler = train.Sampler(range(60), 6, seed=seed, rank=1, num_replicas=3)
        for epoch in range(3):
            reference.set_epoch(epoch)
            assert sampler.epoch == epoch
            assert [sample for batch in sampler.batches(sampler) for sample in batch] == list(reference)


@pytest.mark.parametrize("persistent", [False, True])
def test_batches_that_worker_processes_prefetched_are_given_again(persistent):
    data = torch.arange(40)
    sampler = train.Sampler(data, 4)
    loader = DataLoader(data, batch_sampler=sampler, num_workers=2, prefetch_factor=3, persistent_workers=persistent)
    samples = [
        sample
        for received in (2, 3, 5)  # the loop ends and begins again in the middle of the epoch
        for batch in receive(sampler, loader, received)
        for sample in batch
    ]
    assert sorted(samples) == list(range(40))


def test_processes_of_a_loader_give_a_stream_in_order():
    for dataset in (Counter(10), CounterWithState(10)):
        stream = train.Stream(dataset, 4)
        loader = DataLoader(stream, batch_size=None, num_workers=2)
        assert list(receive(stream, loader, 2)) == [[0, 1, 2, 3], [4, 5, 6, 7]]
        assert list(receive(stream, loader, 2)) == [[8, 9, 1000, 1001], [1002, 1003, 1004, 1005]]
        assert stream.epoch == 1


def test_a_process_of_a_loader_does_not_change_the_epoch_of_another():
    stream = train.Stream(SharedCounter(10), 4)
    loader = DataLoader(stream, batch_size=None, num_workers=1)
    assert list(receive(stream, loader, 3))[-1] == [8, 9, 1000, 1001]
    assert stream.dataset.shared == 0


def test_a_stream_with_a_state_does_not_read_again_what_was_received():
    before = train.Stream(CounterWithState(100), 10)
    assert len(list(receive(before, DataLoader(before, batch_size=None), 8))) == 8
    dataset = CounterWithState(100)
    after = train.Stream(dataset, 10)
    after.load_state_dict(before.state_dict())
    assert list(receive(after, DataLoader(after, batch_size=None), 1)) == [list(range(80, 90))]
    assert dataset.reads == 11  # one ahead, to know the epoch's end


def test_a_single_pass_over_a_generator_ends_or_says_what_to_do():
    whole = train.Stream((n for n in range(4)), 2)
    assert len(list(whole.batches(DataLoader(whole, batch_size=None)))) == 2
    rest = train.Stream((n for n in range(5)), 2)
    with pytest.raises(RuntimeError, match="drop_last=True"):
        list(rest.batches(DataLoader(rest, batch_size=None)))
    dropped = train.Stream((n for n in range(5)), 2, drop_last=True)
    assert len(list(dropped.batches(DataLoader(dropped, batch_size=None)))) == 2


class TestMisuse:
    def test_a_loop_that_nothing_counts_is_an_error_at_the_commit(self):
        sampler = train.Sampler(range(10), 2)
        sampler.state_dict()
        next(iter(DataLoader(range(10), batch_sampler=sampler)))
        with pytest.raises(RuntimeError, match=r"for batch in sampler.batches\(loader\)"):
            sampler.state_dict()

    def test_a_loader_without_the_sampler_is_an_error(self):
        sampler = train.Sampler(range(10), 2)
        with pytest.raises(RuntimeError, match="batch_sampler=sampler"):
            next(iter(sampler.batches(DataLoader(range(10), batch_size=2))))

    def test_a_loop_does_not_go_on_after_a_restore(self):
        sampler = train.Sampler(range(10), 2)
        loop = iter(sampler.batches(sampler))
        next(loop)
        sampler.load_state_dict(sampler.state_dict())
        with pytest.raises(RuntimeError, match="begin a new loop"):
            next(loop)

    def test_the_position_of_another_data_set_is_rejected(self):
        saved = train.Sampler(range(10), 2).state_dict()
        with pytest.raises(ValueError, match=r"'length': 10.*'length': 11"):
            train.Sampler(range(11), 2).load_state_dict(saved)

    def test_a_batch_needs_a_sample_for_every_worker(self):
        sampler = train.Sampler(range(10), 2, rank=0, num_replicas=3)
        with pytest.raises(ValueError, match=r"below the number of workers \(3\)"):
            next(iter(sampler))

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"global_batch_size": 0}, "at least 1"),
            ({"global_batch_size": 2, "rank": 1}, "both or neither"),
            ({"global_batch_size": 2, "rank": 2, "num_replicas": 2}, "from 0 to 1"),
            ({"global_batch_size": 11, "drop_last": True}, "too few"),
        ],
    )
    def test_impossible_arguments_are_rejected(self, arguments, message):
        with pytest.raises(ValueError, match=message):
            train.Sampler(range(10), **arguments)

    def test_a_stream_outside_its_loop_is_an_error(self):
        stream = train.Stream(Counter(10), 2)
        with pytest.raises(RuntimeError, match=r"for batch in stream.batches\(loader\)"):
            next(iter(DataLoader(stream, batch_size=None)))
        with pytest.raises(TypeError, match="batch_size=None"):
            next(iter(stream.batches([1, 2])))
        with pytest.raises(ValueError, match="persistent_workers"):
            next(iter(stream.batches(DataLoader(stream, batch_size=None, num_workers=1, persistent_workers=True))))
