"""Data moves between ranks in the narrower dtype: casts move to the other side of the collective."""

from dataclasses import replace

import torch
from torch import fx

from ..graph import ir
from ..stages import Pass

MOVES = ("all_gather", "all_to_all", "collective_permute")
"""The collectives that move elements without computing."""

CASTS = frozenset((ir.aten._to_copy.default, torch.ops.prims.convert_element_type.default))


class NarrowCollectives(Pass):
    """Moves a narrowing cast from after a collective to before it, and a widening cast the other way.

    Before:

        %all_gather: f32[8,4] = dtensor.all_gather(%x, 0, 8, tp)
        %to_copy: bf16[8,4] = aten._to_copy(%all_gather, dtype=bf16)

    After:

        %to_copy: bf16[4,4] = aten._to_copy(%x, dtype=bf16)
        %all_gather: bf16[8,4] = dtensor.all_gather(%to_copy, 0, 8, tp)

    The collectives are those that only move elements: all_gather, all_to_all and collective_permute. A cast works
    element by element, so the result is the same to the bit. The pass fires only if the value between cast and
    collective has no other user: a value that is also needed in the wide dtype is moved once. Reductions stay as they
    are, because they compute in the dtype they are given.
    """

    name = "narrow_collectives"
    stage = "simplify"
    exactness = "bitwise"

    def __call__(self, graph: fx.Graph) -> int:
        return sum([_narrow_first(node) or _widen_last(node) for node in ir.calls(graph, *MOVES)])


def _cast_of(node: fx.Node | None) -> fx.Node | None:
    """The operand of the cast `node`; None if `node` does anything but cast."""
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
