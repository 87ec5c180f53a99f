"""Tensors that are parts of larger ones (DTensor: FSDP2, tensor parallelism), and their way into another sharding.

A commit has the local part of each DTensor, and its place in the whole.  With the same sharding, a restore copies part
to part.  With another number of ranks or another mesh, `torch.distributed.checkpoint` plans which pieces of which
shards each rank reads; `BufferReader` reads them from this node's memory or from a peer.
"""

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from ripstop.train.digest import digest

Path = tuple[str, ...]
Tensors = dict[Path, torch.Tensor]


class Part(NamedTuple):
    """Where a local tensor is in its whole."""

    shape: tuple[int, ...]  # of the whole
    offsets: tuple[int, ...]
    layout: str  # mesh and placements


class Leaf(NamedTuple):
    """A tensor in an unpickled structure: its number in the layout."""

    number: int
    part: Part | None


class Piece(NamedTuple):
    """A stored tensor, in the buffer of a shard."""

    shard: int
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]


Pieces = Mapping[str, Sequence[tuple[Part | None, Piece]]]  # by name, then by shard


class ReshardingSource(Protocol):
    """The buffer of one shard."""

    def read(self, offset: int, size: int) -> torch.Tensor:
        """Bytes of it."""


def is_dtensor(value: object) -> bool:
    module = sys.modules.get("torch.distributed.tensor")  # where it is not imported there are none
    return module is not None and isinstance(value, module.DTensor)


