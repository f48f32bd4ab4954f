"""A shard over other axes moves before the collective, which then moves only a shard."""

from dataclasses import replace

from torch import fx

from ..graph import groups, ir
from ..stages import Pass

MOVED = ("all_reduce", "all_gather")
"""The collectives that a shard moves before."""


class ShardBeforeCollective(Pass):
    """Moves a shard before an all_reduce or all_gather over a group that has no mesh axis in common with the shard's
    group.

    Before:

        %all_gather: f32[8,4] = dtensor.all_gather(%x, 0, 8, dp)
        %shard: f32[8,2] = dtensor.shard(%all_gather, 1, tp)

    After:

        %shard: f32[4,2] = dtensor.shard(%x, 1, tp)
        %all_gather: f32[8,2] = dtensor.all_gather(%shard, 0, 8, dp)

    All ranks of the collective's group have the same position in their groups of the shard, so they take the same
    shard. The pass fires only if all users of the collective are the same shard. A shard of the gathered dim stays
    after the gather, because before it that dim has other rows.
    """

    name = "shard_before_collective"
    stage = "simplify"
    exactness = "bitwise"

    def __call__(self, graph: fx.Graph) -> int:
        return sum([_swap(node) for node in ir.calls(graph, *MOVED)])


def _swap(node: fx.Node) -> int:
    c, shard = ir.collective(node), ir.shared_shard(node)
    if c is None or shard is None or shard.scatter_dim == c.gather_dim:
        return 0
    users = sorted(node.users)
    if not groups.disjoint(c.group, shard.group) or not all(ir.same_phase(node, user) for user in users):
        return 0
    x = ir.emit(users[0], replace(shard, x=c.x), like=users[0])
    ir.stand_for_all(users, ir.emit(users[0], replace(c, x=x), like=node))
    node.graph.erase_node(node)
    return len(users)


__all__ = ["ShardBeforeCollective"]
