"""Compute on shards instead of on the gathered tensor, where the result is smaller than what was gathered."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import fx
from torch.fx.node import map_arg

from ..graph import ir, sizes
from ..stages import Pass
from .localize_replicated import is_alike

aten: Any = ir.aten

REDUCTIONS: dict[Any, int] = {
    aten.sum.dim_IntList: 1,
    aten.mean.dim: 1,
    aten.amax.default: 1,
    aten.amin.default: 1,
    aten.any.dim: 1,
    aten.all.dim: 1,
}
"""Operator that reduces dims away -> the position of the dims among its arguments; `keepdim` comes next."""

CUTS: dict[Any, int] = {aten.slice.Tensor: 1, aten.select.int: 1}
"""Operator that takes a part along one dim -> the position of the dim among its arguments."""


class ComputeBeforeGather(Pass):
    """Moves an all_gather after operators that shrink the gathered tensor, and before a broadcast that enlarges it.

    Before:

        %all_gather: f32[8,4] = dtensor.all_gather(%x, 0, 8, tp)
        %all_gather_1: f32[8,4] = dtensor.all_gather(%y, 0, 8, tp)
        %mul: f32[8,4] = aten.mul.Tensor(%all_gather, %all_gather_1)

    After:

        %mul: f32[4,4] = aten.mul.Tensor(%x, %y)
        %all_gather: f32[8,4] = dtensor.all_gather(%mul, 0, 8, tp)

    Each element of the result depends on elements of one shard only, so every rank computes its own part and the ranks
    gather less. An all_gather moves after

    - a pointwise operator on values gathered along one dim, if its other operands are the same on all ranks and do not
      extend along that dim. Per element, the gathered operands of the result's shape must take more bytes than the
      result, or as many if smaller operands are gathered too. So a single gathered operand moves only if the result has
      a narrower dtype;
    - a reduction, slice or selection along other dims, if the result leaves no gaps in memory and shards are even.

    The gather of expand(x) along a dim of x becomes the expand of the gathered x.

    The pass fires only if the gathered tensor has no other user. A sum over a dim may be taken in another order when
    the tensor has another number of rows, hence `reassociates`.
    """

    name = "compute_before_gather"
    stage = "simplify"
    exactness = "reassociates"

    def __call__(self, graph: fx.Graph) -> int:
        return sum([_rewrite(node) for node in list(graph.nodes) if node.op == "call_function"])


def _rewrite(node: fx.Node) -> bool:
    if ir.is_collective(node, "all_gather"):
        return _broadcast_last(node)
    if ir.is_pointwise(node):
        return _pointwise(node)
    if node.target in REDUCTIONS:
        return _along(node, _after_reduction)
    return node.target in CUTS and ir.numbers_agree(node) and _along(node, _after_cut)


def _gather(x: Any, user: fx.Node) -> ir.Collective | None:
    """The gather that `x` is, if `user` may be computed before it."""
    c = ir.collective(x, "all_gather")
    if c is None or ir.only_user(x) is not user or not ir.same_phase(x, user) or ir.is_written(c.x):
        return None
    return c


def _from_back(c: ir.Collective) -> int:
    """The gathered dim as a negative number, since shapes are aligned at the last dim when they broadcast."""
    assert c.gather_dim is not None
    return c.gather_dim - ir.value(c.x).dim()


def _pointwise(node: fx.Node) -> bool:
    found = {x: c for x in node.all_input_nodes if (c := _gather(x, node)) is not None}
    if not found or not ir.numbers_agree(node):
        return False
    one, out = next(iter(found.values())), ir.value(node)
    dim = _from_back(one)
    if any(replace(c, x=one.x, gather_dim=one.gather_dim) != one or _from_back(c) != dim for c in found.values()):
        return False
    if not all(x in found or _beside(x, dim, one.group) for x in node.all_input_nodes):
        return False
    # Decided by shapes and dtypes: bytes may differ between ranks, so no decision may depend on them.
    whole = [ir.value(x) for x in found if sizes.same(sizes.lengths(x), sizes.lengths(node))]
    spared = sum([x.dtype.itemsize for x in whole]) - out.dtype.itemsize
    if spared < 0 or (spared == 0 and len(whole) == len(found)):
        return False
    _move(node, found, replace(one, gather_dim=out.dim() + dim))
    return True


def _beside(x: fx.Node, dim: int, group: str) -> bool:
    """Whether `x` is the same on all ranks and does not extend along `dim`."""
    return (ir.value(x).dim() < -dim or sizes.same(sizes.length(x, dim), 1)) and is_alike(x, group)


def _along(node: fx.Node, after: Callable[[fx.Node, ir.Collective], int | None]) -> bool:
    x = node.all_input_nodes[0]
    c = _gather(x, node)
    dim = after(node, c) if c is not None else None
    # With uneven shards, a value may be dense on a rank with one row and not dense on the next.
    if c is None or dim is None or not (sizes.is_even(c.x) and sizes.is_even(node)):
        return False
    if ir.memory_order(ir.value(node)) is None:
        return False
    _move(node, {x: c}, replace(c, gather_dim=dim))
    return True


def reduced_dims(node: fx.Node) -> set[int]:
    """Return the dims that the reduction `node` runs over; empty if it does not name them."""
    place, ndim = REDUCTIONS[node.target], ir.value(node.all_input_nodes[0]).dim()
    given: Any = node.args[place] if len(node.args) > place else None
    return {dim % ndim for dim in ([given] if isinstance(given, int) else given or ())}


def _after_reduction(node: fx.Node, c: ir.Collective) -> int | None:
    """The gathered dim in the result of a reduction over other dims; None if that result is not smaller."""
    x, place, dims = ir.value(c.x), REDUCTIONS[node.target], reduced_dims(node)
    narrower = ir.value(node).dtype.itemsize <= x.dtype.itemsize
    if c.gather_dim is None or not dims or c.gather_dim in dims or not narrower:
        return None
    if all(sizes.same(sizes.length(c.x, dim), 1) for dim in dims):
        return None
    keeps = node.args[place + 1] if len(node.args) > place + 1 else node.kwargs.get("keepdim", False)
    return c.gather_dim - (0 if keeps else len([dim for dim in dims if dim < c.gather_dim]))


def _after_cut(node: fx.Node, c: ir.Collective) -> int | None:
    """The gathered dim in a part taken along another dim; None if the part is all of it."""
    x = ir.value(c.x)
    dim = (node.args[CUTS[node.target]] if len(node.args) > 1 else node.kwargs.get("dim", 0)) % x.dim()
    if c.gather_dim is None or dim == c.gather_dim:
        return None
    if node.target is aten.select.int:
        return None if sizes.same(sizes.length(c.x, dim), 1) else c.gather_dim - (dim < c.gather_dim)
    return None if sizes.same(sizes.length(c.x, dim), sizes.length(node, dim)) else c.gather_dim


def _move(node: fx.Node, found: dict[fx.Node, ir.Collective], c: ir.Collective) -> None:
    """Run `node` on the operands of the gathers `found`, and gather its result as `c` describes."""
    part = map_arg((node.args, node.kwargs), lambda x: found[x].x if x in found else x)
    x = ir.insert(node, node.target, *part, like=node)
    ir.replace(node, ir.emit(node, replace(c, x=x), like=next(iter(found))))
    for old in found:
        old.graph.erase_node(old)


def _broadcast_last(node: fx.Node) -> bool:
    """Gather before expanding, in all_gather(expand(x)) along a dim that is not expanded."""
    c = ir.collective(node)
    assert c is not None
    assert c.gather_dim is not None
    wide = c.x
    if wide.target is not aten.expand.default or ir.only_user(wide) is not node or not ir.same_phase(wide, node):
        return False
    x = wide.all_input_nodes[0]
    dim = c.gather_dim - (ir.value(wide).dim() - ir.value(x).dim())
    if dim < 0 or not sizes.same(sizes.length(x, dim), sizes.length(wide, c.gather_dim)):
        return False
    if sizes.elements(x) == sizes.elements(wide) or ir.is_written(x):
        return False
    narrow = ir.emit(node, replace(c, x=x, gather_dim=dim), like=node)
    given: Any = wide.args[1]
    wanted = [-1 if k == c.gather_dim else n for k, n in enumerate(given)]
    ir.replace(node, ir.insert(node, aten.expand.default, (narrow, wanted), like=wide))
    node.graph.erase_node(wide)
    return True


__all__ = ["ComputeBeforeGather"]
