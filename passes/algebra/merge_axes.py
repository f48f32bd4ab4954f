"""Two collectives of one kind over two mesh axes, one after the other, are one collective over both."""

from dataclasses import replace

from torch import fx

from dtensor.job.groups import group_size

from ..graph import groups, ir
from ..stages import Pass


class MergeAxes(Pass):
    """Merges an all_reduce of an all_reduce, an all_gather of an all_gather, or a reduce_scatter of a reduce_scatter.

    Before:

        %all_reduce: f32[8,4] = dtensor.all_reduce(%x, 'sum', tp)
        %all_reduce_1: f32[8,4] = dtensor.all_reduce(%all_reduce, 'sum', dp)

    After:

        %all_reduce: f32[8,4] = dtensor.all_reduce(%x, 'sum', world)

    This needs a process group over the axes of both, whose links do not make the collective more expensive per byte,
    and the intermediate value must have no other user. If a dim is sharded over both axes, the merged group must split
    it just as the two did one after the other: the outer axis comes first in the group's numbering, and the length
    divides evenly on all ranks, for which the group must cover its mesh. Reductions add in another order, hence
    `reassociates`.
    """

    name = "merge_axes"
    stage = "simplify"
    exactness = "reassociates"

    def __call__(self, graph: fx.Graph) -> int:
        return sum([_merge(node) for node in ir.calls(graph)])


def _merge(node: fx.Node) -> bool:
    late = ir.collective(node)
    assert late is not None
    early = ir.collective(late.x, late.op)
    if early is None or ir.only_user(late.x) is not node or not ir.same_phase(late.x, node):
        return False
    axes = _merged(early, late, node)
    if axes is None:
        return False
    ir.replace(node, ir.emit(node, replace(late, x=early.x, group=axes.whole), like=node))
    node.graph.erase_node(late.x)
    return True


def _merged(early: ir.Collective, late: ir.Collective, node: fx.Node) -> groups.Product | None:
    """The group for both, or None if they cannot be merged or merging does not pay."""
    if early.reduce_op != late.reduce_op:
        return None
    if late.op == "all_reduce":
        axes = groups.product(late.group, early.group)
        return axes if axes is not None and _pays("all_reduce", axes, 1) else None
    if late.op == "all_gather" and early.gather_dim == late.gather_dim:
        # The axis gathered first is the one sharded last, which is the inner axis.
        axes = groups.product(late.group, early.group)
        return axes if axes is not None and _cuts_alike(axes, early.x, node, late.gather_dim) else None
    if late.op == "reduce_scatter" and early.scatter_dim == late.scatter_dim:
        axes = groups.product(early.group, late.group)
        return axes if axes is not None and _cuts_alike(axes, node, early.x, late.scatter_dim) else None
    return None


def _cuts_alike(axes: groups.Product, part: fx.Node, full: fx.Node, dim: int | None) -> bool:
    assert dim is not None
    n = group_size(axes.whole)
    divides = ir.same(ir.value(part).shape[dim] * n, ir.value(full).shape[dim])
    return axes.nested and axes.covers and divides and _pays("all_gather", axes, group_size(axes.first))


def _pays(op: str, axes: groups.Product, parts: int) -> bool:
    """Whether the merged collective takes no more time per byte. The collective over the second axis moves one of
    `parts`.

    (A reduce_scatter costs as much as the all_gather that would put its shards together.)
    """
    apart = axes.seconds(op, axes.first) + axes.seconds(op, axes.second) / parts
    return not groups.grows(apart, axes.seconds(op, axes.whole))


__all__ = ["MergeAxes"]
