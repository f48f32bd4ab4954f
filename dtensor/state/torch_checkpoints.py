"""Reads checkpoints that torch.distributed.checkpoint wrote, without executing their contents.

Their index is a pickle, which torch's own `load` executes, as it does the pickles of values that are not tensors.
"""

import io
import os
import pickle
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from ..errors import ArgumentTypeError, CheckpointError, shown
from ..program.stages import Stage
from .files import read_into, tried
from .index import content_of, covers

_OF_METADATA = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath", "PurePosixPath"},
}
"""Module -> the names in it that a pickled index of torch.distributed.checkpoint may refer to."""


class _Unpickler(pickle.Unpickler):
    """Creates objects of the classes in `_OF_METADATA`, and torch dtypes, and nothing else."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        if global_name in _OF_METADATA.get(module_name, ()):
            return super().find_class(module_name, global_name)
        if module_name == "torch" and isinstance(found := getattr(torch, global_name, None), torch.dtype):
            return found
        raise CheckpointError(
            f".metadata refers to {module_name}.{global_name}, which no index of a checkpoint contains; it is not read"
        )


class TorchReader(FileSystemReader):
    """Reads a checkpoint that torch.distributed.checkpoint.save wrote, without executing its contents.

    The constructor reads the index.

    Raises:
        CheckpointError: the index is missing or invalid, names a file that is not in its folder, or has only some of
            the elements of a tensor.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        super().__init__(folder)
        path = Path(folder) / ".metadata"
        try:
            self.metadata: Any = _Unpickler(io.BytesIO(content_of(path))).load()
            files = {info.relative_path for info in self.metadata.storage_data.values()}
            partial = [name for name, kind in self.metadata.state_dict_metadata.items() if not _is_whole(kind)]
        except CheckpointError:
            raise
        except OSError as error:
            raise CheckpointError(
                f"{path} cannot be read: {error.strerror or error}; give the folder that "
                f"torch.distributed.checkpoint.save wrote to"
            ) from error
        except Exception as error:  # a pickle that was changed can raise anything
            raise CheckpointError(f"{path} is not an index of a checkpoint: {type(error).__name__}: {error}") from error
        for name in files:
            if Path(name).name != name or not (Path(folder) / name).is_file():
                raise CheckpointError(f"{path} names {name}, which is not a file in its folder")
        if partial:
            raise CheckpointError(
                f"{path} has only a part of {', '.join(map(repr, partial))}: its chunks do not cover its shape, "
                "so the other elements were never saved; save again from all ranks that hold a part, or read another "
                "checkpoint"
            )

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        self.metadata.storage_meta = self.metadata.storage_meta or StorageMeta()
        self.metadata.storage_meta.load_id = self.load_id
        return self.metadata


def _is_whole(kind: Any) -> bool:
    """Whether the chunks of a tensor cover it; true of other values."""
    if not isinstance(kind, TensorStorageMetadata):
        return True
    return covers(kind.size, [(chunk.offsets, chunk.sizes) for chunk in kind.chunks])


@Stage("loading a checkpoint of torch")
def load_torch_checkpoint(state: dict[str, Any], folder: str | os.PathLike[str]) -> None:
    """Reads a checkpoint that `torch.distributed.checkpoint.save` wrote into `state`, like `Checkpoints.load`.

    Torch's own `load` executes the pickles in a checkpoint; this creates only tensors, numbers, strings and containers
    from them. Torch writes no checksums, so changed values are not detected. Collective over all ranks.

    Args:
        state: a state dict like the one that was saved. Its tensors are overwritten, whatever their mesh and
            placements; other values are replaced in the dict. Modules and optimizers are as in `Checkpoints.load`.
        folder: the folder of the checkpoint.

    Raises:
        CheckpointError: there is no checkpoint, it does not match `state`, it has only some of the elements of a tensor
            (`state` is then as it was), or it has values of other types; raised on all ranks.
    """
    if not isinstance(state, dict):
        raise ArgumentTypeError(
            f'load_torch_checkpoint takes a state dict, such as {{"model": model}}; got {shown(state)}'
        )
    group = dist.group.WORLD if dist.is_initialized() else None
    reader, wrong = tried(lambda: TorchReader(folder), group)
    if wrong:
        raise CheckpointError(wrong)
    wrong, _ = read_into(state, reader, group)
    if wrong:
        raise CheckpointError(f"{folder} is not read: {wrong}")


__all__ = ["load_torch_checkpoint"]
