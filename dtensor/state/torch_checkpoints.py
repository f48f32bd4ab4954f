"""Checkpoints that torch.distributed.checkpoint wrote, read without running what they hold.

Their index is a pickle, which torch's own `load` executes, as it does the pickles of values that are no tensors.
"""

import io
import os
import pickle
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from ..errors import CheckpointError
from .files import read_into, tried
from .index import content_of

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
"""What the pickled index of torch.distributed.checkpoint is made of: module -> names."""


class _Unpickler(pickle.Unpickler):
    """Makes what `_OF_METADATA` names, and nothing else."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        if global_name in _OF_METADATA.get(module_name, ()):
            return super().find_class(module_name, global_name)
        if module_name == "torch" and isinstance(found := getattr(torch, global_name, None), torch.dtype):
            return found
        raise CheckpointError(
            f".metadata asks for {module_name}.{global_name}, which no index of a checkpoint is made of: it is not read"
        )


class TorchReader(FileSystemReader):
    """Reads a checkpoint that torch.distributed.checkpoint.save wrote, and runs nothing that it holds.

    It reads the index at once.

    Raises:
        CheckpointError: the index is missing, is none, or names what is no file of its folder.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        super().__init__(folder)
        path = Path(folder) / ".metadata"
        try:
            self.metadata: Any = _Unpickler(io.BytesIO(content_of(path))).load()
            files = {info.relative_path for info in self.metadata.storage_data.values()}
        except CheckpointError:
            raise
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
        except Exception as error:  # a pickle that was changed can raise anything
            raise CheckpointError(f"{path} is no index of a checkpoint: {type(error).__name__}: {error}") from error
        for name in files:
            if Path(name).name != name or not (Path(folder) / name).is_file():
                raise CheckpointError(f"{path} names {name}, which is no file of its folder")

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        self.metadata.storage_meta = self.metadata.storage_meta or StorageMeta()
        self.metadata.storage_meta.load_id = self.load_id
        return self.metadata


def load_torch_checkpoint(state: dict[str, Any], folder: str | os.PathLike[str]) -> None:
    """Read what `torch.distributed.checkpoint.save` wrote to `folder` into `state`, as `Checkpoints.load` does.

    Torch's own `load` runs whatever a checkpoint's pickles say; this makes tensors, numbers, texts and containers of
    them, and nothing else. Torch writes no checksums: a changed value is not noticed.

    Raises:
        CheckpointError: on all ranks, if there is no checkpoint, it holds something else than `state` or than such
            values.
    """
    group = dist.group.WORLD if dist.is_initialized() else None
    reader, wrong = tried(lambda: TorchReader(folder), group)
    if wrong:
        raise CheckpointError(wrong)
    wrong, _ = read_into(state, reader, group)
    if wrong:
        raise CheckpointError(f"{folder} is not read: {wrong}")


__all__ = ["load_torch_checkpoint"]
