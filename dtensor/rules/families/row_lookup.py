"""Own rows: where indices into a sharded dimension point to on this rank.

    global index -> own_rows -> index into this rank's rows, and whether it is one of them

An index of another rank's row is looked up in the nearest of this one's, and what is found there is masked. One that
lies outside the whole dimension is nobody's: it is mapped past this rank's last row, for the local operator to refuse.
Its own check of bounds does that, with an exception on the CPU and a device assertion on a GPU, in eager code as in
Inductor's: nothing is added to the graph, and nothing waits for the device.
"""

from typing import Any

import torch

from ...comm.collectives import emit
from ...mesh.local_sizes import local_length
from ...mesh.mesh import group_name


def first_row(size: Any, axes: tuple[int, ...], mesh: Any, device: Any) -> torch.Tensor:
    """Index, as an int64 tensor of one element, of this rank's first row when `size` rows are cut by `axes` in turn."""
    total = torch.zeros(1, dtype=torch.int64, device=device)
    for axis in axes:
        n = mesh.size(axis)
        step = -(-size // n)
        # The coordinate by itself, so that a graph looks it up once.
        place = emit.shard(torch.arange(0, n, device=device), 0, group_name(mesh, axis))
        total = total + place * step
        size = local_length(size, group_name(mesh, axis))
    return total


def own_rows(
    index: torch.Tensor, size: Any, own: Any, axes: tuple[int, ...], mesh: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where `index` points to in this rank's `own` (at least one) of `size` rows; and which are its own.

    That is the nearest of its own for others' rows, and `own` or more for an index that is not in 0 to size - 1.
    """
    nearest = index.clamp(0, size - 1)
    outside = nearest != index if size != 0 else torch.ones_like(index, dtype=torch.bool)
    row = nearest - first_row(size, axes, mesh, index.device)
    row = row if index.dim() else row.reshape(())
    near = row.clamp(0, own - 1)
    mine = near == row
    return near.add(outside, alpha=own), mine


def with_a_row(source: torch.Tensor, dim: int) -> torch.Tensor:
    """`source`, or where this rank has no rows of it one row of zeros: something to look up in."""
    if source.shape[dim] != 0:
        return source
    return source.new_zeros([1 if d == dim else n for d, n in enumerate(source.shape)])


class bounds:
    """Context in which an index that the local operator refuses is refused in terms of the global tensor.

    Args:
        index: the indices, global.
        size: length of the dimension that they point into.
        dim: that dimension.
        error: what kind the operator raises on one device; None if the local operator is the same.
        least: the least legal index.
        what: what the operator calls an index.
        ignored: an index that is always legal.
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
            raise (self.error or kind)(found) from error


__all__ = ["bounds", "first_row", "own_rows", "with_a_row"]
