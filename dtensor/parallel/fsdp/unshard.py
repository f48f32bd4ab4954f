"""Unsharding: converts a fully sharded parameter for use in the forward, and its gradient in the backward.

A sharded parameter is a DTensor with the data axis as the innermost split, possibly after axes of other styles (of a
tensor parallel plan). `Unshard` describes the conversion to the tensor that the forward uses and back; `unsharded`
performs it in one autograd function:

    forward    cast, all-gather over the data axes, drop these axes: a plain tensor, or a DTensor on the other axes
    backward   add the data axes as a partial average, cast, reduce (reduce-scatter if sharded), cast

Everything is traced unchanged, so the gather and the reduction are operators of the graph. The gradient can be
differentiated again.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.fx.traceback import annotate

from ...comm.collectives import KEPT
from ...dispatch.decision import COMPOSITES
from ...layout.layout import Layout
from ...mesh.operator_library import library
from ...tensor.tensor import DTensor
from ...torch_private.core import never_traced
from .mixed_precision import FLOAT8
from .narrow import averaged, gathered


@dataclass(frozen=True, eq=False)
class Unshard:
    """How one parameter is unsharded.

    Attributes:
        mesh: the mesh of the parameter: the data axes, and other axes if it was sharded before.
        data_mesh: the mesh of its data axes alone.
        dim: the dim sharded over the last data axis; None if it is replicated.
        layout: the layout of the sharded parameter.
        whole: the layout after gathering over all data axes.
        unreduced: the layout of a gradient that is not reduced over any data axis.
        scattered: the layout of a gradient that is reduced over the shard axis but not over the replicate axis.
        inner_mesh: the mesh of the DTensor that the forward uses; None if that is a plain tensor.
        inner: its layout on that mesh.
    """

    mesh: DeviceMesh
    data_mesh: DeviceMesh
    dim: int | None
    layout: Layout
    whole: Layout
    unreduced: Layout
    scattered: Layout
    inner_mesh: DeviceMesh | None = None
    inner: Layout | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "Unshard":
        return self


class _Unsharded(torch.autograd.Function):
    """Converts the parameter for the forward. `target` is the layout in which its gradient arrives."""

    border = True

    @staticmethod
    @never_traced
    def forward(
        ctx: Any,
        parameter: Any,
        mesh: DeviceMesh,
        whole: Any,
        entering: Any,
        target: Any,
        inner_mesh: DeviceMesh,
        inner: Any,
        dtype: torch.dtype | None,
        reduce_dtype: Any,
        gather_dtype: torch.dtype | None,
    ) -> Any:
        ctx.set_materialize_grads(False)
        ctx.given = mesh, whole, entering, target, inner_mesh, inner, dtype, reduce_dtype, gather_dtype
        ctx.dtype, ctx.sizes = parameter.dtype, (tuple(parameter.shape), tuple(parameter.stride()))
        x = parameter if dtype is None else parameter.to(dtype)
        x = gathered(x, whole, gather_dtype) if gather_dtype else torch.ops.dtensor.redistribute(x, whole.text, False)
        if entering is None:
            return x
        local = x.to_local()
        return local if inner_mesh is None else _wrapped(local, inner_mesh, inner, ctx.sizes)

    @staticmethod
    @never_traced
    def backward(ctx: Any, grad: Any) -> Any:
        if grad is None:
            made = None
        elif torch.is_grad_enabled() and grad.requires_grad:
            made = _Reduced.apply(grad, ctx.dtype, ctx.sizes, *ctx.given)
        else:
            made = _reduced(grad, ctx.dtype, ctx.sizes, *ctx.given)
        return made, *(None,) * len(ctx.given)


class _Reduced(torch.autograd.Function):
    """The differentiable reduction of an unsharded parameter's gradient. Its own gradient is unsharded in turn.

    The losses of the ranks of the data axes count as averaged, and each rank differentiates its own loss. So a rank's
    contribution to the mean has the full gradient of the mean, not a fraction of it.
    """

    @staticmethod
    def forward(ctx: Any, grad: Any, dtype: torch.dtype | None, sizes: Any, *given: Any) -> Any:
        ctx.set_materialize_grads(False)
        ctx.given, ctx.dtype = given, grad.dtype
        return _reduced(grad, dtype, sizes, *given)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        mesh, whole, entering, target, inner_mesh, inner, _, reduce_dtype, _ = ctx.given
        given = (mesh, whole, entering, target, inner_mesh, inner, ctx.dtype, reduce_dtype, None)
        made = None if grad is None else _Unsharded.apply(grad, *given)
        return made, None, None, *(None,) * len(ctx.given)


def _reduced(
    grad: Any,
    dtype: torch.dtype | None,
    sizes: Any,
    mesh: DeviceMesh,
    whole: Any,
    entering: Any,
    target: Any,
    inner_mesh: DeviceMesh,
    inner: Any,
    _: Any,
    reduce_dtype: Any,
    __: Any,
) -> torch.Tensor:
    if inner_mesh is not None:
        grad = torch.ops.dtensor.redistribute(grad, inner.text, False).to_local()
    if reduce_dtype in FLOAT8:
        if target is not None and grad.dim() > 1:
            return averaged(grad, entering, target, mesh, sizes, reduce_dtype).to(dtype)
        reduce_dtype = torch.float32
    if reduce_dtype is not None:
        grad = _sent_as(grad, reduce_dtype)
    if entering is not None:
        grad = _wrapped(grad, mesh, entering, sizes)
    if target is not None:
        grad = torch.ops.dtensor.redistribute(grad, target.text, False)
    return grad.to(dtype)


def _sent_as(grad: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A gradient in another dtype, part by part: `to` of a partial DTensor would reduce it first, and round the sum."""
    if not isinstance(grad, DTensor):
        return grad.to(dtype)
    return DTensor(grad.to_local().to(dtype), grad.device_mesh, grad._spec.layout, grad.shape, grad.stride())


