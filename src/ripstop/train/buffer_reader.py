"""A `StorageReader` of `torch.distributed.checkpoint` whose storage is the buffers of a commit."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from ripstop.train.sharding import Piece, Pieces, ReshardingSource


class BufferReader(StorageReader):
    """Each rank reads for itself.  Of pieces that several shards have, the first is used."""

    def __init__(self, pieces: Pieces, sources: Sequence[ReshardingSource]) -> None:
        self._sources = sources
        self._places: dict[MetadataIndex, Piece] = {}
        self._metadata: dict[str, TensorStorageMetadata] = {}
        for name, found in pieces.items():
            chunks = []
            for part, piece in found:
                offsets = torch.Size(part.offsets if part else [0] * len(piece.shape))
                index = MetadataIndex(name, offsets)
                if index not in self._places and 0 not in piece.shape:
                    self._places[index] = piece
                    chunks.append(ChunkStorageMetadata(offsets, torch.Size(piece.shape)))
            whole = torch.Size(found[0][0].shape if found[0][0] else found[0][1].shape)
            self._metadata[name] = TensorStorageMetadata(TensorProperties(found[0][1].dtype), whole, chunks)

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        return Metadata(dict(self._metadata))

    def set_up_storage_reader(self, *_: Any, **__: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            target = planner.resolve_tensor(item).detach()
            target.copy_(self._read(item))
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(self, item: ReadItem) -> torch.Tensor:
        """A part of a piece; its rows are next to each other in the buffer, and only they are read."""
        piece = self._places[item.storage_index]
        if not piece.shape:
            return self._sources[piece.shard].read(piece.offset, piece.dtype.itemsize).view(piece.dtype)[0]
        row_bytes = torch.Size(piece.shape[1:]).numel() * piece.dtype.itemsize
        (first, *starts), (rows, *sizes) = item.storage_offsets, item.lengths
        data = self._sources[piece.shard].read(piece.offset + first * row_bytes, rows * row_bytes)
        found = data.view(piece.dtype).view(rows, *piece.shape[1:])
        for dimension, (start, size) in enumerate(zip(starts, sizes, strict=True), 1):
            found = found.narrow(dimension, start, size)
        return found

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return False
