"""The sum of two reductions is the reduction of the sum: one collective instead of several."""

from dataclasses import replace

from torch import fx

from ..graph import ir, sizes
from ..stages import Pass

PLAIN = ir.aten.add.Tensor
SUMS = frozenset((PLAIN, ir.aten.sub.Tensor))
REDUCTIONS = ("all_reduce", "reduce_scatter")


class AddBeforeReduce(Pass):
    """Rewrites the sum or difference of two all_reduces or two reduce_scatters to a single reduction.

    Before:

        %all_reduce: f32[2,4] = dtensor.all_reduce(%a, 'sum', tp)
        %all_reduce_1: f32[2,4] = dtensor.all_reduce(%b, 'sum', tp)
        %add: f32[2,4] = aten.add.Tensor(%all_reduce, %all_reduce_1)

    After:

        %add: f32[2,4] = aten.add.Tensor(%a, %b)
        %all_reduce: f32[2,4] = dtensor.all_reduce(%add, 'sum', tp)

    Both reductions must be over the same group with the same linear reduction (sum or avg) of floating-point values,
    and neither may have another user. Linearity makes the two forms equal except for rounding: additions happen in
    another order, hence `reassociates`.

    The `alpha` of the addition stays with the sum; the pass fires only if it is the same on all ranks. One operand may
    broadcast to the other, except along a scattered dim, so the bytes sent never grow. Deeper sums of equal shapes
    collapse too: in (x + all_reduce(a)) + all_reduce(b) the two reductions become one and the residual x stays local.
    """

    name = "add_before_reduce"
    stage = "simplify"
    exactness = "reassociates"

    def __call__(self, graph: fx.Graph) -> int:
        rewrites = 0
        for node in list(graph.nodes):
            if node.target in SUMS:
                rewrites += _merge_operands(node)
        for node in list(graph.nodes):
            root = node if is_root(node) else None
            while root is not None and (root := _merge_leaves(root)) is not None:
                rewrites += 1
        return rewrites


def operands(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Return the two tensors that `node` adds or subtracts; None if one of them is a number."""
    a, b = (*node.args, None)[:2]
    return (a, b) if isinstance(a, fx.Node) and isinstance(b, fx.Node) else None


def reduction(node: fx.Node) -> ir.Collective | None:
    """Return the linear reduction of floating-point values that `node` computes; None if it is not one or does not have
    exactly one user."""
    c = ir.collective(node)
    if c is None or c.op not in REDUCTIONS or c.reduce_op not in ir.LINEAR or ir.only_user(node) is None:
        return None
    return c if ir.value(node).dtype.is_floating_point else None


def mergeable(a: ir.Collective, b: ir.Collective) -> bool:
    """Whether two reductions differ only in their operand. Scattered dims are compared from the last dim, since that is
    how shapes are aligned when they broadcast."""
    return replace(a, x=b.x, scatter_dim=b.scatter_dim) == b and _from_back(a) == _from_back(b)


def _from_back(c: ir.Collective) -> int | None:
    return None if c.scatter_dim is None else c.scatter_dim - ir.value(c.x).dim()


def is_plain(node: object) -> bool:
    """Whether `node` adds two tensors without scaling."""
    return isinstance(node, fx.Node) and node.target is PLAIN and not node.kwargs and operands(node) is not None


def is_root(node: fx.Node) -> bool:
    """Whether `node` is a plain sum that is not a term of another one."""
    return is_plain(node) and not is_plain(ir.only_user(node))


def leaves(root: fx.Node) -> list[tuple[fx.Node, fx.Node]]:
    """Return the terms of a sum of equal shapes and dtypes, each with the addition it is an operand of."""
    found: list[tuple[fx.Node, fx.Node]] = []
    todo = [root]
    while todo:
        node = todo.pop()
        pair = operands(node)
        if pair is None or not is_plain(node):
            continue
        for x in pair:
            if pair[0] is not pair[1] and _is_inner(x, node):
                todo.append(x)
            else:
                found.append((x, node))
    return found


def _is_inner(x: fx.Node, parent: fx.Node) -> bool:
    return is_plain(x) and ir.only_user(x) is parent and sizes.same_kind(x, parent)


def _merge_operands(node: fx.Node) -> bool:
    pair = operands(node)
    if pair is None or pair[0] is pair[1] or not ir.numbers_agree(node):
        return False
    a, b = reduction(pair[0]), reduction(pair[1])
    if a is None or b is None or not mergeable(a, b):
        return False
    wide = _wide(a, b, pair, node)
    if wide is None:
        return False
    total = ir.insert(node, node.target, (a.x, b.x), node.kwargs, like=node)
    ir.replace(node, ir.emit(node, replace(wide, x=total), like=pair[0]))
    for old in pair:
        old.graph.erase_node(old)
    return True


def _wide(a: ir.Collective, b: ir.Collective, pair: tuple[fx.Node, fx.Node], node: fx.Node) -> ir.Collective | None:
    """The reduction whose result has the shape of the sum, with all dtypes equal; None if there is none, or if the
    scattered dims are of different lengths."""
    x, y, out = ir.value(a.x), ir.value(b.x), ir.value(node)
    if not x.dtype == y.dtype == out.dtype:
        return None
    dim = _from_back(a)
    if dim is not None and not sizes.same(sizes.length(a.x, dim), sizes.length(b.x, dim)):
        return None
    return next((c for c, result in zip((a, b), pair) if sizes.same_kind(result, node)), None)


def _merge_leaves(root: fx.Node) -> fx.Node | None:
    """Merge two reductions among the terms of `root`. Return the remaining sum; None if no two can be merged."""
    terms = [(leaf, parent, reduction(leaf)) for leaf, parent in leaves(root)]
    fit = [t for t in terms if t[2] is not None and sizes.same_kind(t[0], t[1])]
    for k, (leaf, parent, c) in enumerate(fit):
        for other, above, d in fit[:k]:
            if leaf is other or c is None or d is None or not mergeable(c, d) or not sizes.same_kind(c.x, d.x):
                continue
            (early, gone), (late, _) = sorted([(other, above), (leaf, parent)], key=lambda term: term[0])
            rest = _move(early, gone, late)
            if rest is not None:
                return rest if gone is root else root
    return None


def _move(early: fx.Node, parent: fx.Node, late: fx.Node) -> fx.Node | None:
    """Drop the term `early` and its addition, and add the operand of its reduction to that of `late`.

    Returns the other operand of the dropped addition, or None if it cannot replace the addition.
    """
    pair, a, b = operands(parent), reduction(early), reduction(late)
    if pair is None or a is None or b is None:
        return None
    rest = pair[1] if pair[0] is early else pair[0]
    x, out = ir.value(rest), ir.value(parent)
    if not sizes.is_even(rest) or not sizes.same_kind(rest, parent) or not ir.same_strides(x, out.stride()):
        return None
    total = ir.insert(late, PLAIN, (a.x, b.x), like=parent)
    ir.redirect(parent, rest)
    parent.graph.erase_node(parent)
    early.graph.erase_node(early)
    new = ir.emit(late, replace(b, x=total), like=late)
    ir.replace(late, new)
    return new if rest is late else rest


__all__ = ["AddBeforeReduce"]
