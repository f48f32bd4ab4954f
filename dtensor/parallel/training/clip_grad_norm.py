"""`clip_grad_norm_`: clips gradients on one or several meshes, with one reduction per mesh.

Every rank sums over the elements it holds; an element that several ranks hold is divided by their number. One
all-reduce over the mesh gives the norm. Tensors on a slice of a mesh take part in the reduction over that mesh.
"""

from collections.abc import Iterable, Sequence
from math import inf, prod
from numbers import Real
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from ...errors import ArgumentError, ArgumentTypeError, ShardingError, shown
from ...layout.placements import Partial, Replicate
from ...tensor.tensor import DTensor
from ...torch_private.core import root_mesh


@torch.no_grad()
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """As `torch.nn.utils.clip_grad_norm_`, for DTensors on any number of meshes and plain parameters.

    This takes one all-reduce of one number for all gradients on a mesh and its slices. A DTensor on a slice counts as
    the same tensor all over the mesh, and a plain gradient as the same on all ranks. Partial gradients are reduced
    first, and the reduced gradient replaces the partial one.

    Args:
        parameters: one parameter or several. Those without a gradient are ignored.
        max_norm: the maximum norm of the gradients after clipping.
        norm_type: p of the p-norm, positive; inf for the largest absolute value.
        error_if_nonfinite: raise if the norm is nan or infinite.
        foreach: ignored; present for compatibility with torch.

    Returns:
        The norm before clipping: a zero-dimensional plain tensor, the same on all ranks of a mesh.

    Raises:
        TypeError: a parameter is not a tensor, or `max_norm` or `norm_type` is not a number.
        ValueError: `norm_type` is not positive.
        RuntimeError: the norm is nan or infinite and `error_if_nonfinite` is set.
    """
    given: list[Any] = (
        list(parameters) if isinstance(parameters, Iterable) and not _is_tensor(parameters) else [parameters]
    )
    for x in given:
        if not _is_tensor(x):
            raise ArgumentTypeError(
                f"parameters are tensors, write clip_grad_norm_(model.parameters(), ...); got {shown(x)}"
            )
    for name, norm in (("max_norm", max_norm), ("norm_type", norm_type)):
        if not isinstance(norm, (Real, torch.Tensor)):
            raise ArgumentTypeError(f"{name} is a number; got {norm!r}")
    p = float(norm_type)
    if not p > 0:
        raise ArgumentError(f"norm_type is positive, or inf; got {norm_type}")
    grads = [_settled(x) for x in given if x.grad is not None]
    total = _total(grads, p)
    if error_if_nonfinite and not torch.isfinite(total):
        raise ShardingError(
            f"the norm of order {p} of the gradients is {total.item()}, so it cannot be clipped; write "
            "error_if_nonfinite=False to scale by it anyway"
        )
    scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for grad in grads:
        grad.mul_(scale.to(grad.device, grad.dtype))
    return total


def _is_tensor(x: Any) -> bool:
    return isinstance(x, torch.Tensor)


def _settled(parameter: Any) -> torch.Tensor:
    """The gradient of a parameter. A partial gradient is first reduced and stored in the parameter."""
    grad = parameter.grad
    if isinstance(grad, DTensor) and any(q.is_partial() for q in grad.placements):
        target = [Replicate() if q.is_partial() else q for q in grad.placements]
        grad = parameter.grad = grad.redistribute(placements=target)
    return grad


def _total(grads: Sequence[torch.Tensor], p: float) -> torch.Tensor:
    """The p-norm of all gradients, as a zero-dimensional plain tensor."""
    if not grads:
        return torch.tensor(0.0)
    meshes: list[Any] = []
    for g in grads:
        if isinstance(g, DTensor) and all(g.device_mesh != m for m in meshes):
            meshes.append(g.device_mesh)
    homes = [_home(m, meshes) for m in meshes]
    plain = [_power(g, p) for g in grads if not isinstance(g, DTensor)]
    parts = [_joined(plain, p)] if plain else []
    done: list[Any] = []
    for home in homes:
        if any(home == other for other in done):
            continue
        done.append(home)
        inside = [m for m, h in zip(meshes, homes) if h == home]
        parts.append(_over_mesh([g for g in grads if _lives_on(g, inside)], home, p))
    device = parts[0].device
    total = _joined([part.to(device) for part in parts], p)
    return total if p == inf else total.pow(1 / p)


def _lives_on(g: Any, meshes: list[Any]) -> bool:
    return isinstance(g, DTensor) and any(g.device_mesh == m for m in meshes)


def _over_mesh(grads: list[Any], mesh: DeviceMesh, p: float) -> torch.Tensor:
    """The sum of p-th powers, or the maximum for inf, of all elements of gradients on `mesh` and its slices."""
    mine = []
    for g in grads:
        power = _power(g.to_local(), p)
        axes = range(g.device_mesh.ndim)
        parts = prod([g.device_mesh.size(a) for a in axes if g.placements[a].is_shard()])
        mine.append(power if p == inf else power * (parts / mesh.size()))
    own = DTensor.from_local(_joined(mine, p), mesh, [Partial("max" if p == inf else "sum")] * mesh.ndim)
    return own.full_tensor()


def _power(x: torch.Tensor, p: float) -> torch.Tensor:
    """The sum of p-th powers of a plain tensor's elements, or the largest absolute value for inf; 0 if it is empty."""
    x = x.to(torch.float32) if x.dtype in (torch.float16, torch.bfloat16) else x
    if p == inf:
        return x.abs().amax() if x.numel() else x.new_zeros(())
    return (x * x).sum() if p == 2 else x.abs().pow(p).sum()


def _joined(parts: list[torch.Tensor], p: float) -> torch.Tensor:
    both = torch.stack(parts)
    return both.amax() if p == inf else both.sum()


def _home(mesh: DeviceMesh, meshes: list[Any]) -> Any:
    """The mesh to reduce gradients on `mesh` over: the largest of `meshes` that it is a slice of, or their root mesh if
    they cover all of its axes."""
    if torch.compiler.is_compiling() or mesh.mesh_dim_names is None:
        return mesh
    root, names = root_mesh(mesh), {*mesh.mesh_dim_names}
    around = [m for m in meshes if m.mesh_dim_names and root_mesh(m) is root and names <= {*m.mesh_dim_names}]
    if len(meshes) > 1 and {name for m in meshes for name in m.mesh_dim_names or ()} == {*(root.mesh_dim_names or ())}:
        return root
    return max(around, key=lambda m: m.ndim, default=mesh)


__all__ = ["clip_grad_norm_"]
