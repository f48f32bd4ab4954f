"""Between dtensor and torch.distributed.tensor: tensors without a copy, and whole models.

Both kinds of tensor hold the same local tensor on the same DeviceMesh; only what is said of it differs. The order in
which axes cut one dimension, which torch writes as strided shards, is kept. This is the only module that knows torch's
DTensor, and imports it when it is first needed.
"""

from typing import Any

import torch
from torch import nn

from ._torch import shard_order, strided_shard, tree_map
from .errors import PlacementError
from .layout import Layout
from .placements import Partial, Shard, as_placements
from .tensor import DTensor, move

TORCH = "torch.distributed.tensor"
FSDP = "torch.distributed.fsdp"


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
    layout = _layout_of(x)
    if layout is Layout.of(layout.placements, x.dim()):
        local = x.to_local(grad_placements=_torch_placements(layout.without_partial(), x.device_mesh))
        return DTensor.from_local(
            local, x.device_mesh, layout.placements, shape=tuple(x.shape), stride=tuple(x.stride())
        )
    return _FromTorch.apply(x, layout)


def to_torch(x: DTensor) -> Any:
    """A torch.distributed.tensor.DTensor that shares the memory of `x`; gradients flow back to it.

    Raises:
        TypeError: `x` is no DTensor of dtensor.
    """
    if not isinstance(x, DTensor):
        raise TypeError(f"to_torch takes a dtensor.DTensor, got {type(x).__name__}")
    local = x.to_local()
    mesh = x.device_mesh
    layout = Layout.of(x.placements, x.dim()) if torch.compiler.is_dynamo_compiling() else x._spec.layout
    placements = _torch_placements(layout, mesh)
    return _theirs().DTensor.from_local(
        local, mesh, placements, run_check=False, shape=x.size(), stride=tuple(x.stride())
    )


def _layout_of(x: Any) -> Layout:
    for p in x.placements:
        if type(p).__name__ not in ("Shard", "Replicate", "Partial", "_StridedShard"):
            raise _unknown(x)
    if torch.compiler.is_dynamo_compiling():
        # The spec cannot be read in a trace; hooks and from_local make tensors that are cut in mesh order.
        return Layout.of(as_placements(x.placements, x.device_mesh.ndim, x.dim()), x.dim())
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


def _torch_placements(layout: Layout, mesh: Any) -> list[Any]:
    """What torch calls a layout: an axis cut after a later one is a strided shard of as many strides."""
    theirs = _theirs()
    made: list[Any] = []
    for axis, p in enumerate(layout.placements):
        if isinstance(p, Shard):
            axes = layout.dims[p.dim]
            strides = 1
            for before in axes[: axes.index(axis)]:
                strides *= mesh.size(before) if before > axis else 1
            made.append(theirs.Shard(p.dim) if strides == 1 else strided_shard(p.dim, strides))
        else:
            made.append(theirs.Partial(p.reduce_op) if isinstance(p, Partial) else theirs.Replicate())
    return made


class _FromTorch(torch.autograd.Function):
    """A tensor whose axes cut a dimension in another order than the mesh's, which placements cannot say."""

    @staticmethod
    def forward(ctx, x, layout):
        ctx.layout, ctx.mesh = layout.without_partial(), x.device_mesh
        ctx.placements = _torch_placements(ctx.layout, x.device_mesh)
        local = x.to_local()
        return DTensor(local.view_as(local), x.device_mesh, layout, tuple(x.shape), tuple(x.stride()))

    @staticmethod
    def backward(ctx, grad):
        local = move(grad, ctx.layout).to_local()
        theirs = _theirs().DTensor
        made = theirs.from_local(
            local, ctx.mesh, ctx.placements, run_check=False, shape=grad.size(), stride=tuple(grad.stride())
        )
        return made, None


def convert_module(module: nn.Module) -> nn.Module:
    """Turn a model that torch.distributed.tensor.parallel has sharded into one of dtensor, in place, without a copy.

    Parameters, buffers and gradients become DTensors that share the memory of torch's; parameters that modules share
    stay shared. The hooks that torch's styles have put on modules go on working: they are given torch's DTensors, and
    what they give is turned back. Plain parameters and everything else stay as they are. Make optimizers afterwards:
    one made before holds the old parameters.

    Returns:
        `module`.

    Raises:
        PlacementError: a parameter has a placement that dtensor does not know; nothing is changed then.
        NotImplementedError: a module inside is sharded by FSDP.
    """
    made: dict[int, Any] = {}
    for name, found in module.named_modules():
        if any(_home(hook).startswith(FSDP) for hooks in _hooks(found) for hook in hooks.values()):
            raise NotImplementedError(
                f"module {name!r} is sharded by torch's FSDP, which gathers its parameters in hooks of its own; "
                "convert the model before fully_shard, and write dtensor.parallel.fully_shard"
            )
        for x in [*found._parameters.values(), *found._buffers.values()]:
            if is_torch_dtensor(x) and id(x) not in made:
                made[id(x)] = _converted(x)
    for found in module.modules():
        for tensors in (found._parameters, found._buffers):
            tensors.update({name: made[id(x)] for name, x in tensors.items() if id(x) in made})
        for hooks in _hooks(found):
            hooks.update({key: _bridged(hook) for key, hook in hooks.items() if _home(hook).startswith(TORCH)})
    return module


def _converted(x: Any) -> Any:
    """A parameter or buffer of ours in place of torch's."""
    new = from_torch(x.detach())
    if isinstance(x, nn.Parameter):
        new = nn.Parameter(new, requires_grad=x.requires_grad)
    if is_torch_dtensor(x.grad):
        new.grad = from_torch(x.grad)
    return new


def _hooks(module: nn.Module) -> tuple[dict, ...]:
    return module._forward_pre_hooks, module._forward_hooks


def _home(hook: Any) -> str:
    """The module that a hook was written in."""
    hook = getattr(hook, "func", hook)
    return getattr(hook, "__module__", None) or ""


def _bridged(hook: Any) -> Any:
    """A hook of torch's styles, which gets and gives torch's DTensors, among ours."""

    def bridged(module, *given):
        return tree_map(_ours, hook(module, *tree_map(_torchs, given)))

    return bridged


def _ours(x: Any) -> Any:
    return from_torch(x) if is_torch_dtensor(x) else x


def _torchs(x: Any) -> Any:
    return to_torch(x) if isinstance(x, DTensor) else x


__all__ = ["convert_module", "from_torch", "is_torch_dtensor", "to_torch"]
