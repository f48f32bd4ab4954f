"""A reduction over several axes that is then sharded over some of them scatters first, and then reduces a shard."""

from dataclasses import replace

from torch import fx

from ..graph import groups, ir
from ..stages import Pass


class ScatterBeforeReduce(Pass):
    """Rewrites an all_reduce that is then sharded over some of its axes to a reduce_scatter and a smaller all_reduce.

    Before:

        %all_reduce: f32[8,4] = dtensor.all_reduce(%x, 'sum', world)
        %shard: f32[4,4] = dtensor.shard(%all_reduce, 0, tp)

    After:

        %reduce_scatter: f32[4,4] = dtensor.reduce_scatter(%x, 'sum', 0, tp)
        %all_reduce: f32[4,4] = dtensor.all_reduce(%reduce_scatter, 'sum', dp)

    A reduce_scatter over tp of an all_reduce over dp becomes the same: the scatter goes first. The pass fires only if
    all users of the all_reduce are the same shard, or its only user is the reduce_scatter, and if the groups are known
    as axes of one mesh.

    For an all_reduce followed by a shard, let n be the bytes of the operand, p the number of ranks in the shard's
    group, and r the number along the remaining axes. Each rank sends 2 (1 - 1/pr) n bytes before and (1 - 1/p) n + 2 (1
    - 1/r) n/p after. That is (1 - 1/p) n less, and over no slower links. Additions happen in another order, hence
    `reassociates`.
    """

    name = "scatter_before_reduce"
    stage = "simplify"
    exactness = "reassociates"

    def __call__(self, graph: fx.Graph) -> int:
        rewrites = sum([_scatter(node) for node in ir.calls(graph, "all_reduce")])
        return rewrites + sum([_swap(node) for node in ir.calls(graph, "reduce_scatter")])


def _scatter(node: fx.Node) -> int:
    reduce = ir.collective(node)
    shard = ir.shared_shard(node)
    if reduce is None or shard is None:
        return 0
    axes = groups.quotient(reduce.group, shard.group)
    if axes is None:
        return 0
    first = replace(reduce, op="reduce_scatter", scatter_dim=shard.scatter_dim, group=axes.first)
    users = sorted(node.users)
    part = ir.emit(users[0], first, like=node)
    ir.stand_for_all(users, ir.emit(users[0], replace(reduce, x=part, group=axes.second), like=node))
    node.graph.erase_node(node)
    return len(users)


def _swap(node: fx.Node) -> bool:
    """Rewrite reduce_scatter(all_reduce(x)) over disjoint axes so that the reduce_scatter comes first."""
    scatter = ir.collective(node)
    assert scatter is not None
    reduce = ir.collective(scatter.x, "all_reduce")
    if reduce is None or reduce.reduce_op != scatter.reduce_op or ir.only_user(scatter.x) is not node:
        return False
    if not groups.disjoint(reduce.group, scatter.group):
        return False
    part = ir.emit(node, replace(scatter, x=reduce.x), like=node)
    ir.replace(node, ir.emit(node, replace(reduce, x=part), like=scatter.x))
    node.graph.erase_node(scatter.x)
    return True


__all__ = ["ScatterBeforeReduce"]
