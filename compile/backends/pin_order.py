"""Pinning: keeps the order that `schedule` gave to collectives and computations when Inductor compiles the graph.

Inductor reorders independent nodes to hold less memory, and so waits for a collective right after its start.
Long-running calls of library kernels, which Inductor does not fuse, anchor the order: the calls between a start and its
wait are made to depend on the start, and the wait on the last of them.
"""

from typing import Any

import torch
from torch import fx

from dtensor.passes.graph import ir
from dtensor.torch_private.compiling import order_after

aten: Any = torch.ops.aten

LONG = frozenset(
    (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, aten.convolution.default)
)
"""Calls of library kernels that take long and are not fused with others."""


def pin(graph: fx.Graph) -> int:
    """Pin the starts and waits that have a long computation in between; return the number of pairs."""
    nodes = list(graph.nodes)
    place = {node: k for k, node in enumerate(nodes)}
    later: dict[fx.Node, list[fx.Node]] = {}
    pairs = 0
    for start in nodes:
        wait = ir.only_user(start) if start.target in ir.STARTS else None
        if wait is None or wait.target is not ir.WAIT:
            continue
        between = [node for node in nodes[place[start] : place[wait]] if node.target in LONG]
        if between:
            for node in between:
                later.setdefault(node, []).append(start)
            later.setdefault(wait, []).append(between[-1])
            pairs += 1
    order_after(graph, dict(sorted(later.items(), key=lambda item: place[item[0]])))
    return pairs


__all__ = ["LONG", "pin"]
