"""The files of a checkpoint: bytes as they lie in memory, and one index in JSON that says what is where.

    checkpoint.json     what the checkpoint holds: names, dtypes, shapes; of each part where it lies, and its CRC-32
    rank-00003.bin      the parts that rank 3 wrote, one after the other

A checkpoint is data. Nothing that its files say is run: the index is JSON; values that are no tensors are read by
torch's loader for weights, which makes numbers, texts, containers and tensors, and refuses all else. So are those that
torch.distributed.checkpoint wrote, whose index is a pickle (`TorchReader`). Every part is checked against its CRC-32
when it is read, and the index against its own.

`Writer` and `Reader` are what torch.distributed.checkpoint writes and reads by; which rank writes which part of which
tensor is its business (`checkpoint` tells it).
"""

import errno
import io
import json
import os
import pickle
import re
import zlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader, StorageReader, StorageWriter
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from .errors import CheckpointError
from .safetensors import raw_bytes

INDEX = "checkpoint.json"
"""The file of a checkpoint that says what is in the others."""

FORMAT = 1
"""What the index calls this format."""

_FILE = re.compile(r"rank-\d{5,}\.bin")


class DamagedError(CheckpointError):
    """The bytes of a checkpoint are not those that were written."""


@dataclass(frozen=True)
class Part:
    """Where the bytes of a value lie, or of a part of a tensor.

    Attributes:
        file: name of the file.
        begin: the first byte in the file.
        length: number of bytes.
        crc32: their checksum.
        sizes: of a part of a tensor its shape.
    """

    file: str
    begin: int
    length: int
    crc32: int
    sizes: tuple[int, ...] = ()

    def read(self, folder: Path) -> torch.Tensor:
        """The bytes.

        Raises:
            DamagedError: they are not there, or not those that were written.
        """
        data = torch.empty(self.length, dtype=torch.uint8)
        raw: Any = data.numpy()
        buffer = memoryview(raw)
        try:
            with open(folder / self.file, "rb") as file:
                file.seek(self.begin)
                count = file.readinto(buffer)
        except OSError as error:
            raise DamagedError(f"{self.file} cannot be read: {error.strerror or error}") from error
        if count != self.length or zlib.crc32(buffer) != self.crc32:
            end = self.begin + self.length
            raise DamagedError(f"bytes {self.begin:,} to {end:,} of {self.file} are not what was written")
        return data


class Writer(StorageWriter):
    """Writes what this rank has of a checkpoint to a file in `folder`; the first rank writes the index, last of all."""

    def __init__(self, folder: Path):
        self.folder = folder

    def reset(self, checkpoint_id: Any = None) -> None: ...

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self.file = f"rank-{kwargs.get('rank', 0):05d}.bin"

    def prepare_local_plan(self, plan: Any) -> Any:
        return plan

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        return plans

    def write_data(self, plan: Any, planner: Any) -> Future[list[WriteResult]]:
        results, begin = [], 0
        # Checksums are computed beside the writing.
        with open(self.folder / self.file, "wb") as file, ThreadPoolExecutor(1) as beside:
            for item in plan.items:
                data = planner.resolve_data(item)
                is_value = item.type == WriteItemType.BYTE_IO
                raw = data.getbuffer() if is_value else raw_bytes(data)
                crc32 = beside.submit(zlib.crc32, raw)
                file.write(raw)
                sizes = () if is_value else tuple(item.tensor_data.chunk.sizes)
                part = Part(self.file, begin, len(raw), crc32.result(), sizes)
                begin += len(raw)
                results.append(WriteResult(item.index, part.length, part))
            file.flush()
            os.fsync(file.fileno())
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        parts: dict[str, list[tuple[Any, Part]]] = {}
        for result in (r for of_rank in results for r in of_rank):
            parts.setdefault(result.index.fqn, []).append((result.index.offset, result.storage_data))
        tensors, values = {}, {}
        for name, kind in metadata.state_dict_metadata.items():
            if isinstance(kind, TensorStorageMetadata):
                tensors[name] = {
                    "dtype": str(kind.properties.dtype).removeprefix("torch."),
                    "shape": list(kind.size),
                    "parts": [{"offsets": list(at or ()), **_noted(part)} for at, part in parts[name]],
                }
            else:
                values[name] = _noted(parts[name][0][1])
        content = {
            "format": FORMAT,
            "files": {p.name: p.stat().st_size for p in sorted(self.folder.iterdir())},
            "paths": {name: list(path) for name, path in (metadata.planner_data or {}).items()},
            "tensors": tensors,
            "values": values,
        }
        with open(self.folder / INDEX, "w") as file:
            file.write(_text({"crc32": _crc32(content), "content": content}))
            file.flush()
            os.fsync(file.fileno())

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


