"""Models as safetensors files: written one tensor at a time; each rank reads only what it needs.

The format (github.com/huggingface/safetensors) is: eight bytes with the length of a header; the header in JSON, with
dtype, shape and begin and end of the bytes of each tensor; then the bytes. Only torch is needed.
"""

import json
import math
import mmap
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..errors import ArgumentError, ArgumentTypeError, CheckpointError, shown
from ..program.stages import Stage
from ..tensor.deferred import Box, deferred, own_box, read
from ..tensor.tensor import DTensor
from ..torch_private.core import root_mesh
from .differences import differences

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
"""Name of a dtype in the format -> dtype."""

NAMES = {dtype: name for name, dtype in DTYPES.items()}
INDEX = "model.safetensors.index.json"
"""The name of the file that maps tensors to files, if there are several."""


@Stage("writing safetensors")
def export(
    state: Mapping[str, torch.Tensor], path: str | os.PathLike[str], *, metadata: Mapping[str, str] | None = None
) -> None:
    """Writes the full tensors of a state dict to one safetensors file.

    Collective over all ranks. One tensor at a time is gathered, and rank 0 writes it. The file gets its name only when
    it is complete.

    Args:
        state: name -> DTensor or plain tensor.
        path: the file; an existing one is replaced.
        metadata: strings for the header.

    Raises:
        TypeError: `state` is not a dict, a value is not a tensor, or a name or an item of `metadata` is not a string.
        ValueError: a tensor has a dtype that the format does not support.
        CheckpointError: the file could not be written; raised on all ranks.
    """
    _check_state(state)
    header = _header(state, metadata)
    writer = _Writer(Path(path)) if not dist.is_initialized() or dist.get_rank() == 0 else None
    if writer is not None:
        writer.write(header)
    for x in state.values():
        whole_tensor = whole(x)
        if writer is not None:
            writer.write(raw_bytes(whole_tensor))
    said = [None if writer is None else writer.close()]
    if dist.is_initialized():
        dist.broadcast_object_list(said, src=0)
    if said[0] is not None:
        raise CheckpointError(f"{path} could not be written: {said[0]}")


