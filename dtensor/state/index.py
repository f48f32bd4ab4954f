"""The index of a checkpoint: where its contents are in its files, with a checksum for each part and for the index.

    checkpoint.json     the contents: names, dtypes and shapes, and for each part its location and its CRC-32
    rank-00003.bin      the parts that rank 3 wrote, one after the other, as the raw bytes of contiguous tensors

The index is JSON and is validated: its files must be in its folder, and its parts must be within them and have the
length of their shapes. A changed byte, in a part or in the index, is detected.
"""

import errno
import json
import os
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import CheckpointError

INDEX = "checkpoint.json"
"""The name of the index file in a checkpoint's folder."""

FORMAT = 1
"""The version of this format, stored in the index."""

DTYPES = {name: found for name, found in vars(torch).items() if isinstance(found, torch.dtype)}
"""Name of a dtype, as an attribute of `torch` -> dtype."""

_FILE = re.compile(r"rank-\d{5,}\.bin")


class DamagedError(CheckpointError):
    """The bytes of a checkpoint are not those that were written."""


@dataclass(frozen=True)
class StoredPart:
    """The location of a value's bytes, or of those of a part of a tensor.

    Attributes:
        file: name of the file.
        begin: offset of the first byte in the file.
        length: number of bytes.
        crc32: CRC-32 of these bytes.
        sizes: the shape, for a part of a tensor.
    """

    file: str
    begin: int
    length: int
    crc32: int
    sizes: tuple[int, ...] = ()

    def read(self, folder: Path) -> torch.Tensor:
        """The bytes, as a uint8 tensor.

        Raises:
            DamagedError: the file cannot be read, or the bytes are not those that were written.
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


@dataclass(frozen=True)
class Index:
    """The content of an index.

    Attributes:
        files: file name -> size in bytes.
        paths: name -> the keys that lead to it in the nested state dict.
        tensors: name -> dtype, global shape, and a dict from the offsets of each part to the part.
        values: name of a value that is not a tensor -> the part that holds it.
    """

    files: dict[str, int]
    paths: dict[str, tuple[str | int, ...]]
    tensors: dict[str, tuple[torch.dtype, torch.Size, dict[torch.Size, StoredPart]]]
    values: dict[str, StoredPart]

    def parts(self) -> Iterable[StoredPart]:
        """All parts in the files."""
        yield from self.values.values()
        for _, _, parts in self.tensors.values():
            yield from parts.values()


def write_index(folder: Path, index: Index) -> None:
    """Write the index of a checkpoint's files. It is on disk when this returns."""
    tensors = {
        name: {
            "dtype": str(dtype).removeprefix("torch."),
            "shape": shape,
            "parts": [{"offsets": at, **asdict(part)} for at, part in parts.items()],
        }
        for name, (dtype, shape, parts) in index.tensors.items()
    }
    values = {name: asdict(part) for name, part in index.values.items()}
    content = {"format": FORMAT, "files": index.files, "paths": index.paths, "tensors": tensors, "values": values}
    body = json.dumps(content, separators=(",", ":"))
    with open(folder / INDEX, "w") as file:
        file.write(_head(zlib.crc32(body.encode())) + body + "}")
        file.flush()
        os.fsync(file.fileno())


def _head(crc32: int) -> str:
    """The text of an index file that precedes its content."""
    return f'{{"crc32":{crc32},"content":'


def read_index(folder: Path) -> Index:
    """The index of a checkpoint, after checking the sizes of its files.

    Raises:
        DamagedError: the index is missing, invalid or was changed, or a file is missing or has the wrong size.
        CheckpointError: the index has another format version.
    """
    try:
        text = content_of(folder / INDEX).decode()
    except (OSError, ValueError) as error:
        raise DamagedError(f"{INDEX} is missing or is not text") from error
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


def content_of(path: Path) -> bytes:
    """The bytes of a regular file. Anything else, such as a pipe on which reading would block, counts as missing.

    Raises:
        FileNotFoundError: there is no such regular file.
    """
    if not path.is_file():
        raise FileNotFoundError(errno.ENOENT, "there is no such file", str(path))
    return path.read_bytes()


def _parsed(text: str) -> Index:
    whole = json.loads(text)
    head, content = _head(whole["crc32"]), whole["content"]
    body = text[len(head) : -1]
    _checked(text, text == head + body + "}" and zlib.crc32(body.encode()) == whole["crc32"])
    if content["format"] != FORMAT:
        raise CheckpointError(f"{INDEX} is of format {content['format']}; this version reads {FORMAT}")
    files = {_checked(name, bool(_FILE.fullmatch(name))): _natural(size) for name, size in content["files"].items()}
    tensors = {}
    for name, entry in content["tensors"].items():
        dtype, shape = DTYPES[entry["dtype"]], torch.Size(map(_natural, entry["shape"]))
        parts = {torch.Size(map(_natural, e["offsets"])): _part(e, files) for e in entry["parts"]}
        for part in parts.values():
            _checked(part, part.length == torch.Size(part.sizes).numel() * dtype.itemsize)
        chunks = [(at, p.sizes) for at, p in parts.items()]
        _checked(
            parts, sum(torch.Size(sizes).numel() for _, sizes in chunks) == shape.numel() and covers(shape, chunks)
        )
        tensors[name] = dtype, shape, parts
    values = {name: _part(entry, files) for name, entry in content["values"].items()}
    paths = {name: tuple(_checked(k, isinstance(k, str | int)) for k in p) for name, p in content["paths"].items()}
    return Index(files, paths, tensors, values)


def covers(shape: Sequence[int], chunks: Iterable[tuple[Sequence[int], Sequence[int]]]) -> bool:
    """Whether every element of a tensor of `shape` is in one of `chunks`, (offsets, sizes) each, which may overlap."""
    boxes = [[(begin, begin + n) for begin, n in zip(offsets, sizes)] for offsets, sizes in chunks]
    # The edges of all chunks divide the tensor into cells, each of which a chunk holds as a whole or not at all.
    cell_of = []
    for dim, length in enumerate(shape):
        edges = {0, length} | {edge for box in boxes for edge in box[dim] if 0 < edge < length}
        cell_of.append({edge: i for i, edge in enumerate(sorted(edges))})
    held = torch.zeros([len(cells) - 1 for cells in cell_of], dtype=torch.bool)
    for box in boxes:
        ends = [[cells[min(max(edge, 0), n)] for edge in ends] for ends, cells, n in zip(box, cell_of, shape)]
        held[tuple(slice(*cells) for cells in ends)] = True
    return bool(held.all())


def _part(entry: Mapping[str, Any], files: Mapping[str, int]) -> StoredPart:
    begin, length = _natural(entry["begin"]), _natural(entry["length"])
    _checked(entry, begin + length <= files[entry["file"]])
    return StoredPart(entry["file"], begin, length, _natural(entry["crc32"]), tuple(map(_natural, entry["sizes"])))


def _natural(n: Any) -> int:
    return _checked(n, type(n) is int and n >= 0)


def _checked(x: Any, fits: bool) -> Any:
    if not fits:
        raise ValueError(f"{x!r} cannot be")
    return x


__all__ = ["INDEX", "DamagedError", "Index", "StoredPart", "content_of", "covers", "read_index", "write_index"]