def local_part_of_dtensor(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor on this rank: the local part of a DTensor, or the tensor itself."""
    return tensor._local_tensor if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


def part_of(tensor: Any) -> Part:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh, placements = tensor.device_mesh, tensor.placements
    if any(placement.is_partial() for placement in placements):
        raise TypeError("a DTensor with partial sums cannot be kept; reduce it first")
    _, offsets = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    layout = f"{tuple(mesh.shape)} {mesh.mesh_dim_names} {placements}"
    return Part(tuple(tensor.shape), tuple(offsets), layout)


# structures: nested dicts, lists and tuples with tensors or leaves ----------------------------------------------------


def sharded_leaves(structure: Any, kind: type, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    if isinstance(structure, kind):
        yield path, structure
    elif isinstance(structure, Mapping):
        for key, value in structure.items():
            yield from sharded_leaves(value, kind, (*path, str(key)))
    elif isinstance(structure, (list, tuple)):
        for number, value in enumerate(structure):
            yield from sharded_leaves(value, kind, (*path, str(number)))


def _replace_sharded_leaves(structure: Any, tensors: Tensors, path: Path = ()) -> Any:
    """The structure, with tensors instead of leaves; dicts and lists are changed in place."""
    if isinstance(structure, Leaf):
        return tensors[path]
    if isinstance(structure, dict):
        for key, value in structure.items():
            structure[key] = _replace_sharded_leaves(value, tensors, (*path, str(key)))
    elif isinstance(structure, list):
        for number, value in enumerate(structure):
            structure[number] = _replace_sharded_leaves(value, tensors, (*path, str(number)))
    elif type(structure) is tuple:
        return tuple(
            _replace_sharded_leaves(value, tensors, (*path, str(number))) for number, value in enumerate(structure)
        )
    return structure


# restore --------------------------------------------------------------------------------------------------------------


def load_with_live_sharding(
    live: Any, structure: Any, pieces: Mapping[Path, tuple[Part | None, Piece]], fill: Callable[[Tensors], None]
) -> Any:
    """Give a live value a stored structure.  `pieces` say the shapes and types of its tensors; `fill` fills tensors."""
    is_stateful = callable(getattr(live, "load_state_dict", None))
    targets = _targets_with_live_sharding(
        live, live.state_dict() if is_stateful else live, _whole_sharded_tensors(pieces)
    )
    with torch.no_grad():
        fill(targets)
    found = _replace_sharded_leaves(structure, targets)
    if not is_stateful:
        return found
    live.load_state_dict(found)
    return live


def _whole_sharded_tensors(pieces: Mapping[Path, tuple[Part | None, Piece]]) -> Tensors:
    """Tensors without memory that have the shapes and types of the whole ones."""
    return {
        path: torch.empty(part.shape if part else piece.shape, dtype=piece.dtype, device="meta")
        for path, (part, piece) in pieces.items()
    }


def _targets_with_live_sharding(live: Any, own: Any, wholes: Tensors) -> Tensors:
    """A tensor for each path: a module's own; else one with the sharding of the live value, or of its parameter."""
    there = dict(sharded_leaves(own, torch.Tensor))
    parameters: list[torch.Tensor] = []
    if isinstance(live, torch.optim.Optimizer):
        parameters = [parameter for group in live.param_groups for parameter in group["params"]]
    targets = {}
    for path, stored in wholes.items():
        like = there.get(path)
        if like is None and parameters and path[0] == "state":  # such as state.0.exp_avg, by the number of a parameter
            like = parameters[int(path[1])]
        if like is None or like.shape != stored.shape:
            targets[path] = torch.empty(stored.shape, dtype=stored.dtype)
        elif isinstance(live, torch.nn.Module):
            targets[path] = like
        else:
            targets[path] = torch.empty_like(like, dtype=stored.dtype, requires_grad=False)
    return targets


def copy_equally_sharded(leaf: Leaf, stored: torch.Tensor, target: torch.Tensor) -> None:
    """From a buffer with the same sharding."""
    if leaf.part != (part_of(target) if is_dtensor(target) else None):
        raise ValueError(f"its sharding is not that of the commit: {leaf.part}")
    local_part_of_dtensor(target).copy_(stored)


# disk -----------------------------------------------------------------------------------------------------------------


def _is_same_part(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether they have the same bytes: NaN is equal to itself."""
    return one is other or torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


class ShardedTensorParts(torch.Tensor):
    """A large tensor of which only some parts are here, for `torch.distributed.checkpoint` to write or to fill."""

    by_offsets: dict[tuple[int, ...], torch.Tensor]

    @staticmethod
    def __new__(cls, part: Part, local: torch.Tensor) -> "ShardedTensorParts":
        made: ShardedTensorParts = torch.Tensor._make_wrapper_subclass(cls, part.shape, dtype=local.dtype)
        made.by_offsets = {part.offsets: local} if local.numel() else {}
        return made

    def add_parts(self, other: "ShardedTensorParts") -> bool:
        """Add parts of the same tensor; False if it is another one: the same part has other content there."""
        if (self.shape, self.dtype) != (other.shape, other.dtype):
            return False
        for offsets, part in other.by_offsets.items():
            if not _is_same_part(self.by_offsets.setdefault(offsets, part), part):
                return False
        return True

    def digests(self) -> dict[tuple[int, ...], int]:
        return {offsets: digest(part.reshape(-1).view(torch.uint8)) for offsets, part in self.by_offsets.items()}

    @classmethod
    def __torch_dispatch__(cls, *_: Any) -> Any:
        raise NotImplementedError("only its parts can be used")

    # the protocol that torch.distributed.checkpoint has for tensors in parts

    def __create_chunk_list__(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(torch.Size(offsets), part.size()) for offsets, part in self.by_offsets.items()]

    def __create_write_items__(self, name: str, _: object) -> list[Any]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties = TensorProperties(self.dtype)
        return [
            WriteItem(
                MetadataIndex(name, chunk.offsets), WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]  # fmt: skip

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        return self.by_offsets[tuple(index.offset)]


def copy_resharded(pieces: Pieces, sources: Sequence[ReshardingSource], targets: dict[str, torch.Tensor]) -> None:
    """Fill tensors of any sharding from the pieces of all shards, by name."""
    from torch.distributed.checkpoint.state_dict_loader import load

    from ripstop.train.buffer_reader import BufferReader

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that torch.distributed is not used: each rank plans for itself
        load(targets, storage_reader=BufferReader(pieces, sources), no_dist=True)