def write(
    state: Mapping[str, torch.Tensor],
    path: str | os.PathLike[str],
    metadata: Mapping[str, str] | None,
    values: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """Writes a safetensors file on this rank alone, tensor after tensor, with the values that `values` obtains of each.

    Raises:
        CheckpointError: the file could not be written.
    """
    header, writer = _header(state, metadata), _Writer(Path(path))
    writer.write(header)
    for x in state.values():
        writer.write(raw_bytes(values(x)))
    error = writer.close()
    if error is not None:
        raise CheckpointError(f"{path} could not be written: {error}")


def whole(x: torch.Tensor) -> torch.Tensor:
    """The full tensor, on rank 0 too, where that is not on the tensor's mesh."""
    kept: Any = x.detach()
    if not isinstance(x, DTensor):
        return kept
    found = kept.full_tensor()
    ranks = root_mesh(x.device_mesh).mesh.flatten().tolist()  # of a slice, each rank has the one that it is in
    if 0 in ranks:
        return found
    first = min(ranks)
    if dist.get_rank() == first:
        dist.send(found.contiguous().view(-1).view(torch.uint8), 0)
    elif dist.get_rank() == 0:
        found = torch.empty(x.shape, dtype=x.dtype, device=found.device)
        dist.recv(found.view(-1).view(torch.uint8), first)
    return found


class _Writer:
    """A file that gets its name when it is closed.

    Errors are returned by `close`, not raised before, because the other ranks continue to the end.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.partial = path.with_name(path.name + ".partial")
        self.error: OSError | None = None
        self.file: Any = None
        self._try(lambda: setattr(self, "file", open(self.partial, "wb")))  # noqa: SIM115

    def _try(self, act: Any) -> None:
        try:
            if self.error is None:
                act()
        except OSError as error:
            self.error = error

    def write(self, data: bytes | memoryview) -> None:
        self._try(lambda: self.file.write(data))

    def close(self) -> OSError | None:
        self._try(self._finish)
        if self.file is not None:
            self.file.close()
        if self.error is not None:
            self.partial.unlink(missing_ok=True)
        return self.error

    def _finish(self) -> None:
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        self.partial.replace(self.path)


def _is_text(given: Any) -> bool:
    return isinstance(given, Mapping) and all(isinstance(x, str) for pair in given.items() for x in pair)


def _check_state(state: Any) -> None:
    if not isinstance(state, Mapping):
        raise ArgumentTypeError(
            f"the state is a dict from names to tensors; got {shown(state)}, write such as model.state_dict()"
        )


def _header(state: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None) -> bytes:
    if metadata is not None and not _is_text(metadata):
        raise ArgumentTypeError(f"metadata is a dict from strings to strings; got {metadata!r}")
    entries: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    end = 0
    for name, x in state.items():
        if not isinstance(name, str):
            raise ArgumentTypeError(f"names of tensors in a safetensors file are strings; got {name!r}")
        if not isinstance(x, torch.Tensor):
            raise ArgumentTypeError(f"a safetensors file holds tensors; {name!r} is {type(x).__name__}, leave it out")
        if x.dtype not in NAMES:
            raise ArgumentError(f"a safetensors file cannot hold {x.dtype}, the dtype of {name!r}; write x.to(float32)")
        begin, end = end, end + x.numel() * x.element_size()
        entries[name] = {"dtype": NAMES[x.dtype], "shape": list(x.shape), "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def raw_bytes(x: torch.Tensor) -> memoryview:
    """The bytes of a tensor in contiguous order, in host memory."""
    flat = x.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    raw: Any = flat.view(torch.uint8).numpy() if flat.numel() else b""
    return memoryview(raw)


@Stage("reading safetensors")
def load(state: Mapping[str, torch.Tensor], path: str | os.PathLike[str], *, strict: bool = True) -> list[str]:
    """Reads safetensors files into the tensors of a state dict, in place. Each rank reads only its own shards.

    Args:
        state: name -> DTensor or plain tensor, with the (global) shape of the one in the file. Values are cast to its
            dtype.
        path: a file, or a folder with one `*.safetensors` file, or with several and an index, as transformers writes.
        strict: raise if the names in `state` and in the files are not the same.

    Returns:
        The names in `state` that are not in the files.

    Raises:
        CheckpointError: a file is missing, damaged or truncated, a dtype in it is not one of torch's, or shapes (or, if
            `strict`, names) do not match.
        TypeError: `state` is not a dict.
    """
    _check_state(state)
    found = {name: (file, entry) for file in _files(Path(path)) for name, entry in entries_of(file).items()}
    missing = [name for name in state if name not in found]
    extra = [name for name in found if name not in state]
    if strict and (missing or extra):
        raise CheckpointError(
            f"{path} does not match the state: {differences(missing, extra)}; write strict=False to read the common "
            "tensors"
        )
    for name, x in state.items():
        if name in found:
            _read(x, name, *found[name])
    return missing


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if (path / INDEX).is_file():
        try:
            names = set(json.loads((path / INDEX).read_text())["weight_map"].values())
            return [path / name for name in sorted(names)]
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(
                f"{path / INDEX} is not an index of safetensors files ({error!r}); copy it again"
            ) from error
    found = sorted(path.glob("*.safetensors"))
    if len(found) != 1:
        raise CheckpointError(
            f"{path} is neither a safetensors file nor a folder with one such file or {INDEX}; give the path of one "
            f"of them"
        )
    return found


def entries_of(file: Path) -> dict[str, Any]:
    """Name -> header entry: dtype, shape, and begin and end of the bytes in the file."""
    if not file.is_file():
        raise CheckpointError(f"{file} is missing; copy it again")
    size = file.stat().st_size
    with open(file, "rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if size < 8 or length > size - 8:
            raise CheckpointError(f"{file} has {size:,} bytes, less than its header; copy it again")
        text = opened.read(length)
    try:
        entries = json.loads(text)
        entries.pop("__metadata__", None)
        wrong = [name for name, entry in entries.items() if not _is_entry(**entry)]
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{file} is damaged or not a safetensors file ({error!r}); copy it again") from error
    if wrong:
        raise CheckpointError(f"{file} has impossible entries for {wrong}: {entries[wrong[0]]}; write or copy it again")
    needed = 8 + length + max((e["data_offsets"][1] for e in entries.values()), default=0)
    if size != needed:
        raise CheckpointError(f"{file} has {size:,} bytes of {needed:,}: it was cut short; copy or write it again")
    return {name: {**e, "data_offsets": [8 + length + n for n in e["data_offsets"]]} for name, e in entries.items()}


def _is_entry(*, dtype: str, shape: list[int], data_offsets: list[int]) -> bool:
    """Whether an entry is consistent: as many bytes as its shape and dtype require, if torch has the dtype."""
    begin, end = data_offsets
    if not all(type(n) is int and n >= 0 for n in (*shape, begin, end - begin)):
        return False
    return dtype not in DTYPES or end - begin == math.prod(shape) * DTYPES[dtype].itemsize


@torch.no_grad()
def _read(x: torch.Tensor, name: str, file: Path, entry: dict[str, Any]) -> None:
    if list(x.shape) != entry["shape"]:
        raise CheckpointError(
            f"{name!r} has shape {entry['shape']} in {file}, but {list(x.shape)} in the state; read it into a "
            f"tensor of that shape"
        )
    local: Any = x.to_local() if isinstance(x, DTensor) else x
    local.copy_(read(_mapped(name, file, entry), own_box(x._spec) if isinstance(x, DTensor) else None))


def _mapped(name: str, file: Path, entry: dict[str, Any]) -> torch.Tensor:
    """A tensor on the memory of the file, of which only what is used is read."""
    if entry["dtype"] not in DTYPES:
        raise CheckpointError(f"{name!r} is of dtype {entry['dtype']} in {file}, which torch does not have")
    (begin, end), dtype = entry["data_offsets"], DTYPES[entry["dtype"]]
    if begin == end:
        return torch.empty(entry["shape"], dtype=dtype)
    with open(file, "rb") as opened:
        mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)  # closed with the last tensor that uses it
    raw = torch.frombuffer(mapped, dtype=torch.uint8, count=end - begin, offset=begin)
    raw = raw.clone() if raw.data_ptr() % dtype.itemsize else raw
    return raw.view(dtype).view(entry["shape"])


def state_dict(path: str | os.PathLike[str]) -> dict[str, torch.Tensor]:
    """The state dict that safetensors files hold, of tensors that are read when they are used.

    The tensors are on the meta device until then. `load_state_dict` of a sharded model reads this rank's parts of them;
    with `assign=True` a model on the meta device keeps them, and sharding it reads this rank's parts.

    Args:
        path: a file, or a folder as `load` takes it. The files must not change until the tensors are read.

    Returns:
        name -> tensor, with the shape and the dtype that it has in the file.

    Raises:
        CheckpointError: a file is missing, damaged or truncated, or has a dtype that torch does not have.

    >>> with torch.device("meta"):
    ...     model = Net()
    >>> model.load_state_dict(safetensors.state_dict("model.safetensors"), assign=True)
    >>> fully_shard(model, mesh)
    """
    return {name: later(name, file, entry) for file in _files(Path(path)) for name, entry in entries_of(file).items()}


def later(name: str, file: Path, entry: dict[str, Any]) -> torch.Tensor:
    """A tensor of a file, by its entry, that is read when it is used."""
    if entry["dtype"] not in DTYPES:
        raise CheckpointError(f"{name!r} is of dtype {entry['dtype']} in {file}, which torch does not have")

    def obtain(box: Box) -> torch.Tensor:
        return read(_mapped(name, file, entry), box).clone(memory_format=torch.contiguous_format)

    return deferred(torch.empty(entry["shape"], dtype=DTYPES[entry["dtype"]], device="meta"), obtain)


__all__ = ["export", "load", "raw_bytes", "state_dict"]
