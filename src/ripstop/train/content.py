"""What is in a State: from live objects to tensors and a pickle, and back.

The pickle has everything but the bytes of tensors; in it, a tensor is the number of its entry in the layout.  Tensors
that share memory, such as tied weights, are stored once.
"""

import copy
import hashlib
import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ripstop.commit_memory import CONTENT_OFFSET
from ripstop.train import sharding
from ripstop.train.commit_buffer import CommitBuffer
from ripstop.train.digest import digest
from ripstop.train.sharding import Leaf, Part, Piece, is_dtensor, local_part_of_dtensor, part_of, sharded_leaves

RANDOM = "random states"  # a component of every commit, and each rank's own; not a valid name of a user's
ALIGNMENT_BYTES = 64
PICKLE_ROOM = 2  # times its size, so that a growing one does not need a new buffer soon
_SUPPORTED = (torch.Tensor, torch.nn.Parameter)


class Unsupported(TypeError):
    """A value that cannot be part of a State."""


class Entry(NamedTuple):
    """One tensor in a buffer.  `is_current`: it was on the GPU that its process used by default."""

    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    device: str
    is_current: bool

    @property
    def size(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class Component(NamedTuple):
    """One value of a State: its pickle, and the numbers of its tensors in the order in which the pickle has them.

    `parts` says which tensors are parts of larger ones.
    """

    pickle: bytes
    numbers: list[int]
    parts: dict[int, Part]


class Snapshot(NamedTuple):
    """A State at one moment.  The tensors are the live ones, to be copied into a buffer.

    In the buffer, tensors of a GPU come first, then from `host_offset` on those of the host, then the pickle.
    """

    tensors: list[torch.Tensor]
    layout: list[Entry]
    components: dict[str, Component]
    host_offset: int
    pickle_offset: int
    pickle: bytes

    @property
    def room(self) -> int:
        """The size of a new buffer for it."""
        return self.pickle_offset + PICKLE_ROOM * len(self.pickle)

    @property
    def is_sharded(self) -> bool:
        return any(component.parts for component in self.components.values())

    def content_fits(self, buffer: CommitBuffer) -> bool:
        return self.pickle_offset + len(self.pickle) <= buffer.size


def _aligned_content_offset(offset: int) -> int:
    return -(-offset // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class _Tensors:
    """Collects tensors, each memory once."""

    def __init__(self) -> None:
        self.found: list[torch.Tensor] = []
        self._numbers: dict[tuple[object, ...], int] = {}

    def number(self, tensor: torch.Tensor) -> int:
        key = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if not tensor.numel() or key not in self._numbers:
            self._numbers[key] = len(self.found)
            self.found.append(tensor.detach())
        return self._numbers[key]


def _content_layout(tensors: list[torch.Tensor]) -> tuple[list[Entry], int, int]:
    """The entry of each tensor, where those of the host begin, and where they end."""
    current = torch.cuda.current_device() if any(tensor.is_cuda for tensor in tensors) else None
    offset = CONTENT_OFFSET
    entries: dict[int, Entry] = {}
    for is_host in (False, True):
        host_offset = offset
        for number, tensor in enumerate(tensors):
            if (tensor.device.type == "cpu") is is_host:
                is_current = tensor.is_cuda and tensor.device.index == current
                entry = Entry(offset, tensor.dtype, tuple(tensor.shape), str(tensor.device), is_current)
                entries[number] = entry
                offset = _aligned_content_offset(offset + entry.size)
    return [entries[number] for number in range(len(tensors))], host_offset, offset


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, tensors: _Tensors) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._tensors = tensors
        self.numbers: dict[int, None] = {}  # an ordered set
        self.parts: dict[int, Part] = {}

    def persistent_id(self, value: Any) -> int | None:
        if not isinstance(value, torch.Tensor):
            return None
        part = part_of(value) if is_dtensor(value) else None
        value = local_part_of_dtensor(value)
        if type(value) not in _SUPPORTED or value.layout != torch.strided or value.is_quantized:
            kind = type(value).__name__ if type(value) not in _SUPPORTED else value.layout
            raise Unsupported(f"a State keeps dense torch.Tensors, and this has one of type {kind}; leave it out")
        number = self._tensors.number(value)
        self.numbers[number] = None
        if part is not None:
            self.parts[number] = part
        return number


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, tensor: Callable[[int], Any]) -> None:
        super().__init__(io.BytesIO(data))
        self._tensor = tensor

    def persistent_load(self, number: int) -> Any:
        return self._tensor(number)


