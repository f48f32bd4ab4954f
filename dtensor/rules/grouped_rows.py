"""Products of rows that are sorted by group: the operators that the layers of experts are computed with.

    rows_by_group(x, w, ends, of)      (n, k), (e, k, m) -> (n, m)   each row with the matrix of its group
    rows_within_groups(x, y, ends, of) (n, k), (n, m) -> (e, k, m)   the transposed rows of a group with its rows

Of a number `of` of groups these are e, those that this rank has; that is for estimates only. `ends` (e) says where each
group ends. Rows after the last end belong to no group: they are not computed, and what the first operator returns for
them is zero on the CPU and unspecified on a GPU. Where groups end is only read by the kernels, so that a graph is the
same for any routing, and a GPU does not wait for the host.
"""

from typing import Any

import torch
import torch.nn.functional as F

from ..mesh.operator_library import define


def aligned(x: torch.Tensor) -> torch.Tensor:
    """The same matrices, laid out so that each row (or column, if transposed) starts at a multiple of 16 bytes, as
    kernels of grouped products take them."""
    if x.stride(-1) != 1:
        return aligned(x.mT).mT if x.stride(-2) == 1 else aligned(x.contiguous())
    short = -x.shape[-1] % (16 // x.itemsize)
    steps = (*x.stride()[:-1], x.storage_offset())
    if all(isinstance(n, int) and n * x.itemsize % 16 == 0 for n in steps):
        return x
    return F.pad(x, (0, short))[..., : x.shape[-1]]


def _spans(ends: torch.Tensor) -> Any:
    """Each group that has rows, with where it begins and ends."""
    begin = 0
    for group, end in enumerate(ends.tolist()):
        if end > begin:
            yield group, begin, end
        begin = end


def _by_group(x: torch.Tensor, w: torch.Tensor, ends: torch.Tensor, of: int) -> torch.Tensor:
    out = x.new_empty(x.shape[0], w.shape[2])
    if out.device.type != "cpu":
        return F.grouped_mm(aligned(x), aligned(w), offs=ends) if out.numel() and w.numel() else out.zero_()
    last = 0
    for group, begin, end in _spans(ends):
        torch.mm(x[begin:end], w[group], out=out[begin:end])
        last = end
    out[last:].zero_()
    return out


def _within_groups(x: torch.Tensor, y: torch.Tensor, ends: torch.Tensor, of: int) -> torch.Tensor:
    made = x.new_zeros(ends.shape[0], x.shape[1], y.shape[1])
    if made.device.type != "cpu":
        return F.grouped_mm(aligned(x).t(), aligned(y), offs=ends) if made.numel() and x.shape[0] else made
    for group, begin, end in _spans(ends):
        torch.mm(x[begin:end].t(), y[begin:end], out=made[group])
    return made


define(
    "rows_by_group(Tensor x, Tensor w, Tensor ends, SymInt of) -> Tensor",
    _by_group,
    lambda x, w, ends, of: x.new_empty(x.shape[0], w.shape[2]),
)
define(
    "rows_within_groups(Tensor x, Tensor y, Tensor ends, SymInt of) -> Tensor",
    _within_groups,
    lambda x, y, ends, of: x.new_empty(ends.shape[0], x.shape[1], y.shape[1]),
)

rows_by_group: Any = torch.ops.dtensor.rows_by_group.default
rows_within_groups: Any = torch.ops.dtensor.rows_within_groups.default

__all__ = ["aligned", "rows_by_group", "rows_within_groups"]