def _noted(part: Part) -> dict[str, Any]:
    return {"file": part.file, "begin": part.begin, "length": part.length, "crc32": part.crc32, "sizes": part.sizes}


def _text(content: Any) -> str:
    return json.dumps(content, separators=(",", ":"))


def _crc32(content: Any) -> int:
    return zlib.crc32(_text(content).encode())


@dataclass(frozen=True)
class Index:
    """What an index says.

    Attributes:
        files: name -> bytes.
        paths: name -> the keys that lead to it in the nested state dict.
        tensors: name -> dtype, shape, and offsets -> part.
        values: name -> where it lies.
    """

    files: dict[str, int]
    paths: dict[str, tuple[str | int, ...]]
    tensors: dict[str, tuple[torch.dtype, torch.Size, dict[torch.Size, Part]]]
    values: dict[str, Part]

    def parts(self) -> Iterable[Part]:
        """All that lies in the files."""
        yield from self.values.values()
        for _, _, parts in self.tensors.values():
            yield from parts.values()


def read_index(folder: Path) -> Index:
    """The index of a checkpoint, and files that are as long as it says.

    Raises:
        DamagedError: the index is missing, is none, or was changed; a file is missing, or longer or shorter.
    """
    try:
        text = _content(folder / INDEX).decode()
    except (OSError, ValueError) as error:
        raise DamagedError(f"{INDEX} is missing or is no text") from error
    try:
        index = _parsed(text)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedError(f"{INDEX} is not as it was written") from error
    for name, size in index.files.items():
        found = (folder / name).stat().st_size if (folder / name).is_file() else None
        if found is None:
            raise DamagedError(f"{name} is missing")
        if found != size:
            raise DamagedError(f"{name} has {found:,} bytes of {size:,}")
    return index


def _content(path: Path) -> bytes:
    """What a file holds; a pipe, say, for which a reader would wait, is none."""
    if not path.is_file():
        raise FileNotFoundError(errno.ENOENT, "there is no such file", str(path))
    return path.read_bytes()


def _parsed(text: str) -> Index:
    whole = json.loads(text)
    content = whole["content"]
    if whole["crc32"] != _crc32(content) or text != _text(whole):
        raise ValueError("checksum")
    if content["format"] != FORMAT:
        raise CheckpointError(f"{INDEX} is of format {content['format']}; this version reads {FORMAT}")
    files = {_checked(name, bool(_FILE.fullmatch(name))): _natural(size) for name, size in content["files"].items()}
    tensors = {}
    for name, entry in content["tensors"].items():
        dtype, shape = getattr(torch, entry["dtype"]), torch.Size(map(_natural, entry["shape"]))
        parts = {torch.Size(map(_natural, e["offsets"])): _part(e, files) for e in entry["parts"]}
        _checked(dtype, isinstance(dtype, torch.dtype))
        for part in parts.values():
            _checked(part, part.length == torch.Size(part.sizes).numel() * dtype.itemsize)
        _checked(parts, sum(torch.Size(p.sizes).numel() for p in parts.values()) == shape.numel())
        tensors[name] = dtype, shape, parts
    values = {name: _part(entry, files) for name, entry in content["values"].items()}
    paths = {name: tuple(_checked(k, isinstance(k, str | int)) for k in p) for name, p in content["paths"].items()}
    return Index(files, paths, tensors, values)


def _part(entry: Mapping[str, Any], files: Mapping[str, int]) -> Part:
    begin, length = _natural(entry["begin"]), _natural(entry["length"])
    _checked(entry, begin + length <= files[entry["file"]])
    return Part(entry["file"], begin, length, _natural(entry["crc32"]), tuple(map(_natural, entry["sizes"])))


def _natural(n: Any) -> int:
    return _checked(n, type(n) is int and n >= 0)


def _checked(x: Any, fits: bool) -> Any:
    if not fits:
        raise ValueError(f"{x!r} cannot be")
    return x


def verify(
    folder: Path,
    share: tuple[int, int] = (0, 1),
    shown: Callable[[list[Part]], Iterable[Part]] = iter,
) -> str:
    """What is wrong with a checkpoint, "" if nothing is: every byte is read.

    Args:
        folder: the checkpoint's.
        share: (k, n) reads the k-th of n shares of the parts.
        shown: goes through the parts one by one, and may show how far it is.
    """
    k, n = share
    try:
        parts = sorted(read_index(folder).parts(), key=lambda p: (p.file, p.begin))
        for part in shown(parts[k::n]):
            part.read(folder)
    except CheckpointError as error:
        return str(error)
    return ""