def _wrapped(local: torch.Tensor, mesh: DeviceMesh, layout: Layout, sizes: tuple[Any, ...]) -> DTensor:
    return DTensor(local.view_as(local), mesh, layout, sizes[0], sizes[1])


# The operator that Dynamo records. It would trace an autograd function twice, and its backward without a graph.
library.define(
    "unshard(Tensor x, torch.distributed.device_mesh.DeviceMesh mesh, str whole, str entering, str target, "
    "torch.distributed.device_mesh.DeviceMesh inner_mesh, str inner, ScalarType? dtype, ScalarType? reduce_dtype, "
    "ScalarType? gather_dtype) -> Tensor"
)


def _unshard_operator(x: DTensor, mesh: DeviceMesh, whole: str, *given: Any) -> torch.Tensor:
    """`dtensor::unshard`, decomposed at once for any tensor and any mode. Empty arguments were not given."""
    entering, target, inner_mesh, inner, *dtypes = given
    layouts = [Layout.parse(text, x.dim()) if text else None for text in (whole, entering, target, inner)]
    return _Unsharded.apply(x, mesh, *layouts[:3], inner_mesh if inner else None, layouts[3], *dtypes)


library.impl("unshard", _unshard_operator, "CompositeImplicitAutograd")
COMPOSITES["dtensor::unshard"] = _unshard_operator


def unsharded(
    parameter: DTensor,
    how: Unshard,
    *,
    dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    gather_dtype: torch.dtype | None = None,
    local: bool = True,
    keep: bool = False,
    reduce: str = "all",
) -> torch.Tensor:
    """`parameter` as the forward uses it; differentiable.

    Args:
        parameter: the DTensor that `how` was created for.
        how: how to unshard it.
        dtype: the dtype to cast it to before gathering; None does not cast.
        reduce_dtype: the dtype in which its gradient is reduced; None keeps the dtype of the gradient.
        gather_dtype: the dtype in which it is sent (`dtensor.parallel.fsdp.narrow`); None for that of the result.
        local: drop the data axes; gradients are then averaged over them. Otherwise the result is a DTensor on all axes.
        keep: annotate the gather as one that is not repeated in the backward.
        reduce: the data axes over which the gradient is reduced: "all", "scatter" (the shard axis only) or "none".
    """
    target = {"all": how.layout, "scatter": how.scattered, "none": None}[reduce]
    entering, inner_mesh, inner = (how.unreduced, how.inner_mesh, how.inner) if local else (None, None, None)
    dtypes = dtype, reduce_dtype, gather_dtype
    if not torch.compiler.is_dynamo_compiling():
        return _Unsharded.apply(parameter, how.mesh, how.whole, entering, target, inner_mesh, inner, *dtypes)
    texts = ["" if layout is None else layout.text for layout in (how.whole, entering, target, inner)]
    given = (how.mesh, *texts[:3], inner_mesh or how.mesh, texts[3], *dtypes)
    if keep:
        with annotate({KEPT: True}):
            return torch.ops.dtensor.unshard(parameter, *given)
    return torch.ops.dtensor.unshard(parameter, *given)


__all__ = ["Unshard", "unsharded"]
