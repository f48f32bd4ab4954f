"""An all_reduce of which every rank keeps only its shard is a reduce_scatter."""

from dataclasses import replace

from torch import fx

from ..graph import ir
from ..stages import Pass


class FuseReduceScatter(Pass):
    """Rewrites an all_reduce followed by a shard over the same group to a reduce_scatter.

    Before:

        %all_reduce: f32[8,4] = dtensor.all_reduce(%x, 'sum', tp)
        %shard: f32[4,4] = dtensor.shard(%all_reduce, 0, tp)

    After:

        %reduce_scatter: f32[4,4] = dtensor.reduce_scatter(%x, 'sum', 0, tp)

    This halves the bytes sent. It fires only if every user of the all_reduce is the same shard: if the full value is
    needed anyway, the shards cost nothing. The backend may add in another order, hence `reassociates`.
    """

    name = "fuse_reduce_scatter"
    stage = "simplify"
    exactness = "reassociates"

    def __call__(self, graph: fx.Graph) -> int:
        return sum([_scatter(node) for node in ir.calls(graph, "all_reduce")])


def _scatter(node: fx.Node) -> int:
    reduce = ir.collective(node)
    assert reduce is not None
    shard, users = ir.shared_shard(node), list(node.users)
    if shard is None or shard.group != reduce.group:
        return 0
    for user in users:
        scatter = replace(reduce, op="reduce_scatter", scatter_dim=shard.scatter_dim)
        ir.replace(user, ir.emit(user, scatter, like=node))
    node.graph.erase_node(node)
    return len(users)


__all__ = ["FuseReduceScatter"]
