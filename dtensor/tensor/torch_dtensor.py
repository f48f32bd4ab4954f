"""Between dtensor and torch.distributed.tensor: tensors, without a copy.

Both kinds of tensor hold the same local tensor on the same DeviceMesh; only what is said of it differs. The order in
which axes cut one dimension, which torch writes as strided shards, is kept. This is the only module that knows torch's
DTensor, and imports it when it is first needed.
"""

from collections.abc import Sequence
from typing import Any

import torch

from ..errors import PlacementError
from ..layout.layout import Layout
from ..layout.placements import Partial, Placement, Replicate, Shard, as_placements
from ..torch_private.core import shard_order, strided_shard
from .tensor import DTensor

TORCH = "torch.distributed.tensor"


def _theirs() -> Any:
    """The module torch.distributed.tensor."""
    import torch.distributed.tensor as theirs

    return theirs


def is_torch_dtensor(x: Any) -> bool:
    """Whether `x` is a DTensor of torch.distributed.tensor; imports nothing."""
    return any(c.__name__ == "DTensor" and c.__module__.startswith(TORCH) for c in type(x).__mro__)


def from_torch(x: Any) -> DTensor:
    """A DTensor that shares the memory of `x`, a torch.distributed.tensor.DTensor; gradients flow back to it.

    Mesh, placements, and the order of axes that cut one dimension stay. A gradient arrives at `x` as `x` is placed,
    with Replicate for Partial.

    Raises:
        TypeError: `x` is no DTensor of torch.
        PlacementError: one of its placements is a private one of torch that has no meaning outside it.
    """
    if not is_torch_dtensor(x):
        raise TypeError(
            f"from_torch takes a torch.distributed.tensor.DTensor, got {type(x).__name__}; write distribute_tensor or "
            "DTensor.from_local for a plain tensor"
        )
    for p in x.placements:
        if type(p).__name__ not in ("Shard", "Replicate", "Partial", "_StridedShard"):
            raise _unknown(x)
    if torch.compiler.is_dynamo_compiling():  # what is compiled is not differentiated twice
        # The spec cannot be read in a trace; hooks and from_local make tensors that are cut in mesh order.
        placements = as_placements(x.placements, x.device_mesh.ndim, x.dim())
        local = x.to_local(grad_placements=_torch_placements(_without_partial(placements), x.device_mesh))
        return DTensor.from_local(local, x.device_mesh, placements, shape=tuple(x.shape), stride=tuple(x.stride()))
    return _FromTorch.apply(x, _layout_of(x))


def to_torch(x: DTensor) -> Any:
    """A torch.distributed.tensor.DTensor that shares the memory of `x`; gradients flow back to it.

    Raises:
        TypeError: `x` is no DTensor of dtensor.
    """
    if not isinstance(x, DTensor):
        raise TypeError(f"to_torch takes a dtensor.DTensor, got {type(x).__name__}")
    local = x.to_local()
    mesh = x.device_mesh
    placements = _torch_placements(x.placements, mesh)
    return _theirs().DTensor.from_local(
        local, mesh, placements, run_check=False, shape=x.size(), stride=tuple(x.stride())
    )


def _layout_of(x: Any) -> Layout:
    order = shard_order(x)
    if order is None:
        raise _unknown(x)
    partial = [(a, p.reduce_op) for a, p in enumerate(x.placements) if p.is_partial()]
    return Layout.make(len(x.placements), tuple([order.get(d, ()) for d in range(x.dim())]), tuple(partial))


def _unknown(x: Any) -> PlacementError:
    return PlacementError(
        f"a tensor placed as {x.placements!r} is what an operator of torch leaves between two others; write "
        "x.redistribute(placements=…) with Shard, Replicate and Partial first"
    )


def _without_partial(placements: Sequence[Placement]) -> list[Placement]:
    return [Replicate() if isinstance(p, Partial) else p for p in placements]


def _torch_placements(placements: Sequence[Placement], mesh: Any) -> list[Any]:
    """What torch calls placements: an axis cut after a later one is a strided shard of as many strides. Makes no
    layout, which in a trace would be one that others do not have."""
    theirs = _theirs()
    made: list[Any] = []
    for axis, p in enumerate(placements):
        if isinstance(p, Shard):
            cuts = [(a, q) for a, q in enumerate(placements) if isinstance(q, Shard) and q.dim == p.dim]
            axes = [a for _, a in sorted([(a if q.cut is None else q.cut, a) for a, q in cuts])]
            strides = 1
            for before in axes[: axes.index(axis)]:
                strides *= mesh.size(before) if before > axis else 1
            made.append(theirs.Shard(p.dim) if strides == 1 else strided_shard(p.dim, strides))
        else:
            made.append(theirs.Partial(p.reduce_op) if isinstance(p, Partial) else theirs.Replicate())
    return made


class _FromTorch(torch.autograd.Function):
    """A tensor of torch's as one of ours, whose gradient can be differentiated again. That of torch's own `to_local`
    cannot: it is cut off from its graph."""

    @staticmethod
    def forward(ctx: Any, x: Any, layout: Layout) -> Any:
        ctx.set_materialize_grads(False)
        ctx.layout, ctx.mesh = layout.without_partial(), x.device_mesh
        ctx.placements = _torch_placements(ctx.layout.placements, x.device_mesh)
        local = x.to_local()
        return DTensor(local.view_as(local), x.device_mesh, layout, tuple(x.shape), tuple(x.stride()))

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        if grad is None:
            return None, None
        local = torch.ops.dtensor.redistribute(grad, ctx.layout.text, False).to_local()
        theirs = _theirs().DTensor
        made = theirs.from_local(
            local, ctx.mesh, ctx.placements, run_check=False, shape=grad.size(), stride=tuple(grad.stride())
        )
        return made, None


def as_ours(x: Any) -> Any:
    """`from_torch(x)` of a DTensor of torch; anything else as it is."""
    return from_torch(x) if is_torch_dtensor(x) else x


def as_torchs(x: Any) -> Any:
    """`to_torch(x)` of a DTensor; anything else as it is."""
    return to_torch(x) if isinstance(x, DTensor) else x


__all__ = ["TORCH", "as_ours", "as_torchs", "from_torch", "is_torch_dtensor", "to_torch"]
