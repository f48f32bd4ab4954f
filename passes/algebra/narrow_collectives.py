"""What is moved between ranks is moved in the narrower dtype: casts go to the other side of the collective."""

from dataclasses import replace

import torch
from torch import fx

from ..graph import ir

MOVES = ("all_gather", "all_to_all", "collective_permute")
"""The collectives that move elements and compute nothing."""

CASTS = frozenset((ir.aten._to_copy.default, torch.ops.prims.convert_element_type.default))


class NarrowCollectives:
    """A narrowing cast after a move goes before it, and a widening cast before a move goes after it.

    Before:

        %all_gather: f32[8,4] = dtensor.all_gather(%x, 0, 8, tp)
        %to_copy: bf16[8,4] = aten._to_copy(%all_gather, dtype=bf16)

    After:

        %to_copy: bf16[4,4] = aten._to_copy(%x, dtype=bf16)
        %all_gather: bf16[8,4] = dtensor.all_gather(%to_copy, 0, 8, tp)

    A cast is made element by element, so the bits are the same. Fires only if nobody else uses what lies between: a
    value that is needed wide is moved once. Reductions stay, for they compute in the dtype that they are given.
    """

    name = "narrow_collectives"
    exactness = "bitwise"

    def __call__(self, graph: fx.Graph) -> int:
        return sum([_narrow_first(node) or _widen_last(node) for node in ir.calls(graph, *MOVES)])


def _cast_of(node: fx.Node | None) -> fx.Node | None:
    """What `node` casts and leaves alone otherwise; None if that is not all it does."""
    if node is None or node.target not in CASTS:
        return None
    x, others = node.args[0], [kwarg for key, kwarg in node.kwargs.items() if key != "dtype"]
    if not isinstance(x, fx.Node) or any(others) or ir.is_written(node) or ir.is_written(x):
        return None
    return x


def _bytes(node: fx.Node) -> int:
    return ir.value(node).dtype.itemsize


def _narrow_first(node: fx.Node) -> bool:
    cast, c = ir.only_user(node), ir.collective(node)
    if cast is None or c is None or _cast_of(cast) is not node or not ir.same_phase(node, cast):
        return False
    if _bytes(cast) >= _bytes(node):
        return False
    x = ir.insert(node, cast.target, (c.x, *cast.args[1:]), cast.kwargs, like=cast)
    ir.replace(cast, ir.emit(node, replace(c, x=x), like=node))
    node.graph.erase_node(node)
    return True


def _widen_last(node: fx.Node) -> bool:
    c = ir.collective(node)
    assert c is not None
    cast, x = c.x, _cast_of(c.x)
    if x is None or ir.only_user(cast) is not node or not ir.same_phase(node, cast) or _bytes(x) >= _bytes(cast):
        return False
    moved = ir.emit(node, replace(c, x=x), like=node)
    ir.replace(node, ir.insert(node, cast.target, (moved, *cast.args[1:]), cast.kwargs, like=cast))
    node.graph.erase_node(cast)
    return True


__all__ = ["NarrowCollectives"]
