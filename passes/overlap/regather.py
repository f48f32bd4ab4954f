"""Regathering: the backward gathers a tensor again instead of saving it, where saving it costs more."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from dtensor.comm.collectives import KEPT
from dtensor.comm.row_encoding import KERNELS
from dtensor.mesh.provenance import PARAMETER
from dtensor.prices.overlap import HELD

from ..graph import groups, ir, sizes
from ..stages import INFERENCE, MARKED, Compilation, Pass

aten: Any = ir.aten


class Regather(Pass):
    """Marks all-gathers of a joint graph, with the views and casts that follow them, to be recomputed in the backward.

    Before:

        %all_gather: f32[8,4] = dtensor.all_gather(%parameter, 0, 8, dp)            forward
        %mm: f32[2,4] = aten.mm(%x, %all_gather)                                    forward
        %mm_1: f32[2,8] = aten.mm(%tangent, %all_gather.t())                        backward: all_gather is saved

    After:

        the same, with meta["recompute"] on %all_gather: the partitioner saves %parameter, which is held anyway

    The pass changes only marks, so the values stay the same. It marks only gathers in the forward that the backward
    reads.

    Without a `budget` it marks the gathers of parameters only: saving them would save the full unsharded model. The
    last gathers of the forward are saved nevertheless if the backward reads them first, as many as `schedule` holds at
    once: otherwise the backward would begin by gathering what the forward has just released, and hold as many bytes.
    Other gathered tensors are saved, because their shards would have to be saved instead and the time spent again.

    With a budget in bytes, gathers of both kinds are saved until it is used up, those with the most time per byte
    first, and the others are marked. A symbolic size counts with its example value. Bytes are those of the rank that
    holds most, so that all ranks decide the same.

    It does not run where a whole step has a bound on memory, by which `recompute` decides on gathers with all else.

    Decisions of activation checkpointing are respected: nodes inside its regions are left alone, and so are gathers
    that the program annotates as kept (`dtensor.comm.collectives.KEPT`). But a result of a region that communicates is
    saved if the forward outside of any region reads it, as in eager mode: the partitioner would otherwise repeat the
    region's last collectives for it alone.

    Args:
        budget: bytes of gathered tensors that may be saved; None saves all but gathers of parameters.
        held: without a budget, the most gathers of parameters at the end of the forward that are saved.
    """

    name = "regather"
    stage = "divide"
    exactness = "bitwise"

    def __init__(self, budget: int | None = None, held: int = HELD) -> None:
        self.budget: Any = budget
        self.held: Any = held

    def taking(self, compilation: Compilation) -> Pass | None:
        decided = compilation.memory is not None  # with all else, by `recompute`
        return Regather(compilation.memory_budget) if compilation.graph in (MARKED, INFERENCE) and not decided else None

    def __call__(self, graph: fx.Graph) -> int:
        found = [node for node in ir.calls(graph, "all_gather") if _is_open(node)]
        if self.budget is None:
            again = [node for node in found if _is_of_parameter(node)]
            again = again[: len(again) - _read_at_once(again, self.held, graph)]
        else:
            again = _beyond(found, self.budget)
        for node in [*again, *_twins(again, graph)]:
            for member in _chain(node):
                member.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
        leaving = _leaving(graph)
        for node in leaving:
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        return len(again) + len(leaving)


def _leaving(graph: fx.Graph) -> list[fx.Node]:
    """The results of communicating regions of activation checkpointing that the forward outside of any region reads."""
    sent = {node.meta.get("ac_graph_id") for node in ir.calls(graph)}
    return [
        node
        for node in graph.nodes
        if node.meta.get("ac_graph_id") in sent - {None}
        and _is_marked(node)
        and not ir.in_backward(node)
        and isinstance(node.meta.get("val"), torch.Tensor)
        and any(_is_outside(user) for user in node.users)
    ]


def _is_outside(node: fx.Node) -> bool:
    return node.op == "call_function" and "ac_graph_id" not in node.meta and not ir.in_backward(node)


def _is_open(node: fx.Node) -> bool:
    """Whether this pass decides if the gather is saved: the forward computes it, the backward reads it, and it is not
    marked."""
    if ir.in_backward(node) or _is_marked(node) or "ac_graph_id" in node.meta or KEPT in node.meta.get("custom", ()):
        return False
    return any(ir.in_backward(user) for member in _chain(node) for user in member.users)


def _read_at_once(found: list[fx.Node], most: int, graph: fx.Graph) -> int:
    """How many of the forward's last gathers, at most `most`, the backward reads before all others and in reverse
    order."""
    order = {node: k for k, node in enumerate(graph.nodes)}
    read = {n: min(order[u] for m in _chain(n) for u in m.users if ir.in_backward(u)) for n in found}
    count = 0
    for last, first in zip(reversed(found), sorted(found, key=read.__getitem__)):
        if count == most or last is not first or _twins([last], graph):
            break
        count += 1
    return count


def _is_marked(node: fx.Node) -> bool:
    return node.meta.get("recompute") in (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


def _twins(marked: list[fx.Node], graph: fx.Graph) -> list[fx.Node]:
    """Equal gathers elsewhere in the forward. The partitioner merges equal nodes, and the mark of the first one
    remains."""
    done = {node.args for node in marked}
    return [
        node
        for node in graph.nodes
        if ir.is_collective(node, "all_gather")
        and node.args in done
        and node not in marked
        and not (ir.in_backward(node) or "ac_graph_id" in node.meta or KEPT in node.meta.get("custom", ()))
    ]


def _chain(node: fx.Node) -> list[fx.Node]:
    """`node`, and the views, copies and casts of it in the forward."""
    found, todo = {node: None}, [node]
    while todo:
        for user in todo.pop().users:
            if user not in found and not ir.in_backward(user) and _carries(user):
                found[user] = None
                todo.append(user)
    return list(found)


CARRIERS = frozenset(
    (aten.clone.default, aten._to_copy.default, torch.ops.prims.convert_element_type.default, *KERNELS)
)
"""Operators, apart from views, that keep a tensor's elements as they are, cast or copied."""