class Reader(StorageReader):
    """Reads what this rank needs of the checkpoint in `folder`, whose index it reads at once.

    Raises:
        DamagedError: see `read_index`.
    """

    def __init__(self, folder: Path):
        self.folder, self.index = folder, read_index(folder)

    def reset(self, checkpoint_id: Any = None) -> None: ...

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        kinds: dict[str, Any] = {name: BytesStorageMetadata() for name in self.index.values}
        where = {MetadataIndex(name): part for name, part in self.index.values.items()}
        for name, (dtype, shape, parts) in self.index.tensors.items():
            chunks = [ChunkStorageMetadata(offsets=at, sizes=torch.Size(p.sizes)) for at, p in parts.items()]
            kinds[name] = TensorStorageMetadata(TensorProperties(dtype=dtype), shape, chunks)
            where |= {MetadataIndex(name, at): part for at, part in parts.items()}
        return Metadata(kinds, planner_data=dict(self.index.paths), storage_data=where, storage_meta=StorageMeta())

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self.where = metadata.storage_data

    def prepare_local_plan(self, plan: Any) -> Any:
        return plan

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        return plans

    def read_data(self, plan: Any, planner: Any) -> Future[None]:
        wanted: dict[Part, list[Any]] = {}
        for item in plan.items:
            wanted.setdefault(self.where[item.storage_index], []).append(item)
        for part in sorted(wanted, key=lambda p: (p.file, p.begin)):
            data = part.read(self.folder)
            raw: Any = data.numpy()
            for item in wanted[part]:
                if item.type == LoadItemType.BYTE_IO:
                    planner.load_bytes(item, io.BytesIO(raw))
                    continue
                dtype = self.index.tensors[item.storage_index.fqn][0]
                found = data.view(dtype).view(part.sizes)
                for dim, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths)):
                    found = found.narrow(dim, offset, length)
                target = planner.resolve_tensor(item).detach()
                target.copy_(found)
                planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


class SafeSavePlanner(DefaultSavePlanner):
    """Torch's plan of a save, which refuses values that could not be read without running their code."""

    def transform_object(self, write_item: Any, object: Any) -> Any:
        data = super().transform_object(write_item, object)
        if write_item.type == WriteItemType.BYTE_IO:
            try:
                torch.load(io.BytesIO(data.getbuffer()), weights_only=True)
            except pickle.UnpicklingError as error:
                raise CheckpointError(
                    f"{write_item.index.fqn!r} is a {type(object).__name__}, and a checkpoint holds tensors, numbers, "
                    "texts and containers of these; save what it is made of, its state_dict() say"
                ) from error
        return data


class SafeLoadPlanner(DefaultLoadPlanner):
    """Torch's plan of a load, which runs nothing that it reads."""

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        try:
            found = torch.load(value, weights_only=True)
        except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise CheckpointError(
                f"{name!r} is not read, as it is no tensor, number, text or container: {reason}"
            ) from error
        owner: Any = self.original_state_dict
        *path, last = self.mappings[name] if self.flatten_state_dict else (name,)
        for key in path:
            owner = owner[key]
        owner[last] = found


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
        CheckpointError: the index is missing, or is none.
    """

    def __init__(self, folder: str | os.PathLike):
        super().__init__(folder)
        path = Path(folder) / ".metadata"
        try:
            metadata = _Unpickler(io.BytesIO(_content(path))).load()
        except CheckpointError:
            raise
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
        except Exception as error:  # a pickle that was changed can raise anything
            raise CheckpointError(f"{path} is no index of a checkpoint: {type(error).__name__}: {error}") from error
        if not isinstance(metadata, Metadata):
            raise CheckpointError(f"{path} holds a {type(metadata).__name__}, which is no index of a checkpoint")
        self.metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        files = {info.relative_path for info in (self.metadata.storage_data or {}).values()}
        for name in files:
            if Path(name).name != name:
                raise CheckpointError(f"the index names {name}, which is no file of its folder")
        self.metadata.storage_meta = self.metadata.storage_meta or StorageMeta()
        self.metadata.storage_meta.load_id = self.load_id
        return self.metadata


__all__ = [
    "INDEX",
    "DamagedError",
    "Reader",
    "SafeLoadPlanner",
    "SafeSavePlanner",
    "TorchReader",
    "Writer",
    "read_index",
    "verify",
]
