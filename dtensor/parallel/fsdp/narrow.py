"""Sends a parameter, and its gradient, in fewer bits than they are computed in."""

from math import prod
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from ...comm import row_encoding  # noqa: F401  (it defines the operators)
from ...layout.layout import Layout
from ...mesh.mesh import facts
from ...tensor.tensor import DTensor


def gathered(x: DTensor, whole: Layout, data_mesh: DeviceMesh, dim: int, sent: torch.dtype) -> DTensor:
    """`x` in the layout `whole`, in which the data axes replicate; sent as `sent`, in the dtype of `x`.

    Args:
        x: sharded over the last axis of `data_mesh`, innermost, along `dim`.
        whole: its layout, but for the data axes.
        data_mesh: the data axes.
        dim: the dim that is gathered.
        sent: a floating point dtype: one of 16 bits, to which `x` is cast, or one of 8, with scales
            (`dtensor.comm.row_encoding`).
    """
    if sent.itemsize > 1:
        made = torch.ops.dtensor.redistribute(x.to(sent), whole.text, False)
        return made.to(x.dtype)
    shape = list(x._spec.with_layout(whole).local_shape())
    rows = torch.ops.dtensor.encode_rows(x.to_local(), dim, sent)
    message = _moved(rows, data_mesh, (shape[dim], rows.shape[1]), 0, None)
    made = torch.ops.dtensor.decode_rows(message, shape, dim, sent, x.dtype)
    return DTensor(made, x.device_mesh, whole, x.shape, x.stride())


def scattered(
    grad: torch.Tensor, like: Layout, mesh: DeviceMesh, sizes: Any, data_mesh: DeviceMesh, dim: int, sent: torch.dtype
) -> DTensor:
    """The mean of the gradients of the ranks of the last data axis, each of which gets its part: every rank sends its
    rows to the rank that holds them, as `sent`, and that one adds them up in float32.

    Args:
        grad: this rank's gradient, with two dims or more, whole along the data axes.
        like: the layout of the result on `mesh`, for which `sizes` are its shape and strides.
        dim: the dim along which the last data axis shards.
        sent: a floating point dtype of 8 bits.
    """
    rows = torch.ops.dtensor.encode_rows(grad, dim, sent)
    ranks = facts(data_mesh).shape[-1]
    mine = _moved(rows.unsqueeze(0), data_mesh, (ranks, *rows.shape), 0, 1)
    shape = [*grad.shape[:dim], mine.shape[1], *grad.shape[dim + 1 :]]
    made = torch.ops.dtensor.mean_rows(mine, shape, dim, sent, torch.float32)
    return DTensor(made, mesh, like, *sizes)


def _moved(rows: torch.Tensor, mesh: DeviceMesh, shape: tuple[int, ...], src: int, dst: int | None) -> torch.Tensor:
    """Parts of a tensor of `shape` along `src`, one for each rank of the last axis, as parts along `dst`; None for all
    of it."""
    axes = len(facts(mesh).shape)

    def cut(dim: int | None) -> Layout:
        return Layout.make(axes, tuple([(axes - 1,) if d == dim else () for d in range(len(shape))]), ())

    strides = tuple([prod(shape[d + 1 :]) for d in range(len(shape))])
    return torch.ops.dtensor.redistribute(
        DTensor(rows, mesh, cut(src), shape, strides), cut(dst).text, False
    ).to_local()


__all__ = ["gathered", "scattered"]