def _carries(node: fx.Node) -> bool:
    if node.op != "call_function" or "ac_graph_id" in node.meta or len(node.all_input_nodes) != 1:
        return False
    return node.target in CARRIERS or (ir.aliases(node) and ir.is_local_pure(node))


def _sources(node: fx.Node) -> Iterator[fx.Node]:
    """Yield `node` and what it is made of by views, casts and collectives, back to where something is computed."""
    yield node
    while _carries(node) or ir.is_collective(node):
        node = node.all_input_nodes[0]
        yield node


def _is_of_parameter(node: fx.Node) -> bool:
    *_, first = _sources(node)
    return bool(first.meta.get(PARAMETER))


def _beyond(found: list[fx.Node], budget: int) -> list[fx.Node]:
    """The gathers that are not saved if `budget` bytes may be saved."""
    order = {node: k for k, node in enumerate(found)}
    again: list[fx.Node] = []
    left = budget
    for node in sorted(found, key=lambda x: (-_seconds(x) / max(_freed(x), 1), order[x])):
        if _freed(node) > left:
            again.append(node)
        else:
            left -= _freed(node)
    return sorted(again, key=order.__getitem__)


def _freed(node: fx.Node) -> int:
    """Bytes that need not be held if `node` is gathered again from its shard."""
    shard = 0 if _is_of_parameter(node) else sizes.nbytes(node.all_input_nodes[0])
    return max(sizes.nbytes(node) - shard, 0)


def _seconds(node: fx.Node) -> float:
    c = ir.collective(node)
    assert c is not None, f"{node.format_node()} is not a collective"
    return groups.seconds("all_gather", sizes.nbytes(node), c.group)


__all__ = ["CARRIERS", "Regather"]