def is_stateful(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def snapshot(values: Mapping[str, Any]) -> Snapshot:
    """The content of these values: their `state_dict`, or the values themselves.  Unsupported names the value."""
    tensors = _Tensors()
    components = {name: _content_component(name, value, tensors) for name, value in values.items()}
    layout, host_offset, end = _content_layout(tensors.found)
    data = pickle.dumps(
        (layout, components, _broadcast_content_numbers(values, tensors.found)), pickle.HIGHEST_PROTOCOL
    )
    return Snapshot(tensors.found, layout, components, host_offset, end, data)


def _content_component(name: str, value: Any, tensors: _Tensors) -> Component:
    file = io.BytesIO()
    pickler = _Pickler(file, tensors)
    try:
        pickler.dump(value.state_dict() if is_stateful(value) else value)
    except Unsupported as error:
        raise Unsupported(f"State({name}=…): {error}") from None
    except (pickle.PicklingError, AttributeError, TypeError, RecursionError) as error:
        raise Unsupported(
            f"State({name}=…) needs an object with state_dict() and load_state_dict(), or a value that pickle takes; "
            f"{type(value).__name__}: {error}"
        ) from error
    return Component(file.getvalue(), list(pickler.numbers), pickler.parts)


class StoredContent:
    """The content of a buffer."""

    def __init__(self, buffer: CommitBuffer | None, data: bytes) -> None:
        """Without a buffer, only what the pickle says."""
        self._mapped = buffer
        self._entries: list[Entry]
        self._components: dict[str, Component]
        self._unequal: set[int]
        self._entries, self._components, self._unequal = pickle.loads(data)
        self._made: dict[int, torch.Tensor] = {}  # tensors outside the buffer, which components may share

    @property
    def names(self) -> list[str]:
        return list(self._components)

    @property
    def _buffer(self) -> CommitBuffer:
        assert self._mapped is not None
        return self._mapped

    @property
    def has_gpu_tensors(self) -> bool:
        return any(entry.device.startswith("cuda") for entry in self._entries)

    def load(self, name: str, live: Any) -> Any:
        """Give a live value its stored content.  Return the value to use from now on: a new one for plain values.

        No live object keeps a tensor in the buffer, which later commits overwrite.  A module copies into its own
        tensors.  Others, such as optimizers, keep the tensors that they are given: these are their own, or new ones.
        """
        data, numbers, parts = self._components[name]
        if parts:
            return self._load_sharded(name, live)
        if isinstance(live, torch.nn.Module):
            self._load_torch_module(live, _Unpickler(data, self._in_buffer).load())
            return live
        own = _Tensors()
        _content_component(name, live, own)
        if _can_take_stored_content(own.found, [self._entries[number] for number in numbers]):
            for number, tensor in zip(numbers, own.found, strict=True):
                if number not in self._made:
                    self._made[number] = tensor.copy_(self._in_buffer(number))
        stored = _Unpickler(data, self._outside).load()
        if isinstance(live, torch.optim.Optimizer):
            _check_optimizer_content(live, stored)
        if is_stateful(live):
            live.load_state_dict(stored)
            return live
        return stored

    def _load_torch_module(self, module: torch.nn.Module, stored: dict[str, Any]) -> None:
        _check_content_dtypes(module.state_dict(), stored)
        for key in stored:
            if key.endswith("_extra_state"):  # which the module may keep as it is
                stored[key] = copy.deepcopy(stored[key])
        module.load_state_dict(stored)
        for tensor in (*module.parameters(), *module.buffers()):  # a module may override load_state_dict and assign
            if self._buffer.contains(local_part_of_dtensor(tensor)):
                tensor.data = tensor.data.clone()

    @property
    def tensor_count(self) -> int:
        return len(self._entries)

    @property
    def parts(self) -> dict[int, Part]:
        """The tensors that are parts of larger ones."""
        return {number: part for component in self._components.values() for number, part in component.parts.items()}

    def unpickle(self, name: str, tensor: Callable[[int], torch.Tensor]) -> Any:
        """A value, with these tensors by number."""
        return _Unpickler(self._components[name].pickle, tensor).load()

    def separate_tensor(self, number: int) -> torch.Tensor:
        """A tensor in the buffer whose storage is its own part of it: torch.save writes whole storages."""
        offset, dtype, shape, _, _ = entry = self._entries[number]
        if not entry.size:
            return torch.empty(shape, dtype=dtype)
        own = torch.frombuffer(self._buffer.memory(offset, offset + entry.size), dtype=torch.uint8)
        return own.view(dtype).view(shape)

    def is_same(self, number: int, other: "StoredContent") -> bool:
        """Whether a tensor has the same type, shape and bits in another buffer."""
        mine, its = self._entries[number], other._entries[number]
        if (mine.dtype, mine.shape) != (its.dtype, its.shape):
            return False
        parts = [stored._buffer.bytes[entry.offset : entry.offset + entry.size]
                 for stored, entry in ((self, mine), (other, its))]  # fmt: skip
        return torch.equal(*parts)

    def digests(self) -> dict[str, str]:
        """For each value that is not a rank's own; equal if the values are."""
        return {name: self._digest(name) for name in self._components if name != RANDOM}

    def _digest(self, name: str) -> str:
        found = self._without_tensors(name)
        for entry in self._comparable(name):
            found.update(digest(self._buffer.bytes[entry.offset : entry.offset + entry.size]).to_bytes(8))
        return found.hexdigest()

    def _without_tensors(self, name: str) -> "hashlib._Hash":
        data, numbers, parts = self._components[name]
        found = hashlib.sha256(_canonical_content_pickle(data))
        for number in numbers:
            entry, part = self._entries[number], parts.get(number)
            what = f"{part.shape} {part.layout}" if part else f"{entry.shape}"
            found.update(f"{entry.dtype} {what}".encode())
        return found

    def _comparable(self, name: str) -> list[Entry]:
        """The tensors that are equal on all ranks if the state is replicated."""
        _, numbers, parts = self._components[name]
        return [self._entries[n] for n in numbers if n not in parts and n not in self._unequal]

    def hash_portion(self, found: "hashlib._Hash", start: int, size: int) -> bool:
        """Add bytes of all tensors from `start` on, and at the start all else.  Return whether this was the last."""
        position = 0
        for name in self._components:
            if name == RANDOM:
                continue
            if not start:
                found.update(self._without_tensors(name).digest())
            for entry in self._comparable(name):
                first, last = max(start - position, 0), min(start + size - position, entry.size)
                if first < last:
                    found.update(digest(self._buffer.bytes[entry.offset + first : entry.offset + last]).to_bytes(8))
                position += entry.size
        return start + size >= position

    # parts of larger tensors

    def structure(self, name: str) -> Any:
        """The value, with leaves instead of tensors."""
        data, numbers, parts = self._components[name]
        found = _Unpickler(data, lambda number: Leaf(number, parts.get(number))).load()
        if {leaf.number for _, leaf in sharded_leaves(found, Leaf)} != set(numbers):
            raise ValueError("a sharded tensor must be in dicts, lists and tuples only")
        return found

    def pieces(self, name: str, shard: int) -> dict[tuple[str, ...], tuple[Part | None, Piece]]:
        """Where its tensors are, if this is the shard of this rank."""
        found = {}
        for path, (number, part) in sharded_leaves(self.structure(name), Leaf):
            entry = self._entries[number]
            found[path] = part, Piece(shard, entry.offset, entry.dtype, entry.shape)
        return found

    def has_sharding_of(self, values: Mapping[str, Any]) -> bool:
        """Whether the tensors of these live values are sharded as those of the commit."""
        for name, live in values.items():
            own = dict(sharded_leaves(live.state_dict() if is_stateful(live) else live, torch.Tensor))
            if name in self._components and (self._components[name].parts or any(map(is_dtensor, own.values()))):
                for path, leaf in sharded_leaves(self.structure(name), Leaf):
                    if path in own and leaf.part != (part_of(own[path]) if is_dtensor(own[path]) else None):
                        return False
        return True

    def _load_sharded(self, name: str, live: Any) -> Any:
        structure = self.structure(name)
        found = dict(sharded_leaves(structure, Leaf))

        def fill(targets: dict[tuple[str, ...], torch.Tensor]) -> None:
            for path, target in targets.items():
                sharding.copy_equally_sharded(found[path], self._in_buffer(found[path].number), target)

        return sharding.load_with_live_sharding(live, structure, self.pieces(name, 0), fill)

    def load_from_files(
        self, name: str, live: Any, tensor_names: Sequence[str], fill: Callable[[dict[str, torch.Tensor]], None]
    ) -> Any:
        """Give a live value of any sharding its content; `fill` fills tensors by name; `tensor_names` are by number."""
        structure = self.structure(name)
        names = {path: tensor_names[leaf.number] for path, leaf in sharded_leaves(structure, Leaf)}

        def fill_all(targets: dict[tuple[str, ...], torch.Tensor]) -> None:
            left = dict(targets)
            while left:  # tied tensors have one name
                paths = {names[path]: path for path in left}
                fill({tensor_name: left.pop(path) for tensor_name, path in paths.items()})

        return sharding.load_with_live_sharding(live, structure, self.pieces(name, 0), fill_all)

    def _in_buffer(self, number: int) -> torch.Tensor:
        entry = self._entries[number]
        return self._buffer.tensor(entry.offset, entry.dtype, entry.shape)

    def _outside(self, number: int) -> torch.Tensor:
        if number not in self._made:
            entry = self._entries[number]
            device = torch.device("cuda", torch.cuda.current_device()) if entry.is_current else entry.device
            self._made[number] = torch.empty(entry.shape, dtype=entry.dtype, device=device).copy_(
                self._in_buffer(number)
            )
        return self._made[number]


def _check_content_dtypes(live: Mapping[str, Any], stored: Mapping[str, Any]) -> None:
    """load_state_dict would convert, and the model would not continue with the same numbers."""
    for key, value in stored.items():
        own = live.get(key)
        if isinstance(own, torch.Tensor) and isinstance(value, torch.Tensor) and own.dtype != value.dtype:
            raise TypeError(f"{key} is {own.dtype}, and {value.dtype} in the commit")


def _check_optimizer_content(live: torch.optim.Optimizer, stored: Mapping[str, Any]) -> None:
    """load_state_dict would accept the state of an optimizer of another kind."""
    known = {key for group in stored["param_groups"] for key in group}
    if missing := sorted({key for group in live.param_groups for key in group} - known):
        raise TypeError(f"{type(live).__name__} has {', '.join(missing)}, and the commit's optimizer has not")


class _Number(int):
    """A tensor in a pickle that is only compared."""


def _canonical_content_pickle(data: bytes) -> bytes:
    """The same pickle for equal values: without references to objects that appeared before, which may be equal only."""
    file = io.BytesIO()
    pickler = pickle.Pickler(file, pickle.HIGHEST_PROTOCOL)
    pickler.fast = True
    try:
        pickler.dump(_Unpickler(data, _Number).load())
    except Exception:  # values that contain themselves; in the saver, of classes that only the script has
        return data
    return file.getvalue()


def _broadcast_content_numbers(values: Mapping[str, Any], tensors: list[torch.Tensor]) -> set[int]:
    """The tensors that differ between ranks without meaning: DDP overwrites them with those of rank 0 at each step."""
    from torch.nn.parallel import DistributedDataParallel

    found = {
        local_part_of_dtensor(buffer).data_ptr()
        for value in values.values()
        if isinstance(value, DistributedDataParallel) and value.broadcast_buffers
        for buffer in value.buffers()
    }
    return {number for number, tensor in enumerate(tensors) if tensor.data_ptr() in found and tensor.numel()}


def _can_take_stored_content(own: list[torch.Tensor], stored: list[Entry]) -> bool:
    """Whether the live tensors can take the stored ones; keys do not matter, because the pickle says what is where."""
    if [(tensor.dtype, tuple(tensor.shape)) for tensor in own] != [(entry.dtype, entry.shape) for entry in stored]:
        return False
    filled = [tensor for tensor in own if tensor.numel()]
    return len({tensor.untyped_storage().data_ptr() for tensor in filled}) == len(filled)  # none overlaps another


def stable_content_numbers(values: Mapping[str, Any], taken: Snapshot) -> set[int]:
    """The tensors that only an optimizer's step changes: parameters, and the state of optimizers."""
    parameters = {
        local_part_of_dtensor(parameter).data_ptr()
        for value in values.values()
        if isinstance(value, torch.nn.Module)
        for parameter in value.parameters()
    }
    found = {number for number, tensor in enumerate(taken.tensors) if tensor.data_ptr() in parameters}
    for name, value in values.items():
        if isinstance(value, torch.optim.Optimizer):
            found.update(taken.components[name].numbers)
    return found
