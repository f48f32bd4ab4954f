"""Pinning: the order that `schedule` gave to collectives and computations stays so in Inductor.

Inductor reorders what does not depend on each other, to hold less memory, and so waits for a collective right after it
was started. What takes long and runs in a library's kernel, fused with nothing, holds the places: such calls between a
start and its wait depend on the start, and the wait on the last of them.
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
    """Pin the starts and waits between which something long is computed; the number of pairs that were."""
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
