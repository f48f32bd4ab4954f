"""A gather and a shard over the same group cancel, or become one all_to_all."""

from dataclasses import replace

from torch import fx

from dtensor.job.groups import group_size

from ..graph import ir, sizes
from ..stages import Pass


class CancelGatherShard(Pass):
    """Rewrites an all_gather followed by shards over the same group, and a shard followed by an all_gather.

    Before:

        %all_gather: f32[8,4] = dtensor.all_gather(%x, 0, 8, tp)
        %shard: f32[8,2] = dtensor.shard(%all_gather, 1, tp)
        %shard_1: f32[4,4] = dtensor.shard(%all_gather, 0, tp)

    After:

        %all_to_all: f32[8,2] = dtensor.all_to_all(%x, 0, 1, 8, tp)
        (%shard_1 is %x)

    The shard of a gathered tensor along the gathered dim is the local tensor itself, so the two cancel. Likewise, an
    all_gather after shard(x) gives x, since `shard` requires its operand to be the same on every rank of the group.

    A gather whose users all shard other dims becomes one all_to_all for each of them. If the full value is needed
    anyway, the gather stays and its shards of other dims stay local: an all_to_all would add bytes. The gather also
    stays if there are more distinct shards than ranks.
    """

    name = "cancel_gather_shard"
    stage = "simplify"
    exactness = "bitwise"

    def __call__(self, graph: fx.Graph) -> int:
        rewrites = sum([_cancel(node, "shard") for node in ir.calls(graph, "all_gather")])
        rewrites += sum([_cancel(node, "all_gather") for node in ir.calls(graph, "shard")])
        return rewrites + sum([_exchange(node) for node in ir.calls(graph, "all_gather")])


def _cancel(node: fx.Node, inner: str) -> bool:
    """Replace node(inner(x)) over one dim by x."""
    outer = ir.collective(node)
    assert outer is not None
    found = ir.collective(outer.x, inner)
    if found is None or found.group != outer.group or _dim(found) != _dim(outer):
        return False
    if not sizes.same_kind(found.x, node):
        return False
    ir.stand_in(node, found.x)
    if not outer.x.users:
        node.graph.erase_node(outer.x)
    return True


def _exchange(node: fx.Node) -> int:
    """Replace an all_gather whose users all shard other dims by one all_to_all for each user."""
    gather = ir.collective(node)
    assert gather is not None
    shards = {user: ir.collective(user, "shard") for user in node.users}
    if any(s is None or s.group != gather.group for s in shards.values()):
        return 0
    moves = {user: s for user, s in shards.items() if s is not None and s.scatter_dim != gather.gather_dim}
    if len(moves) != len(shards) or len({s.scatter_dim for s in moves.values()}) > group_size(gather.group):
        return 0
    for user, s in moves.items():
        ir.replace(user, ir.emit(user, replace(gather, op="all_to_all", scatter_dim=s.scatter_dim), like=node))
    if moves:
        node.graph.erase_node(node)
    return len(moves)


def _dim(c: ir.Collective) -> int | None:
    return c.gather_dim if c.op == "all_gather" else c.scatter_dim


__all__ = ["CancelGatherShard"]
