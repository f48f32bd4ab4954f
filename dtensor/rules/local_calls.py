"""Helpers for `local` functions, which run operators that would be wrong on a shard or that refuse an empty one."""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from ..comm.collectives import emit, start
from ..mesh.mesh import group_name, mesh_shape
from ..mesh.tensor_spec import Spec
from .call import LocalCall


def is_sharded(call: LocalCall) -> bool:
    """Whether any factor is sharded in this call."""
    return any(call.axes.values())


def axes_of(call: LocalCall, factors: Any = None) -> list[int]:
    """The mesh axes that shard any of `factors` (all by default), in ascending order."""
    return sorted({a for f, axes in call.axes.items() if factors is None or f in factors for a in axes})


def all_reduce(
    x: torch.Tensor, op: str, call: LocalCall, factors: Any = None, axes: Iterable[int] | None = None
) -> torch.Tensor:
    """All-reduce `x` by `op` over `axes`, by default the mesh axes that shard `factors` (all by default)."""
    for axis in axes_of(call, factors) if axes is None else axes:
        x = emit.all_reduce(x, op, group_name(call.mesh, axis))
    return x


def passed(x: torch.Tensor, call: LocalCall, axis: int, senders: list[int]) -> Callable[[], torch.Tensor]:
    """Let each rank along a mesh axis have the `x` of its sender; the returned function waits for that. Eager code
    computes meanwhile; a compiled graph is scheduled by the passes."""
    group = group_name(call.mesh, axis)
    if type(x) is torch.Tensor:
        return start("collective_permute", x, senders, group)
    received = emit.collective_permute(x, senders, group)
    return lambda: received


WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
"""Dtype -> the one that torch's kernels add it up in, where that is another."""


def wide(x: torch.Tensor) -> torch.Tensor:
    """`x` in the dtype that torch's kernels add it up in."""
    return x.to(WIDE.get(x.dtype, x.dtype))


def parts(call: LocalCall, factor: str) -> int:
    """The number of shards of `factor`."""
    count = 1
    for axis in call.axes.get(factor, ()):
        count *= mesh_shape(call.mesh)[axis]
    return count


def empty_outputs(call: LocalCall) -> Any:
    """Zeros in the local shape of each output, for a rank that holds no data."""
    like, *_ = _tensors([call.args, list(call.kwargs.values())])
    made = [
        None
        if o is None or layout is None
        else like.new_zeros(
            Spec.make(call.mesh, layout, o.shape, o.stride, o.dtype).traced().local_shape(), dtype=o.dtype
        )
        for o, layout in zip(call.call.outputs, call.layouts)
    ]
    if call.call.many:
        return tuple(made)
    (one,) = made
    return one


def has_empty_shard(call: LocalCall) -> bool:
    """Whether some operand has no elements on this rank, but has some on others."""
    if not is_sharded(call):
        return False
    tensors = _tensors([call.args, list(call.kwargs.values())])
    return any(t.numel() == 0 and 0 not in spec.shape for t, spec in zip(tensors, call.call.operands))


FOR_EMPTY: set[Any] = set()
"""Functions, as rules have them for `local`, that run the operator itself unless a shard is empty."""


def for_empty(run: Callable[[LocalCall], Any]) -> Callable[[LocalCall], Any]:
    """Add a function to `FOR_EMPTY`."""
    FOR_EMPTY.add(run)
    return run


@for_empty
def unless_empty(call: LocalCall) -> Any:
    """Run the operator, except on a rank with an empty shard, which many kernels refuse; that rank returns zeros."""
    return empty_outputs(call) if has_empty_shard(call) else call.run()


def guarded(run: Callable[[LocalCall], Any]) -> Callable[[LocalCall], Any]:
    """Wrap `run` so that a rank with an empty shard returns zeros instead."""
    return lambda call: empty_outputs(call) if has_empty_shard(call) else run(call)


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for item in value for t in _tensors(item)] if isinstance(value, (list, tuple)) else []


__all__ = [
    "FOR_EMPTY",
    "WIDE",
    "all_reduce",
    "axes_of",
    "empty_outputs",
    "for_empty",
    "guarded",
    "has_empty_shard",
    "is_sharded",
    "parts",
    "passed",
    "unless_empty",
    "wide",
]
