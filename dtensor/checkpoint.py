"""The protocol of torch.distributed.checkpoint: which part of the global tensor this rank writes and reads."""

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from .errors import PlacementError
from .mesh import mesh_shape
from .spec import Spec


def chunk(spec: Spec) -> tuple[torch.Size, torch.Size]:
    """Sizes of this rank's shard and its offsets in the global tensor, in elements per dimension.

    Raises:
        PlacementError: the tensor is partial, so no rank holds final values.
    """
    if spec.layout.partial:
        raise PlacementError(
            f"a tensor in layout {spec.layout} holds no final values to save; "
            "write x.redistribute(placements=[Replicate(), …]) first"
        )
    coordinate = spec.coordinate
    if coordinate is None:
        return torch.Size([0] * spec.ndim), torch.Size(spec.shape)
    box = spec.layout.local_box(spec.shape, mesh_shape(spec.mesh), coordinate)
    return torch.Size([end - begin for begin, end in box]), torch.Size([begin for begin, _ in box])


def write_items(spec: Spec, local: torch.Tensor, fqn: str) -> list[WriteItem]:
    """What this rank writes of a tensor under the name `fqn`; replicas are removed by the planner."""
    sizes, offsets = chunk(spec)
    data = TensorWriteData(
        chunk=ChunkStorageMetadata(offsets=offsets, sizes=sizes),
        properties=TensorProperties.create_from_tensor(local),
        size=torch.Size(spec.shape),
    )
    return [WriteItem(index=MetadataIndex(fqn, offsets), type=WriteItemType.SHARD, tensor_data=data)]


def chunk_list(spec: Spec) -> list[ChunkStorageMetadata]:
    """This rank's shard of a tensor as sizes and offsets: one chunk."""
    sizes, offsets = chunk(spec)
    return [ChunkStorageMetadata(offsets=offsets, sizes=sizes)]


def tensor_shard(spec: Spec, local: torch.Tensor, index: MetadataIndex) -> torch.Tensor:
    """The local tensor that the chunk at `index` is read from or written to.

    Raises:
        ValueError: this rank's shard does not begin at the offset asked for.
    """
    _, offsets = chunk(spec)
    if index.offset is not None and torch.Size(index.offset) != offsets:
        raise ValueError(f"{index.fqn}: this rank's shard begins at {tuple(offsets)}, not at {tuple(index.offset)}")
    return local


__all__ = ["chunk", "chunk_list", "tensor_shard", "write_items"]
