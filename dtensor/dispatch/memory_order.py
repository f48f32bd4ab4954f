"""Operators that read their tensors as they lie in memory.

A DTensor has the strides of the global tensor, and its local tensor may lie in another order: what collectives deliver
is contiguous. Nearly all operators do not care. Those of `IN_MEMORY` do: strides are among their arguments, or their
kernels expect the memory that torch's own code has given to the global tensor before it calls them. Their operands are
put in that order first, which is a copy where they lie in another.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..mesh.tensor_spec import Spec, contiguous_stride
from ..torch_private.core import tree_map
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


def put_in_memory(run: Callable[..., Any] | None, operands: Sequence[Spec]) -> Callable[..., Any]:
    """`run`, or the operator itself for None, on local tensors in the order in memory of the global `operands`."""
    orders = [_order(o) for o in operands]

    def running(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        left = iter(orders)

        def put(x: Any) -> Any:
            return ordered(x, next(left)) if isinstance(x, torch.Tensor) else x

        args, kwargs = tree_map(put, (args, kwargs))
        return func(*args, **kwargs) if run is None else run(func, args, kwargs)

    return running


def _order(spec: Spec) -> tuple[int, ...] | None:
    """The dimensions of a tensor in the order in which they lie in memory, the one with the largest stride first; None
    where it has gaps there. Of sizes that only the run knows the examples count, which all ranks have alike."""
    shape, stride = [hint(n) for n in spec.shape], [hint(n) for n in spec.stride]
    dims = tuple(sorted(range(spec.ndim), key=lambda dim: -stride[dim]))
    return dims if _strides(shape, dims) == stride else None


def _strides(shape: Sequence[Any], dims: tuple[int, ...]) -> list[Any]:
    """Strides without gaps."""
    found = dict(zip(dims, contiguous_stride([shape[dim] for dim in dims])))
    return [found[dim] for dim in range(len(dims))]


def ordered(x: torch.Tensor, dims: tuple[int, ...] | None) -> torch.Tensor:
    """`x` with its dimensions in an order in memory, without gaps; as it is for None."""
    if dims is None or all(map(known_equal, stride := _strides(x.shape, dims), x.stride())):
        return x
    laid, back = x.permute(dims), [dims.index(dim) for dim in range(x.dim())]
    if not all(isinstance(n, int) for n in (*x.shape, *x.stride())):
        return laid.clone(memory_format=torch.contiguous_format).permute(back)  # asks nothing of the sizes
    if laid.is_contiguous():  # but for the strides of dimensions of one, which kernels go by, too
        return x.as_strided(x.shape, stride)
    return laid.contiguous().permute(back)


__all__ = ["IN_MEMORY", "put_in_memory"]
