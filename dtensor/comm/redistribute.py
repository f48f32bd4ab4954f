"""The executor of plans: runs the steps of a plan on this rank's local tensor, as `dtensor::*` operators.

It runs in the same way in eager mode and while a graph is traced. It is below autograd; `dtensor.tensor` handles
gradients.
"""

from collections.abc import Callable
from typing import Any

import torch

from ..errors import ArgumentTypeError, PlacementError
from ..layout.layout import Layout
from ..layout.placements import Placement
from ..layout.planner import Plan, Prefer, Step, plan
from ..layout.transitions import senders
from ..mesh.caches import cache
from ..mesh.mesh import MeshFacts, facts
from ..mesh.provenance import note_layout, note_move, note_shards
from ..mesh.tensor_spec import Spec
from ..torch_private.symbolic_sizes import has_hint, hint
from .collectives import COMMUNICATING, emit, start
from .pending_tensor import Pending

watchers: list[Callable[[torch.Tensor, Spec, Layout, Any], None]] = []
"""Called after each redistribution with the local tensor before, its spec, the layout after, and the result."""

UNKNOWN = 8191
"""Used in plans for a size without an example value: a prime, so that no plan requires it to be divisible."""


def plan_of(spec: Spec, dst: Layout, prefer: Prefer = "time") -> Plan:
    """The plan that redistributes a tensor of `spec` to `dst`. For symbolic sizes it is chosen by their hints."""
    shape = spec.shape if spec.static else tuple([hint(n) if has_hint(n) else UNKNOWN for n in spec.shape])
    return plan(spec.layout, dst, shape, facts(spec.mesh).network, spec.dtype.itemsize, prefer)


Once = Callable[[Callable[..., torch.Tensor], torch.Tensor, tuple[Any, ...]], torch.Tensor]
"""(step, local tensor, its other arguments) -> what the step makes of them, now or before."""


class Redistribution:
    """A redistribution of tensors of one spec, without symbolic sizes, to the layout `dst`, made ready to run.

    Its steps are found when it first runs: the operators, and their arguments after the tensor.
    """

    __slots__ = ("_steps", "dst", "prefer", "spec")

    def __init__(self, spec: Spec, dst: Layout, prefer: Prefer = "time") -> None:
        self.spec: Spec = spec
        self.dst: Layout = dst
        self.prefer: Prefer = prefer
        self._steps: list[tuple[str, tuple[Any, ...]]] | None = None

    def __call__(self, local: torch.Tensor, once: Once | None = None) -> torch.Tensor:
        """As `redistribute_local`. With `once`, that calls each step, or has what it made before of the same."""
        if type(local) is not torch.Tensor or watchers:
            return redistribute_local(local, self.spec, self.dst, prefer=self.prefer)
        if self._steps is None:
            here = self.spec.layout is self.dst or self.spec.coordinate is None
            steps = () if here else plan_of(self.spec, self.dst, self.prefer).steps
            self._steps = [(step.op, _arguments(step, self.spec)) for step in steps]
        for op, arguments in self._steps:
            step = getattr(emit, op) if op != "partial" else _partial
            local = step(local, *arguments) if once is None else once(step, local, arguments)
        return local


_ready: dict[tuple[Any, ...], Redistribution] = cache()


def redistribute_local(
    local: torch.Tensor,
    spec: Spec,
    dst: Layout,
    *,
    async_op: bool = False,
    prefer: Prefer = "time",
    asked: bool = False,
    once: Once | None = None,
) -> torch.Tensor:
    """Redistribute a tensor of `spec` to the layout `dst`.

    Args:
        local: This rank's local tensor.
        spec: The spec of the tensor before.
        dst: The layout after.
        async_op: Only start the last collective, and leave the work after it for the first use of the result. No
            collective is ever started later than in this call, so all ranks start their collectives in the same order.
        prefer: As for `dtensor.layout.planner.plan`.
        asked: Whether the program explicitly requested it; recorded with the collectives of a traced graph.
        once: Calls each step, where nothing is traced; it may have what the same step made before.

    Returns:
        This rank's local tensor in `dst`.
    """
    if type(local) is torch.Tensor and spec.static and not (async_op or watchers):
        key = (spec, dst, prefer)
        ready = _ready.get(key)
        if ready is None:
            ready = _ready[key] = Redistribution(spec, dst, prefer)
        return ready(local, once)
    if spec.layout is dst or spec.coordinate is None:
        return local
    result = _redistributed(local, spec, dst, async_op, prefer, asked)
    for watch in watchers:
        watch(local, spec, dst, result)
    return result


