"""Sends a parameter in fewer bits than it is computed in."""

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
    axes = len(facts(data_mesh).shape)
    cut, all_of_it = Layout.make(axes, ((axes - 1,), ()), ()), Layout.make(axes, ((), ()), ())
    message = DTensor(rows, data_mesh, cut, (shape[dim], rows.shape[1]), (rows.shape[1], 1))
    message = torch.ops.dtensor.redistribute(message, all_of_it.text, False).to_local()
    made = torch.ops.dtensor.decode_rows(message, shape, dim, sent, x.dtype)
    return DTensor(made, x.device_mesh, whole, x.shape, x.stride())


__all__ = ["gathered"]
