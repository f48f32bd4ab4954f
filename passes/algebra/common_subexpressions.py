"""Common subexpressions, collectives included: the same call on the same arguments is made once."""

from typing import Any

from torch import fx

from ..graph import ir
from ..stages import JOINT, Compilation, Pass


class CommonSubexpressions(Pass):
    """Removes the second of two equal calls, and lets its users read the result of the first.

    Before:

        %all_reduce: f32[4] = dtensor.all_reduce(%x, 'sum', tp)
        %all_reduce_1: f32[4] = dtensor.all_reduce(%x, 'sum', tp)
        %mul: f32[4] = aten.mul.Tensor(%all_reduce, %all_reduce_1)

    After:

        %all_reduce: f32[4] = dtensor.all_reduce(%x, 'sum', tp)
        %mul: f32[4] = aten.mul.Tensor(%all_reduce, %all_reduce)

    Equal calls of pure operators on the same arguments give equal results. Random draws, writes, and calls with unknown
    side effects are left alone, and no calls are merged across a write. If both results leave the graph, the caller
    must get two tensors: a collective then becomes a copy of the first result, and any other call stays.
    """

    name = "common_subexpressions"
    stage = "simplify"
    exactness = "bitwise"

    def taking(self, compilation: Compilation) -> Pass | None:
        # Merging a forward node with an equal backward node would undo the recomputation of activation checkpointing.
        return None if compilation.graph == JOINT else self

    def __call__(self, graph: fx.Graph) -> int:
        rewrites, epoch = 0, 0
        seen: dict[Any, fx.Node] = {}
        for node in list(graph.nodes):
            if ir.mutates(node):
                epoch += 1
            if not ir.is_pure(node):
                continue
            first = seen.setdefault((epoch, node.target, _key(node.args), _key(node.kwargs)), node)
            if first is not node:
                rewrites += _merge(first, node)
        return rewrites


def _merge(first: fx.Node, node: fx.Node) -> bool:
    if ir.is_written(first) or ir.is_written(node):
        return False
    if not (ir.escapes(first) and ir.escapes(node)):
        ir.redirect(node, first)
        node.graph.erase_node(node)
        return True
    if not ir.is_collective(node):
        return False
    ir.stand_in(node, first)
    return True


def _key(arg: Any) -> Any:
    """Return a hashable form of an argument that keeps 1, 1.0 and True apart, and 0.0 and -0.0."""
    if isinstance(arg, fx.Node):
        return arg
    if isinstance(arg, (tuple, list)):
        return tuple([_key(item) for item in arg])
    if isinstance(arg, dict):
        return tuple(sorted((name, _key(item)) for name, item in arg.items()))
    if isinstance(arg, slice):
        return slice, _key((arg.start, arg.stop, arg.step))
    return type(arg), repr(arg)


__all__ = ["CommonSubexpressions"]