def _redistributed(
    local: torch.Tensor, spec: Spec, dst: Layout, async_op: bool, prefer: Prefer, asked: bool
) -> torch.Tensor:
    steps = plan_of(spec, dst, prefer).steps
    if not async_op:
        return _all_of(steps, local, spec, asked)
    last = max([i for i, s in enumerate(steps) if s.op in COMMUNICATING], default=-1)
    if last < 0:
        return _all_of(steps, local, spec)
    local = _all_of(steps[:last], local, spec)
    finish = start(steps[last].op, local, *_arguments(steps[last], spec))
    shape = spec.with_layout(dst).local_shape()
    return Pending(local, shape, lambda: _all_of(steps[last + 1 :], finish(), spec))


def _all_of(steps: tuple[Step, ...], local: torch.Tensor, spec: Spec, asked: bool = False) -> torch.Tensor:
    for step in steps:
        note_layout(local, step.src.text)
        note_shards(local, spec.with_layout(step.src))
        run = _partial if step.op == "partial" else getattr(emit, step.op)
        local = run(local, *_arguments(step, spec))
        note_move(local, step, spec, asked)
    return local


def _arguments(step: Step, spec: Spec) -> tuple[Any, ...]:
    """The arguments of the operator of `step` that follow the tensor."""
    known = facts(spec.mesh)
    group = known.groups[step.axes]
    if len(step.axes) > 1:
        _check_divides(step, spec, known)
    match step.op:
        case "all_gather":
            return step.dim, _length_after(spec, step), group
        case "reduce_scatter":
            return step.reduce_op, step.dim, group
        case "all_reduce":
            return step.reduce_op, group
        case "all_to_all":
            return step.dim, step.scatter_dim, _length_after(spec, step), group
        case "shard":
            return step.dim, group
        case "collective_permute":
            return tuple(senders(step.src.dims, step.dst.dims, step.axes, known.shape)), group
        case "partial":
            return step.reduce_op, known.network.size(step.axes), group
    raise AssertionError(f"no such step: {step.op}")


def _length_after(spec: Spec, step: Step) -> Any:
    assert step.dim is not None, f"{step.op} has no dimension to measure"
    assert spec.coordinate is not None, "nothing is redistributed on a rank outside the mesh"
    return spec.with_layout(step.dst).local_shape()[step.dim]


def _check_divides(step: Step, spec: Spec, known: MeshFacts) -> None:
    """Check that merged axes shard evenly, which the plan concluded from hints. Adds guards to a traced graph."""
    for dim, (before, after) in enumerate(zip(step.src.dims, step.dst.dims)):
        if before != after:
            for axes in (before, after):
                n = known.network.size(axes)
                assert spec.shape[dim] % n == 0, f"{step} needs dimension {dim} to be divisible by {n}"


def _partial(local: torch.Tensor, reduce_op: str, n: int, group: str) -> torch.Tensor:
    """R -> P: all ranks keep the value if reducing copies of it gives it back; otherwise only the first rank does.

    The others then hold the neutral element of the reduction: zeros for a sum, ones for a product.
    """
    if reduce_op in ("avg", "max", "min"):
        return local
    index = emit.shard(torch.arange(n, device=local.device), 0, group)
    ignored = local.new_zeros(()) if reduce_op == "sum" else local.new_ones(())
    return torch.where(index.view([1] * local.dim() or []) == 0, local, ignored)


def check_target(src: tuple[Placement, ...], dst: tuple[Placement, ...]) -> None:
    """Refuse a target layout that users cannot request from `redistribute`: one that makes a value partial.

    Raises:
        PlacementError: An axis of `dst` is partial where `src` is not partial in the same way.
    """
    for axis, (a, b) in enumerate(zip(src, dst)):
        if b.is_partial() and a != b:
            raise PlacementError(
                f"cannot redistribute mesh axis {axis} from {a} to {b}: a value cannot be made partial; "
                "write Replicate() or Shard(dim), or DTensor.from_local(x, mesh, [Partial()]) for local parts of a sum"
            )


def check_dtypes(forward: Any, backward: Any) -> None:
    """Raise TypeError unless values and gradients can be cast to these dtypes."""
    for name, given in (("forward_dtype", forward), ("backward_dtype", backward)):
        if given is not None and not isinstance(given, torch.dtype):
            raise ArgumentTypeError(
                f"{name} must be a torch.dtype or None; got {given!r}, write for example torch.bfloat16"
            )
    if backward is not None and not (backward.is_floating_point or backward.is_complex):
        raise ArgumentTypeError(
            f"backward_dtype must be a dtype that a gradient can have; got {backward}, write for example torch.bfloat16"
        )


__all__ = ["Redistribution", "check_dtypes", "check_target", "plan_of", "redistribute_local", "watchers"]
