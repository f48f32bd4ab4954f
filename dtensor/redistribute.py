"""The executor: carries out a plan on this rank's local tensor by the `dtensor::*` operators.

Runs alike in eager mode and while a graph is traced. Below autograd: gradients are `tensor`'s business.
"""

import torch

from ._torch import c10d, functional_collectives, hint
from .collectives import emit as ops
from .errors import PlacementError
from .layout import Layout
from .mesh import group_name, mesh_shape
from .placements import Placement
from .plan import Plan, Step, plan
from .spec import Spec


def redistribute_local(local: torch.Tensor, spec: Spec, dst: Layout, *, async_op: bool = False) -> torch.Tensor:
    """This rank's local tensor after moving a tensor of `spec` from its layout to `dst`.

    With `async_op` the last collective is only started, if nothing local follows it; the result waits on first use.
    """
    src = spec.layout
    if src is dst or spec.coordinate is None:
        return local
    steps = plan_of(spec, dst).steps
    for index, step in enumerate(steps):
        last = async_op and index == len(steps) - 1
        local = _start(local, spec, step) if last else _run(local, spec, step)
    return local


def plan_of(spec: Spec, dst: Layout) -> Plan:
    """The plan from the layout of `spec` to `dst`."""
    sizes = spec.shape if spec.static else tuple(map(hint, spec.shape))
    return plan(spec.layout, dst, sizes, mesh_shape(spec.mesh), spec.dtype.itemsize)


def _length_after(spec: Spec, step: Step):
    assert step.dim is not None, f"{step.op} has no dimension to measure"
    assert spec.coordinate is not None, "nothing is redistributed on a rank outside the mesh"
    shape = step.dst.local_shape(spec.shape, mesh_shape(spec.mesh), spec.coordinate)
    return shape[step.dim]


def _run(local: torch.Tensor, spec: Spec, step: Step) -> torch.Tensor:
    group = group_name(spec.mesh, step.axis)
    if spec.mesh.size(step.axis) == 1:
        return local
    match step.op:
        case "all_gather":
            return ops.all_gather(local, step.dim, _length_after(spec, step), group)
        case "reduce_scatter":
            return ops.reduce_scatter(local, step.reduce_op, step.dim, group)
        case "all_reduce":
            return ops.all_reduce(local, step.reduce_op, group)
        case "all_to_all":
            return ops.all_to_all(local, step.dim, step.scatter_dim, _length_after(spec, step), group)
        case "shard":
            return ops.shard(local, step.dim, group)
        case "partial":
            return _partial(local, spec.mesh.size(step.axis), step.reduce_op, group)
    raise AssertionError(f"no such step: {step.op}")


def _partial(local: torch.Tensor, n: int, reduce_op: str | None, group: str) -> torch.Tensor:
    """R -> P: the value itself where reducing copies gives it back, else the first rank keeps it, the others zeros."""
    if reduce_op in ("avg", "max", "min"):
        return local
    index = ops.shard(torch.arange(n, device=local.device), 0, group)
    return torch.where(index.view([1] * local.dim() or []) == 0, local, local.new_zeros(()))


def _start(local: torch.Tensor, spec: Spec, step: Step) -> torch.Tensor:
    """Start `step` without waiting where its raw collective is already the result; otherwise run it."""
    group = group_name(spec.mesh, step.axis)
    n = spec.mesh.size(step.axis)
    if n == 1 or local.numel() == 0:
        return _run(local, spec, step)
    if step.op == "all_reduce" and step.reduce_op != "avg":
        started = c10d.all_reduce(local.contiguous(), step.reduce_op, group)
    elif step.op == "all_gather" and step.dim == 0 and _length_after(spec, step) == n * local.shape[0]:
        started = c10d.all_gather_into_tensor(local.contiguous(), n, group)
    elif step.op == "reduce_scatter" and step.dim == 0 and step.reduce_op != "avg" and local.shape[0] % n == 0:
        started = c10d.reduce_scatter_tensor(local.contiguous(), step.reduce_op, n, group)
    else:
        return _run(local, spec, step)
    return functional_collectives.AsyncCollectiveTensor(started)


def check_target(src: tuple[Placement, ...], dst: tuple[Placement, ...]) -> None:
    """Refuse what users may not ask of `redistribute`: to make a value partial.

    Raises:
        PlacementError: an axis of `dst` is partial where `src` is not partial in the same way.
    """
    for axis, (a, b) in enumerate(zip(src, dst)):
        if b.is_partial() and a != b:
            raise PlacementError(
                f"cannot redistribute mesh axis {axis} from {a} to {b}: a value does not become partial; "
                "write Replicate() or Shard(dim), or DTensor.from_local(x, mesh, [Partial()]) for local parts of a sum"
            )


__all__ = ["check_target", "plan_of", "redistribute_local"]
