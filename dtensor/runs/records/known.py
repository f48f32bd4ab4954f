"""What a local tensor holds: the value that was recorded for it, and how to see whether it has one."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...comm.pending_tensor import Pending
from ...errors import PlacementError
from ...mesh.tensor_spec import Spec
from ...tensor.tensor import DTensor
from ...tensor.torch_dtensor import is_torch_dtensor, layout_of

PLAIN = (torch.Tensor, nn.Parameter)
NOTHING = -1
"""The number of a value that is none: memory that nothing was written to."""
OTHER_ORDER = (-1,)
"""In place of the shape that a value was recorded with, for a view that may have its elements in another order."""


@dataclass(frozen=True)
class Known:
    """What a local tensor holds.

    Attributes:
        token: which recorder knows it.
        index: the number of the value; `NOTHING` if it holds none.
        spec: its spec; None for a plain tensor.
        shape: the global shape that it was recorded with; `OTHER_ORDER` if it is a view.
        owner: the parameter that an optimizer computed it for; "" outside of optimizers.
    """

    token: object
    index: int
    spec: Spec | None
    shape: tuple[int, ...]
    owner: str = ""


class Local:
    """A local tensor with its spec, where no DTensor is at hand."""

    def __init__(self, local: torch.Tensor, spec: Spec) -> None:
        self._local_tensor, self._spec = local, spec


def opened(x: Any) -> tuple[torch.Tensor, Spec | None]:
    """The local tensor of `x` and its spec; None for a plain tensor."""
    if type(x) in PLAIN:
        return x, None
    if isinstance(x, (DTensor, Local)):
        local = x._local_tensor
        return (local.wait() if type(local) is Pending else local), x._spec
    if is_torch_dtensor(x):
        try:
            layout = layout_of(x)
        except PlacementError:  # what no layout describes, such as the interleaved pieces of a view, is not recorded
            return x, None
        return x._local_tensor, Spec.make(x.device_mesh, layout, x.shape, x.stride(), x.dtype)
    return x, None


def is_same(a: Spec | None, b: Spec | None) -> bool:
    """Whether two specs distribute alike; strides do not matter."""
    return a is b or (
        a is not None and b is not None and a.layout is b.layout and a.mesh is b.mesh and a.shape == b.shape
    )


def is_real(x: Any) -> bool:
    """Whether `x` has values that can be read: it is no fake tensor, and neither sparse nor quantized."""
    local, spec = opened(x)
    if spec is not None and spec.coordinate is None:
        return False
    return (
        type(local) in PLAIN
        and local.layout is torch.strided
        and local.device.type != "meta"
        and not local.is_quantized
    )


def memory_of(local: torch.Tensor) -> tuple[Any, ...]:
    """Where a tensor's values are: equal for two Python objects of the same memory, shape and dtype."""
    return local.data_ptr(), tuple(local.shape), local.dtype


__all__ = ["NOTHING", "OTHER_ORDER", "PLAIN", "Known", "Local", "is_real", "is_same", "memory_of", "opened"]
