"""Collectives on a value that all ranks of the group already hold become local."""

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from dtensor.job.groups import group_size

from ..graph import groups, ir
from ..stages import Pass
from .reduce_after_view import KEEP_ORDER, PERMUTE

aten: Any = ir.aten

MAKES_ALIKE = ("all_reduce", "all_gather")
"""The collectives whose result is the same on every rank of the group."""

VIEWS = KEEP_ORDER | PERMUTE | {aten.clone.default}

IDEMPOTENT = frozenset(("max", "min", "avg"))
"""The reductions that give x if all ranks hold x; a sum gives a multiple of it."""


class LocalizeReplicated(Pass):
    """Turns an all_reduce, reduce_scatter or all_gather of a replicated value into a local computation.

    Before:

        %all_reduce: f32[4] = dtensor.all_reduce(%x, 'sum', tp)
        %relu: f32[4] = aten.relu(%all_reduce)
        %all_reduce_1: f32[4] = dtensor.all_reduce(%relu, 'sum', tp)
        %all_gather: f32[8] = dtensor.all_gather(%relu, 0, 8, tp)

    After:

        %all_reduce: f32[4] = dtensor.all_reduce(%x, 'sum', tp)
        %relu: f32[4] = aten.relu(%all_reduce)
        %mul: f32[4] = aten.mul.Tensor(%relu, 2)
        %cat: f32[8] = aten.cat([%relu, %relu], 0)

    A sum becomes a multiple, and a gather of even shards a concatenation; avg, max and min give x itself, and a
    reduce_scatter a shard of the result. Reductions are rewritten for floating-point values only, and products never. A
    multiple is not rounded as the sum is, hence `reassociates`.

    A value counts as replicated over the group if it comes from an all_reduce or all_gather over the group, or over a
    wider group of the same mesh, and only pointwise operators and views of such values lie between. Inputs of the graph
    never count, nor do results of operators with number arguments that may differ between ranks. The number arguments
    of an operator called on DTensors are known not to differ.
    """

    name = "localize_replicated"
    stage = "simplify"
    exactness = "reassociates"

    def __call__(self, graph: fx.Graph) -> int:
        known: dict[tuple[fx.Node, str], bool] = {}
        rewrites = 0
        for node in list(graph.nodes):
            c = ir.collective(node)
            if c is not None and c.op in _LOCAL and is_alike(c.x, c.group, known):
                rewrites += _LOCAL[c.op](node, c)
        return rewrites


def is_alike(node: fx.Node, group: str, known: dict[tuple[fx.Node, str], bool] | None = None) -> bool:
    """Whether the value of `node` is the same on all ranks of `group`; `known` caches the answers."""
    known = {} if known is None else known
    todo = [node]
    while todo:
        at = todo[-1]
        inputs = _inputs(at, group)
        missing = [x for x in inputs or () if (x, group) not in known]
        if missing:
            todo += missing
            continue
        known[at, group] = inputs is not None and all(known[x, group] for x in inputs)
        todo.pop()
    return known[node, group]


def _inputs(node: fx.Node, group: str) -> list[fx.Node] | None:
    """The inputs that must be the same on all ranks for `node` to be; None if that would not suffice."""
    c = ir.collective(node)
    if c is not None:
        return [] if c.op in MAKES_ALIKE and groups.within(group, c.group) and not ir.is_written(node) else None
    if not ir.is_local_pure(node) or ir.is_written(node) or not isinstance(ir.value(node), torch.Tensor):
        return None
    if node.target in VIEWS:
        return node.all_input_nodes[:1]
    return node.all_input_nodes if ir.is_pointwise(node) and ir.numbers_agree(node) else None


def _reduced(node: fx.Node, c: ir.Collective) -> bool:
    if not _is_float(node) or c.reduce_op == "product":
        return False
    if c.reduce_op in IDEMPOTENT:
        ir.stand_in(node, c.x)
    else:
        ir.replace(node, _multiple(node, c.x, c.group))
    return True


def _scattered(node: fx.Node, c: ir.Collective) -> bool:
    if not _is_float(node) or c.reduce_op == "product":
        return False
    part = ir.emit(node, replace(c, op="shard", reduce_op=None), like=node)
    ir.replace(node, part if c.reduce_op in IDEMPOTENT else _multiple(node, part, c.group))
    return True


def _gathered(node: fx.Node, c: ir.Collective) -> bool:
    assert c.gather_dim is not None
    n = group_size(c.group)
    if not ir.same(ir.value(c.x).shape[c.gather_dim] * n, ir.value(node).shape[c.gather_dim]):
        return False
    ir.replace(node, ir.insert(node, aten.cat.default, ([c.x] * n, c.gather_dim), like=node))
    return True


def _is_float(node: fx.Node) -> bool:
    return ir.value(node).dtype.is_floating_point


def _multiple(node: fx.Node, x: fx.Node, group: str) -> fx.Node:
    return ir.insert(node, aten.mul.Tensor, (x, group_size(group)), like=node)


_LOCAL = {"all_reduce": _reduced, "reduce_scatter": _scattered, "all_gather": _gathered}
"""Collective -> the function that replaces it by a local computation, and returns whether it could."""

__all__ = ["LocalizeReplicated", "is_alike"]
