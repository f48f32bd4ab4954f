"""All-reduces move after views of their results, where this brings them next to an operator they can merge with."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import fx

from ..graph import ir, sizes
from ..stages import Pass
from .add_before_reduce import SUMS, is_root, leaves, mergeable, operands, reduction

aten: Any = ir.aten

RESHAPES = frozenset((aten.view.default, aten._unsafe_view.default, aten.reshape.default))
"""Views that require contiguous memory and give contiguous memory."""

KEEP_ORDER = RESHAPES | {aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims}
"""Views that keep the elements of a contiguous tensor in order: a contiguous operand gives a contiguous result."""

PERMUTE = frozenset((aten.t.default, aten.transpose.int, aten.permute.default))
"""Views that permute dims."""


class ReduceAfterView(Pass):
    """Moves a reduction after views of its result: view(all_reduce(x)) becomes all_reduce(view(x)).

    Before:

        %all_reduce: f32[8,4] = dtensor.all_reduce(%a, 'sum', tp)
        %view: f32[2,4,4] = aten.view(%all_reduce, [2, 4, 4])
        %all_reduce_1: f32[2,4,4] = dtensor.all_reduce(%b, 'sum', tp)
        %add: f32[2,4,4] = aten.add.Tensor(%view, %all_reduce_1)

    After:

        %view: f32[2,4,4] = aten.view(%a, [2, 4, 4])
        %all_reduce: f32[2,4,4] = dtensor.all_reduce(%view, 'sum', tp)
        %all_reduce_1: f32[2,4,4] = dtensor.all_reduce(%b, 'sum', tp)
        %add: f32[2,4,4] = aten.add.Tensor(%all_reduce, %all_reduce_1)

    A view only rearranges elements, so it may be taken before or after the reduction. A reduction moves only past views
    with one user, and only towards a term of the same sum with the same kind of reduction or towards a shard over the
    same group. `add_before_reduce` and `fuse_reduce_scatter` then find their patterns. A reduce_scatter moves only past
    views that leave the shape as it is. An all_reduce does not move past a permutation, since that would change the
    memory layout of the result. If both terms of a sum are permuted in the same way, the sum is taken before the
    permutation instead.
    """

    name = "reduce_after_view"
    stage = "simplify"
    exactness = "bitwise"

    def __call__(self, graph: fx.Graph) -> int:
        rewrites = 0
        for node in list(graph.nodes):
            if node.target in SUMS:
                rewrites += _sum_first(node)
        for node in list(graph.nodes):
            if node.target in SUMS:
                rewrites += sink_to_sum(node, _keeps_order)
            elif ir.is_collective(node, "shard"):
                rewrites += _sink_to_shard(node)
        return rewrites


def changes_nothing(node: fx.Node) -> bool:
    """Whether `node` is a view of its operand in the operand's own shape."""
    return node.target in RESHAPES and sizes.same_kind(node, node.all_input_nodes[0])


def _keeps_order(node: fx.Node) -> fx.Node | None:
    return node.all_input_nodes[0] if node.target in KEEP_ORDER else None


def _permutes(node: fx.Node) -> fx.Node | None:
    return node.all_input_nodes[0] if node.target in KEEP_ORDER or node.target in PERMUTE else None


Path = list[fx.Node]
Passes = Callable[[fx.Node], fx.Node | None]
"""Returns the operand of a call whose reduction may move past the call; None if there is none."""
Holds = Callable[[ir.Collective, Path], bool]
"""Whether a reduction may in fact move past the calls on its path."""


def _above(node: fx.Node, passes: Passes) -> tuple[fx.Node, Path]:
    """Walk up from `node` over calls with one user that a reduction `passes`. Return the node reached and the calls, in
    order."""
    path: Path = []
    while (x := passes(node)) is not None and ir.only_user(node) is not None:
        path.append(node)
        node = x
    return node, path[::-1]


