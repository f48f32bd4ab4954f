"""Maps indices into a sharded dim to indices into this rank's rows.

    global index -> own_rows -> index into this rank's rows, and whether it is one of them

The index of another rank's row is mapped to the nearest row of this rank, and the result is masked by the caller. An
index outside the global dim is mapped past this rank's last row, so that the local operator refuses it with its own
bounds check: an exception on the CPU, a device assertion on a GPU, in eager code and in Inductor's. Nothing is added to
the graph, and nothing waits for the device.
"""

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from ...comm.collectives import emit
from ...mesh.local_sizes import local_length
from ...mesh.mesh import group_name


def first_row(size: Any, axes: tuple[int, ...], mesh: DeviceMesh, device: Any) -> torch.Tensor:
    """Index of this rank's first row if `size` rows are sharded over `axes` in turn: an int64 tensor of one element."""
    total = torch.zeros(1, dtype=torch.int64, device=device)
    for axis in axes:
        n = mesh.size(axis)
        step = -(-size // n)
        # The coordinate is computed separately, so that a graph looks it up only once.
        place = emit.shard(torch.arange(0, n, device=device), 0, group_name(mesh, axis))
        total = total + place * step
        size = local_length(size, group_name(mesh, axis))
    return total


def own_rows(
    index: torch.Tensor, size: Any, own: Any, axes: tuple[int, ...], mesh: DeviceMesh
) -> tuple[torch.Tensor, torch.Tensor]:
    """Map `index`, into `size` rows, to this rank's `own` rows (at least one); also return which indices are its own.

    An index of another rank's row is mapped to the nearest own row, and one outside 0 to size - 1 to `own` or more.
    """
    nearest = index.clamp(0, size - 1)
    outside = nearest != index if size != 0 else torch.ones_like(index, dtype=torch.bool)
    row = nearest - first_row(size, axes, mesh, index.device)
    row = row if index.dim() else row.reshape(())
    near = row.clamp(0, own - 1)
    mine = near == row
    return near.add(outside, alpha=own), mine


def with_a_row(source: torch.Tensor, dim: int) -> torch.Tensor:
    """`source`, or one row of zeros if this rank has no rows, so that a lookup has something to read."""
    if source.shape[dim] != 0:
        return source
    return source.new_zeros([1 if d == dim else n for d, n in enumerate(source.shape)])


class bounds:
    """Context that restates the local operator's error about an index in terms of the global tensor.

    Args:
        index: the global indices.
        size: global length of the dim that they index.
        dim: that dim.
        error: the exception type that the operator raises on one device; None for the local operator's own.
        least: the smallest valid index.
        what: the operator's word for an index in its messages.
        ignored: an index that is always valid.
    """

    __slots__ = ("dim", "error", "ignored", "index", "least", "size", "what")

    def __init__(
        self,
        index: Any,
        size: Any,
        dim: int,
        *,
        error: Any = None,
        least: int = 0,
        what: str = "index",
        ignored: int | None = None,
    ) -> None:
        self.index: torch.Tensor = index
        self.size: Any = size
        self.dim: int | None = dim
        self.error: Any = error
        self.least: int = least
        self.what: str = what
        self.ignored: int | None = ignored

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        # Only plain tensors on the CPU have values to look at: after a device assertion nothing can be read.
        index = self.index
        if kind not in (IndexError, RuntimeError) or type(index) is not torch.Tensor or index.device.type != "cpu":
            return
        bad = [i for i in index.flatten().tolist() if not self.least <= i < self.size and i != self.ignored]
        if bad:
            found = f"{self.what} {bad[0]} is out of bounds for dimension {self.dim} with size {self.size}"
            raise (self.error or kind)(found) from None


__all__ = ["bounds", "first_row", "own_rows", "with_a_row"]
