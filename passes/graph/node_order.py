"""The order of a graph: which nodes must come before which, and how to reorder them.

Apart from data dependencies there are effects. Random draws keep their order, and so do other nodes that are not pure.
A node that reads memory stays before or after each node that writes to it, as it was; the memory that a collective
sends is read until the wait.
"""

import heapq
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from dtensor.comm.row_encoding import KERNELS
from dtensor.mesh.provenance import ARRIVAL
from dtensor.torch_private.core import OpOverload

from . import ir, steps

aten: Any = ir.aten

Before = dict[fx.Node, list[fx.Node]]
"""Node -> the nodes that must come directly before it, for their data or their effects."""


def dependencies(graph: fx.Graph) -> Before:
    """Return the direct dependencies of each node of a graph whose order is valid."""
    found: Before = {}
    roots: dict[fx.Node, frozenset[fx.Node]] = {}
    readers: dict[fx.Node, list[fx.Node]] = {}
    written: dict[fx.Node, fx.Node] = {}
    effects: dict[bool, fx.Node] = {}
    sent: dict[fx.Node, set[fx.Node]] = {}
    for node in graph.nodes:
        before = list(node.all_input_nodes)
        memory = {root for x in before for root in roots[x]}
        before += [written[root] for root in memory if root in written]
        targets = {root for x in _targets(node) for root in roots[x]}
        for root in targets:
            before += readers.get(root, [])
            readers[root], written[root] = [], node
        in_flight = {root for x in before if node.target is ir.WAIT and x.target in ir.STARTS for root in sent[x]}
        for root in (memory | in_flight) - targets:
            readers.setdefault(root, []).append(node)
        if node.target in ir.STARTS:
            sent[node] = memory
        if is_effect(node):
            # Draws are ordered separately from other effects: a rank whose shard is empty draws nothing.
            kind = ir.draws(node)
            before += [effects[kind]] if kind in effects else []
            effects[kind] = node
        roots[node] = frozenset(memory) if ir.aliases(node) or targets else frozenset((node,))
        found[node] = list(dict.fromkeys([x for x in before if x is not node]))
    return found


def is_effect(node: fx.Node) -> bool:
    """Whether `node` does more than compute its result: it writes, draws random numbers, or has some other side
    effect."""
    return node.op == "call_function" and not ir.is_pure(node)


def _targets(node: fx.Node) -> list[fx.Node]:
    """Return the arguments that `node` writes to, according to its schema."""
    if not isinstance(node.target, OpOverload) or not ir.mutates(node):
        return []
    arguments = ir.schema(node.target).arguments
    names = {a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write}
    given = {**dict(zip([a.name for a in arguments], node.args)), **node.kwargs}
    found = [given[name] for name in given if name in names]
    return [
        x for item in found for x in (item if isinstance(item, (list, tuple)) else [item]) if isinstance(x, fx.Node)
    ]


def rearrange(graph: fx.Graph, order: Iterable[fx.Node]) -> None:
    """Put all nodes of `graph` in the given order; but one of several results comes right after its call, as all of
    them are held until the last is taken out."""
    nodes = [x for node in order if not ir.is_result(node) for x in _with_results(node)]
    assert len(nodes) == len(graph.nodes), "an order contains each node once"
    place = next(iter(graph.nodes), None)
    for node in nodes:
        if node is place:
            place = node.next
        elif place is not None:
            steps.take(node)
            place.prepend(node)


def _with_results(node: fx.Node) -> Iterable[fx.Node]:
    """A node, and the nodes that take its results out."""
    yield node
    for user in node.users:
        if ir.is_result(user):
            yield from _with_results(user)


def sort(graph: fx.Graph, before: Before) -> None:
    """Move every node after its dependencies in `before`, and otherwise keep the order.

    Nodes that `before` does not contain come after their inputs.
    """
    place = {node: k for k, node in enumerate(graph.nodes)}
    missing, after = dict[fx.Node, int](), dict[fx.Node, list[fx.Node]]()
    for node in place:
        wanted = dict.fromkeys([x for x in (*before.get(node, ()), *node.all_input_nodes) if x in place])
        missing[node] = len(wanted)
        for x in wanted:
            after.setdefault(x, []).append(node)
    ready = [(place[node], node) for node, n in missing.items() if n == 0]
    heapq.heapify(ready)
    order: list[fx.Node] = []
    while ready:
        _, node = heapq.heappop(ready)
        order.append(node)
        for user in after.get(node, ()):
            missing[user] -= 1
            if missing[user] == 0:
                heapq.heappush(ready, (place[user], user))
    assert len(order) == len(place), "the dependencies have a cycle"
    rearrange(graph, order)


def floats(node: fx.Node) -> bool:
    """Whether the position of `node` follows from the computations around it: collectives, and the nodes that move,
    scale or add up the data that collectives send."""
    if node.op != "call_function":
        return node.op in ("placeholder", "get_attr")
    if node.target in ir.STARTS or node.target in (ir.WAIT, ir.WAIT_FOR_ALL):
        return True
    if not ir.is_local_pure(node):
        return False
    scales = node.target in SCALES and len(node.all_input_nodes) == 1
    return scales or node.target in CARRIERS or ARRIVAL in node.meta or ir.aliases(node) or _is_number(node)


def floating(nodes: Iterable[fx.Node]) -> frozenset[fx.Node]:
    """Return those of `nodes` that float."""
    return frozenset([node for node in nodes if floats(node)])


def _is_number(node: fx.Node) -> bool:
    return not isinstance(ir.value(node), (torch.Tensor, tuple, list))


CARRIERS = frozenset(
    (
        *(aten.cat.default, aten.clone.default, aten.constant_pad_nd.default, aten._to_copy.default),
        *(aten.new_zeros.default, aten.new_empty.default, aten.zeros.default),
        *(aten.split.Tensor, aten.split_with_sizes.default),
        torch.ops.prims.convert_element_type.default,
        *KERNELS,
    )
)
"""Operators, apart from views, that move elements to and from a collective and compute nothing."""

SCALES = frozenset((aten.div.Tensor, aten.mul.Tensor, aten.div.Scalar, aten.mul.Scalar, aten.neg.default))
"""Operators that scale one tensor by a number, as an average does; they are fused with the nodes that read the
result."""

__all__ = ["CARRIERS", "SCALES", "Before", "dependencies", "floating", "floats", "is_effect", "rearrange", "sort"]
