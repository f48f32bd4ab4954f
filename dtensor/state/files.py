"""The storage layer that torch.distributed.checkpoint uses to write and read the files of a checkpoint.

Torch decides which rank writes which part of a tensor (see `dtensor.tensor.dcp_protocol`), and `index` records where
the parts are. Nothing in a checkpoint is executed: values other than tensors are read by torch's loader for weights,
which creates numbers, strings, containers and tensors and rejects everything else. A save rejects the same values. All
ranks fail together: torch reports errors in planning, writing and reading to all ranks, and `tried` does so for the
steps before and after.
"""

import io
import os
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import StorageReader, StorageWriter
from torch.distributed.checkpoint.api import CheckpointException
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

from ..errors import CheckpointError
from ..program.stages import Stage
from .differences import MOST, differences
from .index import DamagedError, Index, StoredPart, read_index, write_index
from .optimizers import give_back, to_load
from .safetensors import raw_bytes


class Writer(StorageWriter):
    """Writes this rank's part of a checkpoint to a file in `folder`. Finally the first rank writes the index."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def reset(self, checkpoint_id: Any = None) -> None: ...

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self.file: str = f"rank-{kwargs.get('rank', 0):05d}.bin"

    def prepare_local_plan(self, plan: Any) -> Any:
        return plan

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        return plans

    def write_data(self, plan: Any, planner: Any) -> Future[list[WriteResult]]:
        results, begin = [], 0
        # Checksums are computed in a thread while the data is written.
        with (
            open(self.folder / self.file, "wb") as file,
            ThreadPoolExecutor(1) as beside,
            Stage("writing", inside=True) as stage,
        ):
            for k, item in enumerate(plan.items):
                stage.what = f"writing part {k + 1} of {len(plan.items)}"
                data = planner.resolve_data(item)
                is_value = item.type == WriteItemType.BYTE_IO
                raw = data.getbuffer() if is_value else raw_bytes(data)
                crc32 = beside.submit(zlib.crc32, raw)
                file.write(raw)
                sizes = () if is_value else tuple(item.tensor_data.chunk.sizes)
                part = StoredPart(self.file, begin, len(raw), crc32.result(), sizes)
                begin += len(raw)
                results.append(WriteResult(item.index, part.length, part))
            file.flush()
            os.fsync(file.fileno())
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        written = [result for of_rank in results for result in of_rank]
        tensors: dict[str, Any] = {}
        values: dict[str, StoredPart] = {}
        for name, kind in metadata.state_dict_metadata.items():
            if isinstance(kind, TensorStorageMetadata):
                tensors[name] = kind.properties.dtype, kind.size, {}
        for result in written:
            name, part = result.index.fqn, result.storage_data
            if name in tensors:
                tensors[name][2][torch.Size(result.index.offset or ())] = part
            else:
                values[name] = part
        names = sorted({result.storage_data.file for result in written})
        files = {name: (self.folder / name).stat().st_size for name in names}
        write_index(self.folder, Index(files, metadata.planner_data or {}, tensors, values))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


class Reader(StorageReader):
    """Reads the parts of the checkpoint in `folder` that this rank needs. The constructor reads the index.

    Raises:
        DamagedError: as for `read_index`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder: Path = folder
        self.index: Index = read_index(folder)

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
        self.where: Any = metadata.storage_data

    def prepare_local_plan(self, plan: Any) -> Any:
        return plan

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        return plans

    def read_data(self, plan: Any, planner: Any) -> Future[None]:
        wanted: dict[StoredPart, list[Any]] = {}
        for item in plan.items:
            wanted.setdefault(self.where[item.storage_index], []).append(item)
        with Stage("reading", inside=True) as stage:
            for k, part in enumerate(sorted(wanted, key=lambda p: (p.file, p.begin))):
                stage.what = f"reading part {k + 1} of {len(wanted)}"
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
    """Torch's planner for saving, but values that could not be read without executing code are rejected."""

    def transform_object(self, write_item: Any, object: Any) -> Any:
        if write_item.type != WriteItemType.BYTE_IO:
            return super().transform_object(write_item, object)
        try:
            data = super().transform_object(write_item, object)
            torch.load(io.BytesIO(data.getbuffer()), weights_only=True)
        except Exception as error:  # what pickling raises depends on the object
            raise CheckpointError(
                f"{write_item.index.fqn!r} has an object of class {type(object).__name__}, but a checkpoint holds only "
                "tensors, numbers, strings and containers of these; save its contents, such as its state_dict()"
            ) from error
        return data


