"""Restores memory order for operators that depend on how their operands are laid out in memory.

A DTensor has the strides of the global tensor, but its local tensor may be laid out in another order, since collectives
deliver contiguous results. Nearly all operators work with any strides. Those in `IN_MEMORY` do not: they take strides
as arguments, or their kernels expect the layout that torch's own code gave the global tensor before calling them.
`decision` has their local operands put in the global tensor's order first, which copies where the orders differ.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..mesh.tensor_spec import Spec, contiguous_stride
from ..torch_private.core import FakeTensor, FunctionalTensor, tree_map
from ..torch_private.symbolic_sizes import hint, known_equal

IN_MEMORY = frozenset(
    f"aten::{name}"
    for name in (
        "as_strided",
        "as_strided_copy",
        "as_strided_scatter",
        "resize",
        "view_as_complex",
        "native_group_norm",
        "native_group_norm_backward",
        "_pdist_forward",
        "_pdist_backward",
        "nll_loss2d_forward",
        "nll_loss2d_backward",
        "max_pool3d_with_indices",
        "max_pool3d_with_indices_backward",
        "multinomial",
    )
)


def put_in_memory(
    run: Callable[..., Any] | None, operands: Sequence[Spec], *, views: bool = False
) -> Callable[..., Any]:
    """Wrap `run` (None: the operator itself) so that its local operands have the memory order of the global ones.

    `views`: what it returns shares the memory of its operand, which is not copied if its strides are right.
    """
    orders = [_order(o) for o in operands]

    def running(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        left = iter(orders)

        def put(x: Any) -> Any:
            return ordered(x, next(left), views) if isinstance(x, torch.Tensor) else x

        args, kwargs = tree_map(put, (args, kwargs))
        return func(*args, **kwargs) if run is None else run(func, args, kwargs)

    return running


def _order(spec: Spec) -> tuple[int, ...] | None:
    """The dims in memory order, largest stride first; None if the tensor has gaps in memory.

    Symbolic sizes count by their hints, which are the same on all ranks.
    """
    shape, stride = [hint(n) for n in spec.shape], [hint(n) for n in spec.stride]
    dims = tuple(sorted(range(spec.ndim), key=lambda dim: -stride[dim]))
    return dims if _strides(shape, dims) == stride else None


def _strides(shape: Sequence[Any], dims: tuple[int, ...]) -> list[Any]:
    """Strides without gaps for the memory order `dims`."""
    found = dict(zip(dims, contiguous_stride([shape[dim] for dim in dims])))
    return [found[dim] for dim in range(len(dims))]


def ordered(x: torch.Tensor, dims: tuple[int, ...] | None, views: bool) -> torch.Tensor:
    """`x` laid out in the memory order `dims`, without gaps; unchanged for None."""
    if dims is None:
        return x
    # Of dims of length 1 a trace knows other strides than kernels find: torch's views give others to tensors without
    # values. So there nothing may follow from them, and no strides be set.
    traced = (
        not views and isinstance(x, (FakeTensor, FunctionalTensor)) and 1 in [n for n in x.shape if isinstance(n, int)]
    )
    if not traced and all(map(known_equal, stride := _strides(x.shape, dims), x.stride())):
        return x
    laid, back = x.permute(dims), [dims.index(dim) for dim in range(x.dim())]
    if traced or not all(isinstance(n, int) for n in (*x.shape, *x.stride())):
        return laid.clone(memory_format=torch.contiguous_format).permute(back)  # adds no guards on the sizes
    if laid.is_contiguous():  # only strides of dims of length 1 differ, which kernels read too
        return x.as_strided(x.shape, stride)
    return laid.contiguous().permute(back)


__all__ = ["IN_MEMORY", "put_in_memory"]
