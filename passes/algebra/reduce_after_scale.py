"""Reductions move after the scaling of their results, where this brings them next to a reduction they can merge
with."""

from typing import Any

from torch import fx

from ..graph import ir, sizes
from ..stages import Pass
from .add_before_reduce import SUMS
from .localize_replicated import is_alike
from .reduce_after_view import KEEP_ORDER, Path, sink_to_sum

aten: Any = ir.aten

SCALES = frozenset((aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar, aten.neg.default))
"""Operators that are linear in each factor. A divisor does not count as a factor."""


class ReduceAfterScale(Pass):
    """Moves a reduction after the scaling of its result: k * all_reduce(x) becomes all_reduce(k * x).

    Before:

        %all_reduce: f32[4] = dtensor.all_reduce(%a, 'sum', tp)
        %all_reduce_1: f32[4] = dtensor.all_reduce(%b, 'sum', tp)
        %mul: f32[4] = aten.mul.Tensor(%all_reduce_1, 0.01)
        %add: f32[4] = aten.add.Tensor(%all_reduce, %mul)

    After:

        %all_reduce: f32[4] = dtensor.all_reduce(%a, 'sum', tp)
        %mul: f32[4] = aten.mul.Tensor(%b, 0.01)
        %all_reduce_1: f32[4] = dtensor.all_reduce(%mul, 'sum', tp)
        %add: f32[4] = aten.add.Tensor(%all_reduce, %all_reduce_1)

    Negation counts as scaling, and reduce_scatter moves like all_reduce. The pass moves a reduction only towards a term
    of the same sum with the same kind of reduction, so that `add_before_reduce` can merge the two. It moves them past
    views as `reduce_after_view` does. The scale must be the same on all ranks of the group: a number given to an
    operator on DTensors, or a tensor that `localize_replicated` knows to be the same on all ranks (before a
    reduce_scatter, one without dims). Rounding happens before the sum, hence `reassociates`.
    """

    name = "reduce_after_scale"
    stage = "simplify"
    exactness = "reassociates"

    def __call__(self, graph: fx.Graph) -> int:
        return sum([sink_to_sum(node, _scaled, _agree) for node in list(graph.nodes) if node.target in SUMS])


def _scaled(node: fx.Node) -> fx.Node | None:
    """The tensor that `node` scales or views; None if `node` does neither."""
    if node.target in KEEP_ORDER:
        return node.all_input_nodes[0]
    if node.target not in SCALES or node.kwargs or not ir.numbers_agree(node):
        return None
    factors = node.args if node.target is aten.mul.Tensor else node.args[:1]
    tensors = [x for x in factors if isinstance(x, fx.Node) and ir.tensors(x)]
    found = [x for x in tensors if sizes.same_kind(x, node)]
    return found[0] if found and len(node.all_input_nodes) == sum(isinstance(x, fx.Node) for x in node.args) else None


def _agree(c: ir.Collective, path: Path) -> bool:
    """Whether all ranks of the reduction scale by the same factors along `path`."""
    for node in path:
        for x in node.all_input_nodes:
            if x is not _scaled(node) and not (
                is_alike(x, c.group) and (c.op == "all_reduce" or ir.value(x).dim() == 0)
            ):
                return False
    return True


__all__ = ["ReduceAfterScale"]
