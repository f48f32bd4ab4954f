"""What is cut over other axes after a collective is cut before it: the collective then moves a shard."""

from dataclasses import replace

from torch import fx

from ..graph import groups, ir

MOVED = ("all_reduce", "all_gather")
"""The collectives that a shard goes before."""


class ShardBeforeCollective:
    """all_reduce or all_gather over one group, followed by shard over a group that has no axis in common with it.

    Before:

        %all_gather: f32[8,4] = dtensor.all_gather(%x, 0, 8, dp)
        %shard: f32[8,2] = dtensor.shard(%all_gather, 1, tp)

    After:

        %shard: f32[4,2] = dtensor.shard(%x, 1, tp)
        %all_gather: f32[8,2] = dtensor.all_gather(%shard, 0, 8, dp)

    All ranks of the one group have the same place in theirs of the other, so they cut alike. Fires only if every user
    of the collective is the same shard; a dim that is gathered is cut after it, for before it has other rows.
    """

    name = "shard_before_collective"
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
