"""Conversion between this package's DTensor and the one of torch.distributed.tensor, without a copy.

Both classes hold the same local tensor on the same DeviceMesh and differ only in their metadata. The order in which
mesh axes shard one dim, which torch expresses as strided shards, is preserved. This is the only module that handles
torch's DTensor, and it imports it on first use.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from ..comm.from_plain import TORCH, is_torch_dtensor
from ..errors import ArgumentTypeError, PlacementError
from ..layout.layout import Layout
from ..layout.placements import Partial, Placement, Replicate, Shard, as_placements
from ..torch_private.core import shard_order, strided_shard
from .tensor import DTensor

KINDS = ("Shard", "Replicate", "Partial")
STRIDED = "_StridedShard"
"""The kind of placement that torch gives to an axis that shards a dimension after later ones, and to some views."""


def _theirs() -> Any:
    """The module torch.distributed.tensor."""
    import torch.distributed.tensor as theirs

    return theirs


def from_torch(x: Any) -> DTensor:
    """A DTensor that shares the memory of `x`, a `torch.distributed.tensor.DTensor`; differentiable.

    Args:
        x: torch's DTensor. Its mesh, its placements and the order of axes that shard one dim are preserved. It receives
            gradients in its own placements, with Partial replaced by Replicate.

    Raises:
        TypeError: `x` is not a DTensor of torch.
        PlacementError: one of its placements has no equivalent, such as that of a view in which each rank holds every
            other piece (`x.flatten()` of a matrix that is sharded by columns).
    """
    if not is_torch_dtensor(x):
        own = isinstance(x, DTensor)
        fix = "use it as it is" if own else "write distribute_tensor or DTensor.from_local for a plain tensor"
        raise ArgumentTypeError(
            f"from_torch takes a torch.distributed.tensor.DTensor, got "
            f"{'DTensor of dtensor' if own else type(x).__name__}; "
            f"{fix}"
        )
    if torch.compiler.is_dynamo_compiling():  # compiled code is not differentiated twice
        placements = _in_a_trace(x)
        local = x.to_local(grad_placements=_torch_placements(_without_partial(placements), x.device_mesh))
        return DTensor.from_local(local, x.device_mesh, placements, shape=tuple(x.shape), stride=tuple(x.stride()))
    return _FromTorch.apply(x, layout_of(x))


def to_torch(x: DTensor) -> Any:
    """A `torch.distributed.tensor.DTensor` that shares the memory of `x`; differentiable.

    Args:
        x: a DTensor of this package. Its mesh and placements are preserved.

    Raises:
        TypeError: `x` is not a DTensor of this package.
    """
    if not isinstance(x, DTensor):
        raise ArgumentTypeError(
            f"to_torch takes a dtensor.DTensor, got {type(x).__name__}; write distribute_tensor or "
            f"DTensor.from_local for "
            "a plain tensor"
        )
    local = x.to_local()
    mesh = x.device_mesh
    placements = _torch_placements(x.placements, mesh)
    return _theirs().DTensor.from_local(
        local, mesh, placements, run_check=False, shape=x.size(), stride=tuple(x.stride())
    )


def layout_of(x: Any) -> Layout:
    """The layout of torch's DTensor `x`.

    Raises:
        PlacementError: one of its placements has no equivalent.
    """
    order = _order(x)
    partial = [(a, p.reduce_op) for a, p in enumerate(x.placements) if p.is_partial()]
    return Layout.make(len(x.placements), tuple([order.get(d, ()) for d in range(x.dim())]), tuple(partial))


def _in_a_trace(x: Any) -> tuple[Placement, ...]:
    """The placements of `x`, which are in mesh order: a trace can read neither the spec nor the strides of a shard."""
    names = [type(p).__name__ for p in x.placements]
    if STRIDED in names:
        raise PlacementError(
            f"a tensor of shape {list(x.shape)} whose placements are {names} cannot be converted in compiled code; "
            "write from_torch(x) outside of it, and pass the result"
        )
    if any(name not in KINDS for name in names):
        raise _unknown(x)
    return as_placements(x.placements, x.device_mesh.ndim, x.dim())


def _order(x: Any) -> dict[int, tuple[int, ...]]:
    """Sharded dimension of torch's DTensor `x` -> the mesh axes that shard it, outermost first.

    torch has one placement, `_StridedShard`, for two things: an order of axes, as of a parameter that tensor
    parallelism and then FSDP2 sharded, and the interleaved pieces of a view. Where the dimension divides evenly, as
    many pieces as later axes make are that order; where it does not, only the spec knows which of the two is meant.
    """
    placements, mesh = x.placements, x.device_mesh
    if any(type(p).__name__ not in (*KINDS, STRIDED) for p in placements):
        raise _unknown(x)
    strided = {p.dim for p in placements if type(p).__name__ == STRIDED}
    stated, is_order = shard_order(x)
    if stated is not None and not strided:
        return stated
    shards = [(axis, p) for axis, p in enumerate(placements) if type(p).__name__ in ("Shard", STRIDED)]
    order: dict[int, tuple[int, ...]] = {p.dim: () for _, p in shards}
    for axis, p in reversed(shards):
        before = _axes_before(getattr(p, "split_factor", 1), order[p.dim], mesh, axis)
        if before is None:
            raise _interleaved(x)
        order[p.dim] = (*before, axis, *order[p.dim][len(before) :])
    if not is_order and any(x.shape[dim] % math.prod([mesh.size(a) for a in order[dim]]) for dim in strided):
        raise _interleaved(x)
    return order


def _axes_before(strides: int, axes: tuple[int, ...], mesh: DeviceMesh, axis: int) -> tuple[int, ...] | None:
    """The first of `axes` that make the `strides` pieces which `axis` then shards; None if there are no such."""
    for count in range(len(axes) + 1):
        if math.prod([mesh.size(a) for a in axes[:count]]) == strides:
            return axes[:count]
    return () if mesh.size(axis) == 1 else None  # an axis of one rank holds all pieces


def _interleaved(x: Any) -> PlacementError:
    return PlacementError(
        f"a tensor of shape {list(x.shape)} placed as {list(x.placements)!r} is a view whose ranks each hold "
        "interleaved pieces, not one chunk, and dtensor has no layout for that; write "
        f"from_torch(x.redistribute(placements=[{', '.join([_written(p) for p in x.placements])}])), which communicates"
    )


def _written(p: Any) -> str:
    if type(p).__name__ in ("Shard", STRIDED):
        return f"Shard({p.dim})"
    return f"Partial({p.reduce_op!r})" if type(p).__name__ == "Partial" else "Replicate()"


def _unknown(x: Any) -> PlacementError:
    return PlacementError(
        f"a tensor placed as {x.placements!r} has placements that torch only uses between two of its operators; write "
        "x.redistribute(placements=…) with Shard, Replicate and Partial first"
    )


def _without_partial(placements: Sequence[Placement]) -> list[Placement]:
    return [Replicate() if isinstance(p, Partial) else p for p in placements]


def _torch_placements(placements: Sequence[Placement], mesh: DeviceMesh) -> list[Any]:
    """Placements as torch's objects. An axis that splits a dim after a later mesh axis becomes a strided shard.

    Creates no `Layout`: one created in a trace would not be the interned one that others hold.
    """
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
    """Torch's DTensor to ours, with a gradient that can be differentiated again. The gradient of torch's own `to_local`
    cannot, because it is detached from its graph."""

    border = True

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
    """`from_torch(x)` if `x` is a DTensor of torch; anything else is returned unchanged."""
    return from_torch(x) if is_torch_dtensor(x) else x


def as_torchs(x: Any) -> Any:
    """`to_torch(x)` if `x` is a DTensor of this package; anything else is returned unchanged."""
    return to_torch(x) if isinstance(x, DTensor) else x


__all__ = ["TORCH", "as_ours", "as_torchs", "from_torch", "is_torch_dtensor", "layout_of", "to_torch"]