class SafeLoadPlanner(DefaultLoadPlanner):
    """Torch's planner for loading, but nothing that it reads is executed, and it names all that does not match."""

    def create_local_plan(self) -> Any:
        """As torch's.

        Raises:
            CheckpointError: names or shapes in the checkpoint are not those of the state.
        """
        metadata: Any = self.metadata
        there, wanted = metadata.state_dict_metadata, self.state_dict
        missing = [name for name in wanted if name not in there]
        if missing:
            told = differences(missing, [name for name in there if name not in wanted])
            raise CheckpointError(f"{told}; load it into the model that was saved, under the names that it had")
        shapes = [
            f"{name!r} is {list(there[name].size)}, but {list(x.size())} in the state"
            for name, x in wanted.items()
            if isinstance(x, torch.Tensor)
            and isinstance(there[name], TensorStorageMetadata)
            and there[name].size != x.size()
        ]
        if shapes:
            more = f" and {len(shapes) - MOST} more" if len(shapes) > MOST else ""
            raise CheckpointError(
                f"{'; '.join(shapes[:MOST])}{more}; load it into a model of the sizes that were saved"
            )
        return super().create_local_plan()

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        try:
            found = torch.load(value, weights_only=True)
        except Exception as error:  # bytes that are not a pickle can raise anything
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise CheckpointError(
                f"{name!r} is not read, because it is not a tensor, number, string or container: {reason}"
            ) from error
        owner: Any = self.original_state_dict
        *path, last = self.mappings[name] if self.flatten_state_dict else (name,)
        for key in path:
            owner = owner[_key(owner, key)]
        owner[_key(owner, last)] = found


def _key(owner: Any, name: Any) -> Any:
    """The key of a container that a checkpoint has by `name`: torch makes text of the keys of a dict."""
    return next((key for key in owner if str(key) == name), name) if isinstance(owner, dict) else name


def save_from(state: dict[str, Any], folder: Path, group: Any) -> None:
    """Write the `state` of the ranks of `group` to `folder`. It must not contain objects with a `state_dict`.

    Raises:
        CheckpointException: torch's error, on all ranks, with the failure of each rank.
    """
    dcp.save(state, storage_writer=Writer(folder), planner=SafeSavePlanner(), process_group=group)


def read_into(state: dict[str, Any], reader: Any, group: Any) -> tuple[str, bool]:
    """Read a checkpoint into `state`, including modules, optimizers and objects in it that have a `state_dict`.

    Returns:
        A description of what went wrong ("" for nothing) and whether it is damage. The same on all ranks.
    """
    given, wrong = tried(lambda: to_load(state, reader.read_metadata()), group)
    if wrong:
        return wrong, False
    try:
        dcp.load(given, storage_reader=reader, planner=SafeLoadPlanner(), process_group=group)
    except CheckpointException as error:
        return said(error), any(isinstance(found, DamagedError) for found, _ in error.failures.values())
    return tried(lambda: give_back(state, given), group)[1], False


def gathered(mine: Any, group: Any) -> list[Any]:
    """The values of all ranks of `group`, by rank; only this rank's if there is no group."""
    if group is None:
        return [mine]
    found = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, mine, group=group)
    return found


def attempted(act: Callable[[], Any]) -> tuple[Any, str]:
    """The result of `act` and "", or None and its error as a line of text."""
    try:
        return act(), ""
    except Exception as error:
        return None, line(error)


def tried(act: Callable[[], Any], group: Any) -> tuple[Any, str]:
    """The result of `act` on this rank, and a description of its errors on all ranks, "" if there are none."""
    made, wrong = attempted(act)
    return made, of_ranks(gathered(wrong, group))


def said(error: BaseException) -> str:
    """An error in one line, without the tracebacks of all ranks that torch's message has."""
    if not isinstance(error, CheckpointException):
        return line(error)
    told = [error.failures.get(rank) for rank in range(max(error.failures) + 1)]
    return of_ranks(["" if failure is None else line(failure[0]) for failure in told])


def line(error: BaseException) -> str:
    """An error in one line. The class is left out for errors of this library, whose messages are self-explanatory."""
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"


def of_ranks(texts: Sequence[str]) -> str:
    """The non-empty texts of all ranks as one text, each once and followed by its ranks."""
    lines: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        if text:
            lines.setdefault(text, []).append(rank)
    return "; ".join(f"{text} (rank {', '.join(map(str, ranks))})" for text, ranks in lines.items())


__all__ = [
    "Reader",
    "Writer",
    "attempted",
    "gathered",
    "line",
    "of_ranks",
    "read_into",
    "said",
    "save_from",
    "tried",
]
