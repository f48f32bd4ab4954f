"""save: time to save and to load a sharded state, compared with torch.distributed.checkpoint and without checksums.

Two ranks on this machine each hold half of each tensor. A save writes to an empty folder, and on all sides it includes
the sync to disk. A load reads what was just written, so it reads from memory. "without checksums" is a save of this
library with a checksum that costs nothing.
"""

import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed import tensor as theirs
from torch.distributed.device_mesh import init_device_mesh

import dtensor as ours
from dtensor import Checkpoints

from ..effort import Effort
from ..ranks import on_ranks
from ..record import OURS, Record, Setting
from ..timing import compared, interleaved

RANKS = 2
TORCH, UNCHECKED = "torch.distributed.checkpoint", "without checksums"
AMOUNTS: dict[str, tuple[tuple[tuple[int, int], ...], int]] = {
    "tiny": (((2, 1 << 10),), 2),
    "quick": (((500, 1 << 12), (16, 1 << 22)), 9),
    "full": (((2000, 1 << 12), (16, 1 << 22), (16, 1 << 24)), 15),
}
"""(pairs of the number of tensors and the float32 elements of each; rounds)."""

Times = dict[str, dict[str, list[float]]]


def state(lib: Any, count: int, size: int) -> dict[str, torch.Tensor]:
    """Return `count` tensors of library `lib` that are sharded over the ranks."""
    mesh = init_device_mesh("cpu", (RANKS,))
    whole = torch.arange(float(size))
    return {f"layer.{i}.weight": lib.distribute_tensor(whole + i, mesh, [lib.Shard(0)]) for i in range(count)}


def on_rank(rank: int, count: int, size: int, rounds: int, name: str, end: Any) -> Times:
    """Return "save" and "load" -> side -> seconds in each round."""
    root, mine, other = Path(name), state(ours, count, size), state(theirs, count, size)
    checked, unchecked = Checkpoints(root / "checked"), Checkpoints(root / "unchecked")

    def save_unchecked() -> None:
        with mock.patch.object(zlib, "crc32", return_value=0):
            unchecked.save(mine, 0)

    def empty() -> None:
        dist.barrier()
        if rank == 0:
            for folder in root.iterdir():
                shutil.rmtree(folder)
        dist.barrier()

    def written() -> None:
        empty()
        checked.save(mine, 0)
        dcp.save(other, checkpoint_id=root / "theirs")
        dist.barrier()

    saves: dict[str, Callable[[], Any]] = {
        OURS: lambda: checked.save(mine, 0),
        UNCHECKED: save_unchecked,
        TORCH: lambda: dcp.save(other, checkpoint_id=root / "theirs"),
    }
    loads: dict[str, Callable[[], Any]] = {
        OURS: lambda: checked.load(mine),
        TORCH: lambda: dcp.load(other, checkpoint_id=root / "theirs"),
    }
    found = {}
    for figure, runs, before in (("save", saves, empty), ("load", loads, dist.barrier)):
        written()
        interleaved(runs, 1, before=before)
        found[figure] = interleaved(runs, rounds, before=before)
    return found


def run(effort: Effort) -> Iterator[Record]:
    """Yield records for each number of tensors."""
    amounts, rounds = effort.of(AMOUNTS)
    for count, size in effort.progress(amounts, "save"):
        with tempfile.TemporaryDirectory(prefix="dtensor-bench-") as folder:
            times: Times = on_ranks(on_rank, RANKS, count, size, rounds, folder)
        at = Setting("save", f"{count} tensors of {4 * size / 1e6:.3g} MB", "Shard(0)", RANKS)
        for figure, of_side in times.items():
            for peer in list(of_side)[1:]:
                yield at.timed(figure, "ms", compared(of_side[OURS], of_side[peer], 1e3), peer)


__all__ = ["run"]
