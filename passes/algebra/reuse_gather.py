"""If a tensor is gathered anyway, a reduction of it that is gathered too is computed from the gathered tensor."""

from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from ..graph import ir, sizes
from ..stages import Pass
from .compute_before_gather import REDUCTIONS, reduced_dims
from .reduce_after_view import KEEP_ORDER, changes_nothing


class ReuseGather(Pass):
    """Rewrites an all_gather of a reduction of x, where x is gathered too, to the reduction of the gathered x.

    Before:

        %sum: f32[4] = aten.sum.dim_IntList(%x, [0])
        %all_gather: f32[8] = dtensor.all_gather(%sum, 0, 8, tp)
        %all_gather_1: f32[3,8] = dtensor.all_gather(%x, 1, 8, tp)

    After:

        %all_gather: f32[3,8] = dtensor.all_gather(%x, 1, 8, tp)
        %sum: f32[8] = aten.sum.dim_IntList(%all_gather, [0])

    This saves a collective. It occurs with the gradients of token and position embeddings, which are added. The
    reductions are those that `compute_before_gather` moves, along dims other than the gathered one. That pass does not
    move them back, because the gathered tensor now has two users. A sum may be taken in another order when the tensor
    has another number of rows, hence `reassociates`.
    """

    name = "reuse_gather"
    stage = "simplify"
    exactness = "reassociates"

    def __call__(self, graph: fx.Graph) -> int:
        rewrites = 0
        while _rewrite_one(graph):
            rewrites += 1
        return rewrites


def _rewrite_one(graph: fx.Graph) -> bool:
    gathers = ir.calls(graph, "all_gather")
    for k, narrow in enumerate(gathers):
        reduced = _reduced(narrow)
        if reduced is None:
            continue
        for j, wide in enumerate(gathers):
            if j != k and _gathers(wide, reduced, narrow) and (j < k or _is_number(wide)):
                _rewrite(narrow, reduced, wide if j < k else _moved_up(wide, narrow, reduced.x))
                return True
    return False


@dataclass(frozen=True)
class _Reduced:
    """The reduction `node` of `x` along `dims`. Its result is gathered along the dim that is `gather_dim` of `x`."""

    x: fx.Node
    node: fx.Node
    dims: tuple[int, ...]
    gather_dim: int


def _reduced(gather: fx.Node) -> _Reduced | None:
    """The reduction whose result `gather` gathers, if there is one with nothing but views that keep the order in
    between."""
    c = ir.collective(gather)
    assert c is not None
    assert c.gather_dim is not None
    node = c.x
    while node.target in KEEP_ORDER:
        node = node.all_input_nodes[0]
    if node.target not in REDUCTIONS:
        return None
    x, dims = node.all_input_nodes[0], reduced_dims(node)
    kept = [dim for dim in range(ir.value(x).dim()) if dim not in dims]
    if not dims or not sizes.same([sizes.length(x, dim) for dim in kept], sizes.lengths(c.x)):
        return None
    return _Reduced(_same_as(x), node, tuple(sorted(dims)), kept[c.gather_dim])


def _same_as(x: fx.Node) -> fx.Node:
    """The node that `x` is a view of, if the view has the same shape."""
    while changes_nothing(x):
        x = x.all_input_nodes[0]
    return x


def _gathers(wide: fx.Node, reduced: _Reduced, narrow: fx.Node) -> bool:
    """Whether `wide` gathers the operand of the reduction as `narrow` gathers the result."""
    c, d = ir.collective(wide), ir.collective(narrow)
    assert c is not None
    assert d is not None
    if _same_as(c.x) is not reduced.x or not ir.same_phase(wide, narrow):
        return False
    alike = (c.gather_dim, c.group) == (reduced.gather_dim, d.group)
    return alike and not ir.is_written(reduced.x) and not ir.is_written(wide)


def _is_number(gather: fx.Node) -> bool:
    """Whether the gathered size is a number, which is known anywhere in the graph."""
    c = ir.collective(gather)
    return c is not None and not isinstance(c.size, fx.Node)


def _moved_up(wide: fx.Node, before: fx.Node, x: fx.Node) -> fx.Node:
    """Move the gather `wide` of `x` up to before `before`."""
    c = ir.collective(wide)
    assert c is not None
    moved = ir.emit(before, replace(c, x=x), like=wide)
    ir.replace(wide, moved)
    return moved


def _rewrite(narrow: fx.Node, reduced: _Reduced, wide: fx.Node) -> None:
    """Replace `narrow` by the reduction of what `wide` gathers."""
    node, dims = reduced.node, list(reduced.dims)
    # `any` and `all` take one dim, not a list.
    given: Any = dims[0] if isinstance(node.args[REDUCTIONS[node.target]], int) else dims
    ir.replace(narrow, ir.insert(narrow, node.target, (wide, given, False), node.kwargs, like=node))


__all__ = ["ReuseGather"]
