"""Lowering: communicating operators become start/wait pairs of functional collectives, with local glue around them."""

from typing import Any

from torch import fx

from dtensor.comm.collectives import KERNELS, LOWERED
from dtensor.job.groups import group_size
from dtensor.mesh.provenance import ARRIVAL, ORIGIN, RECORD, SENT, WRITTEN

from ..graph import ir, sizes
from ..graph.count import describe
from ..stages import Pass
from .inline import Bodies, traced

aten: Any = ir.aten


REDUCTIONS = frozenset(
    (aten.sum.dim_IntList, aten.amax.default, aten.amin.default, aten.prod.dim_int),
)
"""The operators with which kernels reduce where ranks exchange the parts (over gloo)."""


class Lower(Pass):
    """Replaces each communicating operator by its traced kernel: a start, a wait and local operators.

    Before:

        %all_gather: f32[4,8] = dtensor.all_gather(%x, 1, 8, tp)

    After:

        %all_gather_into_tensor: f32[8,4] = _c10d_functional.all_gather_into_tensor(%x, 2, tp)
        %wait_tensor: f32[8,4] = _c10d_functional.wait_tensor(%all_gather_into_tensor)
        %split: (f32[4,4], f32[4,4]) = aten.split.Tensor(%wait_tensor, 4)
        %getitem: f32[4,4] = getitem(%split, 0)
        %getitem_1: f32[4,4] = getitem(%split, 1)
        %cat: f32[4,8] = aten.cat([%getitem, %getitem_1], 1)

    The traced kernel is what the operator would run, so the bits are the same; the pass makes start and wait visible to
    `bucket` and `schedule`. Over gloo the starts are our own (`dtensor.comm.start_collectives`), and a
    reduce_scatter becomes an all_to_all of its parts and a local reduction of them.

    `shard` stays as it is: it looks up its rank when the graph runs, so that all ranks have the same graph.

    Each start carries the `CollectiveInfo` of the operator it was lowered from under `meta["dtensor_collective"]`, and
    the call itself, with values in place of nodes, under `meta["dtensor_lowered"]`, from which `raise` can undo the
    lowering.
    """

    name = "lower"
    stage = "overlap"
    exactness = "bitwise"

    def __call__(self, graph: fx.Graph) -> int:
        nodes, bodies = ir.calls(graph, *LOWERED), Bodies()
        for node in nodes:
            _lower(node, bodies)
        return len(nodes)


def _lower(node: fx.Node, bodies: Bodies) -> None:
    c, info = ir.collective(node), describe(node)
    assert c is not None
    args = tuple([ir.value(arg) if isinstance(arg, fx.Node) else arg for arg in node.args])
    sent = _sent(node, c)
    for new in bodies.inline(node, KERNELS[c.op][0]):
        if new.target in ir.STARTS:
            new.meta |= {RECORD: info, ORIGIN: (c.op, args), **sent}
        elif new.target in REDUCTIONS:
            new.meta[ARRIVAL] = True


def _sent(node: fx.Node, c: ir.Collective) -> dict[str, int]:
    """The entries `SENT` and `WRITTEN` for the start of `node`; none where its shards are even."""
    if sizes.is_even(node) and sizes.is_even(c.x):
        return {}
    most, after = sizes.nbytes(c.x), sizes.nbytes(node)
    if c.op == "reduce_scatter":
        most = after * group_size(c.group)
    elif c.op == "all_to_all":
        most = max(most, after)
    return {SENT: most, WRITTEN: ir.is_written(c.x)}


def lowered(op: str, args: tuple[Any, ...]) -> fx.Graph:
    """Trace the kernel of `op` on `args`. Its placeholders are the tensors and symbolic sizes among them, in order."""
    return traced(KERNELS[op][0], args)


__all__ = ["Lower", "lowered"]
