"""Sends a parameter, and its gradient, in fewer bits than they are computed in."""

from math import prod
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from ...comm import row_encoding  # noqa: F401  (it defines the operators)
from ...layout.layout import Layout
from ...mesh.mesh import facts
from ...tensor.tensor import DTensor


def gathered(x: DTensor, whole: Layout, sent: torch.dtype) -> DTensor:
    """`x` in the layout `whole`, in which one dim is cut by one axis less; sent as `sent`, in the dtype of `x`.

    Args:
        x: the sharded tensor; the axis is the innermost that cuts its dim.
        whole: the layout of the result.
        sent: a floating point dtype: one of 16 bits, to which `x` is cast, or one of 8, with scales
            (`dtensor.comm.row_encoding`). One that is no narrower than that of `x` is not used.
    """
    found = _cut(x._spec.layout, whole)
    if found is None or sent.itemsize >= x.dtype.itemsize:
        return torch.ops.dtensor.redistribute(x, whole.text, False)
    if sent.itemsize > 1:
        made = torch.ops.dtensor.redistribute(x.to(sent), whole.text, False)
        return made.to(x.dtype)
    dim, axis = found
    shape = list(x._spec.with_layout(whole).local_shape())
    rows = torch.ops.dtensor.encode_rows(x.to_local(), dim, sent)
    message = _moved(rows, x.device_mesh, axis, (shape[dim], rows.shape[1]), 0, None)
    made = torch.ops.dtensor.decode_rows(message, shape, dim, sent, x.dtype)
    return DTensor(made, x.device_mesh, whole, x.shape, x.stride())


def averaged(
    grad: torch.Tensor, entering: Layout, target: Layout, mesh: DeviceMesh, sizes: tuple[Any, Any], sent: torch.dtype
) -> DTensor:
    """A gradient averaged over axes of `mesh`: every rank sends each other its rows as `sent`, for which that one adds
    them up in float32. Over the axis that shards the result it keeps these; over others it sends the means to all.

    Args:
        grad: this rank's gradient, with two dims or more.
        entering: its layout, in which it is partial over all these axes.
        target: the layout of the result, of which `sizes` are shape and strides.
        sent: a floating point dtype of 8 bits.
    """
    over = [axis for axis, _ in entering.partial if (axis, "avg") not in target.partial]
    dim, shard = _cut(target, entering) or (0, None)
    for axis in sorted(over, key=lambda axis: axis != shard):  # first over that one, as less is left then
        ranks, shape = facts(mesh).shape[axis], list(grad.shape)
        if ranks == 1:
            continue
        rows = torch.ops.dtensor.encode_rows(grad, dim, sent)
        mine = _moved(rows.unsqueeze(0), mesh, axis, (ranks, *rows.shape), 0, 1)
        part = [*shape[:dim], mine.shape[1], *shape[dim + 1 :]]
        grad = torch.ops.dtensor.mean_rows(mine, part, dim, sent, torch.float32)
        if axis != shard:
            means = torch.ops.dtensor.encode_rows(grad, dim, sent)
            means = _moved(means, mesh, axis, tuple(rows.shape), 0, None)
            grad = torch.ops.dtensor.decode_rows(means, shape, dim, sent, torch.float32)
    return DTensor(grad, mesh, target, *sizes)


def _cut(sharded: Layout, whole: Layout) -> tuple[int, int] | None:
    """The dim that `sharded` cuts by an axis more than `whole`, and that axis; None if there is none."""
    return next(((d, a[-1]) for d, (a, b) in enumerate(zip(sharded.dims, whole.dims)) if a != b), None)


def _moved(
    rows: torch.Tensor, mesh: DeviceMesh, axis: int, shape: tuple[int, ...], src: int, dst: int | None
) -> torch.Tensor:
    """Parts of a tensor of `shape` along `src`, one for each rank of an axis, as parts along `dst`; None for all of it.
    Nothing moves along the other axes, over which each rank has a tensor of its own."""

    def cut(dim: int | None) -> Layout:
        return Layout.make(len(facts(mesh).shape), tuple([(axis,) if d == dim else () for d in range(len(shape))]), ())

    strides = tuple([prod(shape[d + 1 :]) for d in range(len(shape))])
    message = DTensor(rows, mesh, cut(src), shape, strides)
    return torch.ops.dtensor.redistribute(message, cut(dst).text, False).to_local()


__all__ = ["averaged", "gathered"]
