"""The tensor protocol of torch.distributed.checkpoint: which chunk of the global tensor this rank writes and reads."""

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from ..errors import ArgumentError
from ..mesh.tensor_spec import Spec, chunk


def write_items(spec: Spec, local: torch.Tensor, fqn: str) -> list[WriteItem]:
    """The write items of this rank's shard of a tensor named `fqn`. The planner removes duplicates of replicas."""
    sizes, offsets = chunk(spec)
    data = TensorWriteData(
        chunk=ChunkStorageMetadata(offsets=offsets, sizes=sizes),
        properties=TensorProperties.create_from_tensor(local),
        size=torch.Size(spec.shape),
    )
    return [WriteItem(index=MetadataIndex(fqn, offsets), type=WriteItemType.SHARD, tensor_data=data)]


def chunk_list(spec: Spec) -> list[ChunkStorageMetadata]:
    """The sizes and offsets of this rank's shard, as a single chunk."""
    sizes, offsets = chunk(spec)
    return [ChunkStorageMetadata(offsets=offsets, sizes=sizes)]


def tensor_shard(spec: Spec, local: torch.Tensor, index: MetadataIndex) -> torch.Tensor:
    """The local tensor that the chunk at `index` is read from or written to.

    Raises:
        ValueError: this rank's shard does not begin at the requested offset.
    """
    _, offsets = chunk(spec)
    if index.offset is not None and torch.Size(index.offset) != offsets:
        raise ArgumentError(f"{index.fqn}: this rank's shard begins at {tuple(offsets)}, not at {tuple(index.offset)}")
    return local


__all__ = ["chunk_list", "tensor_shard", "write_items"]
