"""The tensor protocol of torch.distributed.checkpoint: which chunk of the global tensor this rank writes and reads."""

from __future__ import annotations

import torch

from ..errors import ArgumentError
from ..mesh.tensor_spec import Spec, chunk
from ..torch_private.on_demand import checkpoint_metadata as metadata
from ..torch_private.on_demand import checkpoint_planner as planner


def write_items(spec: Spec, local: torch.Tensor, fqn: str) -> list[planner.WriteItem]:
    """The write items of this rank's shard of a tensor named `fqn`. The planner removes duplicates of replicas."""
    sizes, offsets = chunk(spec)
    data = planner.TensorWriteData(
        chunk=metadata.ChunkStorageMetadata(offsets=offsets, sizes=sizes),
        properties=metadata.TensorProperties.create_from_tensor(local),
        size=torch.Size(spec.shape),
    )
    index = metadata.MetadataIndex(fqn, offsets)
    return [planner.WriteItem(index=index, type=planner.WriteItemType.SHARD, tensor_data=data)]


def chunk_list(spec: Spec) -> list[metadata.ChunkStorageMetadata]:
    """The sizes and offsets of this rank's shard, as a single chunk."""
    sizes, offsets = chunk(spec)
    return [metadata.ChunkStorageMetadata(offsets=offsets, sizes=sizes)]


def tensor_shard(spec: Spec, local: torch.Tensor, index: metadata.MetadataIndex) -> torch.Tensor:
    """The local tensor that the chunk at `index` is read from or written to.

    Raises:
        ValueError: this rank's shard does not begin at the requested offset.
    """
    _, offsets = chunk(spec)
    if index.offset is not None and torch.Size(index.offset) != offsets:
        raise ArgumentError(f"{index.fqn}: this rank's shard begins at {tuple(offsets)}, not at {tuple(index.offset)}")
    return local


__all__ = ["chunk_list", "tensor_shard", "write_items"]
