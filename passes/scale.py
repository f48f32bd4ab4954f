"""Reductions sink below what scales their results, where that brings them next to what they can merge with."""

from torch import fx

from . import ir
from .sink import KEEP_ORDER, sink_to_sum
from .sum_of_all_reduces import SUMS

aten = ir.aten

SCALES = frozenset((aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar, aten.neg.default))
"""Linear in their first argument, if the second is a number."""


class Scale:
    """k * all_reduce(x) becomes all_reduce(k * x), and so does -all_reduce(x), and reduce_scatter.

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

    Only towards a term of the same sum that reduces alike: `sum_of_all_reduces` then makes one of them. Views on the
    way are passed as in `sink`. Numbers in a graph are the same on all ranks, as everywhere in the library; what scales
    by a tensor stays. Rounding comes before the sum, hence `reassociates`.
    """

    name = "scale"
    exactness = "reassociates"

    def __call__(self, graph: fx.Graph) -> int:
        return sum([sink_to_sum(node, _passes) for node in list(graph.nodes) if node.target in SUMS])


def _passes(node: fx.Node) -> bool:
    if node.target in KEEP_ORDER:
        return True
    plain = not node.kwargs and not any(isinstance(arg, fx.Node) for arg in node.args[1:])
    return node.target in SCALES and plain and _keeps_dtype(node)


def _keeps_dtype(node: fx.Node) -> bool:
    x = node.args[0]
    return isinstance(x, fx.Node) and ir.value(x).dtype == ir.value(node).dtype


__all__ = ["Scale"]
