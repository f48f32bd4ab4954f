"""A reduce_scatter whose shards are gathered again is an all_reduce."""

from dataclasses import replace

from torch import fx

from ..graph import ir, sizes
from ..stages import Pass


class FuseAllReduce(Pass):
    """Rewrites a reduce_scatter followed by an all_gather of the same dim over the same group to an all_reduce.

    Before:

        %reduce_scatter: f32[4,4] = dtensor.reduce_scatter(%x, 'sum', 0, tp)
        %all_gather: f32[8,4] = dtensor.all_gather(%reduce_scatter, 0, 8, tp)

    After:

        %all_reduce: f32[8,4] = dtensor.all_reduce(%x, 'sum', tp)

    This sends as many bytes in one collective instead of two. It fires only if the gather is the only user of the
    shards and gives a tensor of the shape that was scattered. In a joint graph both must belong to the forward or both
    to the backward: otherwise the larger value would be kept until the backward. The backend may add in another order,
    hence `reassociates`.
    """

    name = "fuse_all_reduce"
    stage = "simplify"
    exactness = "reassociates"

    def __call__(self, graph: fx.Graph) -> int:
        return sum([_join(node) for node in ir.calls(graph, "all_gather")])


def _join(node: fx.Node) -> bool:
    gather = ir.collective(node)
    assert gather is not None
    scatter = ir.collective(gather.x, "reduce_scatter")
    if scatter is None or scatter.group != gather.group or scatter.scatter_dim != gather.gather_dim:
        return False
    if ir.only_user(gather.x) is not node or not ir.same_phase(gather.x, node):
        return False
    if not sizes.same_kind(scatter.x, node):
        return False
    ir.replace(node, ir.emit(node, replace(scatter, op="all_reduce", scatter_dim=None), like=node))
    node.graph.erase_node(gather.x)
    return True


__all__ = ["FuseAllReduce"]
