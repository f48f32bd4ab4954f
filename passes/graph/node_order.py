"""The order of a graph: what has to come before what, and giving the nodes another order.

Beside data there are effects: what draws random numbers keeps its order, so does whatever else is not pure, and who
reads memory stays on its side of whoever writes to it.
"""

import heapq
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from dtensor.torch_private.core import OpOverload

from . import ir

aten: Any = ir.aten

Before = dict[fx.Node, list[fx.Node]]
"""Node -> the nodes that must come before it; data and effects, direct ones only."""


def dependencies(graph: fx.Graph) -> Before:
    """For each node what must come before it, in a graph whose order is valid."""
    found: Before = {}
    roots: dict[fx.Node, frozenset[fx.Node]] = {}
    readers: dict[fx.Node, list[fx.Node]] = {}
    written: dict[fx.Node, fx.Node] = {}
    effects: dict[bool, fx.Node] = {}
    for node in graph.nodes:
        before = list(node.all_input_nodes)
        memory = {root for x in before for root in roots[x]}
        before += [written[root] for root in memory if root in written]
        targets = {root for x in _targets(node) for root in roots[x]}
        for root in targets:
            before += readers.get(root, [])
            readers[root], written[root] = [], node
        for root in memory - targets:
            readers.setdefault(root, []).append(node)
        if is_effect(node):
            # What is drawn has an order of its own: a rank whose shard is empty draws nothing.
            kind = ir.draws(node)
            before += [effects[kind]] if kind in effects else []
            effects[kind] = node
        roots[node] = frozenset(memory) if ir.aliases(node) or targets else frozenset((node,))
        found[node] = list(dict.fromkeys([x for x in before if x is not node]))
    return found


def is_effect(node: fx.Node) -> bool:
    """Whether `node` does more than compute its result: writes, draws random numbers, talks to the outside."""
    return node.op == "call_function" and not ir.is_pure(node)


def _targets(node: fx.Node) -> list[fx.Node]:
    """The arguments that `node` writes to, as far as its schema tells."""
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
    """Give all nodes of `graph` this order."""
    nodes = list(order)
    assert len(nodes) == len(graph.nodes), "an order names each node once"
    for node in nodes:
        nodes[-1].prepend(node) if node is not nodes[-1] else None


def sort(graph: fx.Graph, before: Before) -> None:
    """Put every node after those that `before` says, and otherwise leave the order as it is.

    Nodes that `before` does not know come after what they read.
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
    assert len(order) == len(place), "what must come before what is a circle"
    rearrange(graph, order)


def floats(node: fx.Node) -> bool:
    """Whether `node` goes where the computations around it want it: collectives, what carries, scales or adds up what
    they send."""
    if node.op != "call_function":
        return node.op in ("placeholder", "get_attr")
    if node.target in ir.STARTS or node.target in (ir.WAIT, ir.WAIT_FOR_ALL):
        return True
    if not ir.is_local_pure(node):
        return False
    scales = node.target in SCALES and len(node.all_input_nodes) == 1
    return scales or node.target in CARRIERS or ir.ARRIVAL in node.meta or ir.aliases(node) or _is_number(node)


def floating(nodes: Iterable[fx.Node]) -> frozenset[fx.Node]:
    """Those of `nodes` that float."""
    return frozenset([node for node in nodes if floats(node)])


def _is_number(node: fx.Node) -> bool:
    return not isinstance(ir.value(node), (torch.Tensor, tuple, list))


CARRIERS = frozenset(
    (
        *(aten.cat.default, aten.clone.default, aten.constant_pad_nd.default, aten._to_copy.default),
        *(aten.new_zeros.default, aten.new_empty.default, aten.zeros.default),
        *(aten.split.Tensor, aten.split_with_sizes.default),
        torch.ops.prims.convert_element_type.default,
    )
)
"""Beside views, what carries elements to and from a collective, and computes nothing."""

SCALES = frozenset((aten.div.Tensor, aten.mul.Tensor, aten.div.Scalar, aten.mul.Scalar, aten.neg.default))
"""What scales one tensor by a number: what an average is made of, and fused with whatever reads it."""

__all__ = ["CARRIERS", "SCALES", "Before", "dependencies", "floating", "floats", "is_effect", "rearrange", "sort"]
