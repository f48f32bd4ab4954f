"""Lowering: communicating operators become start/wait pairs of functional collectives, with local glue around them."""

from collections.abc import Hashable
from functools import partial
from typing import Any

import torch
from torch import fx

from dtensor.comm.collectives import KERNELS, LOWERED
from dtensor.job.groups import group_size
from dtensor.mesh.provenance import ARRIVAL, ORIGIN, RECORD, SENT, WRITTEN
from dtensor.torch_private.core import make_fx
from dtensor.torch_private.symbolic_sizes import sizes_before_strides

from ..graph import ir, sizes
from ..graph.count import describe
from ..stages import Pass

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
        nodes = ir.calls(graph, *LOWERED)
        bodies: dict[Hashable, fx.Graph] = {}
        for node in nodes:
            _inline(node, bodies)
        return len(nodes)


def _inline(node: fx.Node, bodies: dict[Hashable, fx.Graph]) -> None:
    """Replace `node` by its kernel; `bodies` caches the traced kernels."""
    c, info = ir.collective(node), describe(node)
    assert c is not None
    given = iter([arg for arg in node.args if isinstance(arg, fx.Node)])
    args = tuple([ir.value(arg) if isinstance(arg, fx.Node) else arg for arg in node.args])
    likeness = c.op, ir.likeness(args)
    traced_before = bodies.get(likeness)
    # A kernel traced on symbolic sizes has results whose sizes depend on these symbols.
    body = lowered(c.op, args) if traced_before is None or not _is_static(args) else traced_before
    bodies[likeness] = body
    known: dict[fx.Node, Any] = {}
    origin, sent = ir.provenance(node), _sent(node, c)
    with ir.inside(ir.fake_mode(node)), node.graph.inserting_before(node):
        for step in body.nodes:
            if step.op == "placeholder":
                known[step] = next(given)
            elif step.op != "output":
                new = known[step] = node.graph.node_copy(step, known.__getitem__)
                # Two calls must not share a value: others recognise shared memory by it.
                val = ir.evaluated(new) if body is traced_before else ir.value(step)
                new.meta = {**origin, "val": val}
                if new.target in ir.STARTS:
                    new.meta |= {RECORD: info, ORIGIN: (c.op, args), **sent}
                elif new.target in REDUCTIONS:
                    new.meta[ARRIVAL] = True
    ir.replace(node, known[body.output_node().args[0]])  # pyright: ignore


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


def _is_static(args: tuple[Any, ...]) -> bool:
    lengths = [n for x in args if isinstance(x, torch.Tensor) for n in x.shape]
    return not any(isinstance(n, torch.SymInt) for n in (*args, *lengths))


def lowered(op: str, args: tuple[Any, ...]) -> fx.Graph:
    """Trace the kernel of `op` on `args`. Its placeholders are the tensors and symbolic sizes among them, in order."""
    values: list[Any] = [arg for arg in args if isinstance(arg, (torch.Tensor, torch.SymInt))]
    with values[0].fake_mode:
        return make_fx(partial(_call, KERNELS[op][0], args))(*values).graph


def _call(kernel: Any, args: tuple[Any, ...], *values: Any) -> Any:
    """Call `kernel` on `args`, with `values` in place of the tensors and symbolic sizes."""
    sizes_before_strides(values)
    given = iter(values)
    return kernel(*[next(given) if isinstance(arg, (torch.Tensor, torch.SymInt)) else arg for arg in args])


__all__ = ["Lower", "lowered"]
