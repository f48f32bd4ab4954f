"""Lowering: the communicating operators become start/wait pairs of functional collectives and local glue."""

from functools import partial
from typing import Any

from torch import fx

from dtensor._torch import make_fx
from dtensor.collectives import KERNELS, LOWERED

from . import ir
from .count import RECORD, describe


class Lower:
    """Each communicating operator whose kernel is the same on every rank is replaced by that kernel, traced.

    Before:

        %all_gather: f32[4,8] = dtensor.all_gather(%x, 1, 8, tp)

    After:

        %all_gather_into_tensor: f32[8,4] = _c10d_functional.all_gather_into_tensor(%x, 2, tp)
        %wait_tensor: f32[8,4] = _c10d_functional.wait_tensor(%all_gather_into_tensor)
        %split: (f32[4,4], f32[4,4]) = aten.split.Tensor(%wait_tensor, 4)
        %getitem: f32[4,4] = getitem(%split, 0)
        %getitem_1: f32[4,4] = getitem(%split, 1)
        %cat: f32[4,8] = aten.cat([%getitem, %getitem_1], 1)

    `shard` and `collective_permute` stay: their rank is looked up when the graph runs, so that all ranks have one
    graph. Each start carries the `CollectiveInfo` of what it was lowered from, under `meta["dtensor_collective"]`.
    """

    name = "lower"
    exactness = "bitwise"

    def __call__(self, graph: fx.Graph) -> int:
        nodes = [node for node in graph.nodes if _communicates(node)]
        for node in nodes:
            _inline(node)
        return len(nodes)


def _communicates(node: fx.Node) -> bool:
    c = ir.collective(node)
    return c is not None and c.op in LOWERED


def _inline(node: fx.Node) -> None:
    c, info = ir.collective(node), describe(node)
    assert c is not None
    inputs = [arg for arg in node.args if isinstance(arg, fx.Node)]
    body = _traced(partial(_call, KERNELS[c.op][0], node.args), [ir.value(x) for x in inputs])
    known, given = dict[fx.Node, Any](), iter(inputs)
    origin = ir.provenance(node)
    for step in body.graph.nodes:
        if step.op == "placeholder":
            known[step] = next(given)
        elif step.op == "output":
            ir.replace(node, known[step.args[0]])
        else:
            with node.graph.inserting_before(node):
                new = node.graph.node_copy(step, known.__getitem__)
            new.meta = {**origin, "val": ir.value(step)}
            if new.target in ir.STARTS:
                new.meta[RECORD] = info
            known[step] = new


def _call(kernel: Any, args: tuple, *values: Any) -> Any:
    """`kernel` on `args`, in which `values` stand for the nodes."""
    given = iter(values)
    return kernel(*[next(given) if isinstance(arg, fx.Node) else arg for arg in args])


def _traced(function: Any, values: list[Any]) -> fx.GraphModule:
    with values[0].fake_mode:
        return make_fx(function)(*values)


__all__ = ["Lower"]