def _reduced(node: fx.Node, path: Path, holds: Holds) -> ir.Collective | None:
    """The linear reduction `node`, if it can move past `path`: the dim of a reduce_scatter is not a dim of the viewed
    tensor."""
    c = reduction(node)
    if c is None:
        return None
    if c.op != "all_reduce" and not all(changes_nothing(view) for view in path if _permutes(view) is not None):
        return None
    return c if holds(c, path) else None


def _always(c: ir.Collective, path: Path) -> bool:
    return True


def sink_to_sum(node: fx.Node, passes: Passes, holds: Holds = _always) -> int:
    """Move the reductions above the terms of the sum `node` down to it, past calls that they may pass; return how many
    moved."""
    rewrites = _sink_terms(list(operands(node) or ()), passes, holds)
    return rewrites + (_sink_terms([leaf for leaf, _ in leaves(node)], passes, holds) if is_root(node) else 0)


def _sink_terms(terms: list[fx.Node], passes: Passes, holds: Holds) -> int:
    """Move down every reduction above `terms` that another one there can merge with."""
    found: list[tuple[fx.Node, Path, ir.Collective]] = []
    for term in terms:
        node, path = _above(term, passes)
        c = _reduced(node, path, holds)
        if c is not None and all(node is not other for other, _, _ in found):
            found.append((node, path, c))
    alike = [(n, path, c) for n, path, c in found if sum([mergeable(c, d) for _, _, d in found]) > 1]
    return sum([_sink(node, path, c) for node, path, c in alike])


def _sink_to_shard(node: fx.Node) -> int:
    """Move down the all_reduce above the views whose single user is the shard `node`."""
    shard = ir.collective(node)
    assert shard is not None
    above, path = _above(shard.x, _keeps_order)
    c = ir.collective(above, "all_reduce")
    if c is None or c.group != shard.group or ir.only_user(above) is None:
        return 0
    return _sink(above, path, c)


def _sink(node: fx.Node, path: Path, c: ir.Collective) -> int:
    """Move the reduction `node` after `path`, the calls that its result goes through."""
    if not path:
        return 0
    last, x, old = path[-1], c.x, node
    for view in path:
        if changes_nothing(view):
            old = view
            continue
        if view.target in RESHAPES and not ir.is_contiguous(ir.value(x)):
            x = ir.copy(last, x)
        args = tuple([x if arg is old else arg for arg in view.args])
        x, old = ir.insert(last, view.target, args, view.kwargs, like=view), view
    ir.replace(last, ir.emit(last, replace(c, x=x), like=node))
    for old in (*reversed(path[:-1]), node):
        old.graph.erase_node(old)
    return 1


def _sum_first(node: fx.Node) -> int:
    """Rewrite add(v(p), v(q)), for equal permutations v of all_reduces that can merge, to v(add(p, q))."""
    pair = operands(node)
    if pair is None or pair[0] is pair[1] or not all(v.target in PERMUTE for v in pair):
        return 0
    v, w = pair
    (p, q) = (v.args[0], w.args[0])
    if not isinstance(p, fx.Node) or not isinstance(q, fx.Node) or p is q:
        return 0
    if (v.target, v.args[1:]) != (w.target, w.args[1:]) or not sizes.same_kind(p, q):
        return 0
    if ir.only_user(v) is None or ir.only_user(w) is None:
        return 0
    a, b = (_all_reduce_above(x) for x in (p, q))
    if a is None or b is None or not mergeable(a, b):
        return 0
    total = ir.insert(node, node.target, (p, q), node.kwargs, like=node)
    ir.replace(node, ir.insert(node, v.target, (total, *v.args[1:]), like=v))
    for old in pair:
        old.graph.erase_node(old)
    return 1


def _all_reduce_above(x: fx.Node) -> ir.Collective | None:
    c = reduction(_above(x, _permutes)[0])
    return c if c is not None and c.op == "all_reduce" else None


__all__ = ["KEEP_ORDER", "PERMUTE", "Path", "ReduceAfterView", "sink_to_sum"]
