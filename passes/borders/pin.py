"""Pinning: keeps the order that `schedule` gave to collectives and computations when Inductor compiles the graph."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from dtensor.comm.host_memory import from_host_start, to_host
from dtensor.rules.attention_blocks import attend, attend_backward
from dtensor.rules.families.attention import FUSED
from dtensor.rules.grouped_rows import rows_by_group, rows_within_groups

from ..graph import ir, ordered
from ..stages import Compilation, Pass

aten: Any = torch.ops.aten

LONG = frozenset(
    (
        *(aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, aten.convolution.default),
        *(getattr(aten, f"{name}{end}").default for name in FUSED for end in ("", "_backward")),
        *(attend, attend_backward, rows_by_group, rows_within_groups),
    )
)
"""Calls of library kernels that take long and are not fused with others."""


class Pin(Pass):
    """Makes the long computations between a start and its wait run there.

    Before:

        %all_reduce: f32[4,4] = _c10d_functional.all_reduce(%x, 'sum', tp)
        %mm: f32[4,4] = aten.mm(%y, %z)
        %wait_tensor: f32[4,4] = _c10d_functional.wait_tensor(%all_reduce)

    After:

        %all_reduce: f32[4,4] = _c10d_functional.all_reduce(%x, 'sum', tp)
        %mm: f32[4,4] = aten.mm(%y, %z) after [%all_reduce]
        %wait_tensor: f32[4,4] = _c10d_functional.wait_tensor(%all_reduce) after [%mm]

    Inductor reorders independent nodes to hold less memory, and so waits for a collective right after its start.
    Long-running calls of library kernels, which Inductor does not fuse, anchor the order: the calls between a start and
    its wait are made to depend on the start, and the wait on the last of them. In the same way a copy to the host is
    made before the next of them, and one from the host after the one before it. Values stay the same.
    """

    name = "pin"
    stage = "borders"
    exactness = "bitwise"
    when = "where Inductor compiles what `schedule` ordered"

    def taking(self, compilation: Compilation) -> Pass | None:
        return self if compilation.inner == "inductor" and "schedule" in compilation.passes else None

    def __call__(self, graph: fx.Graph) -> int:
        nodes = list(graph.nodes)
        place = {node: k for k, node in enumerate(nodes)}
        later: dict[fx.Node, list[fx.Node]] = {}
        pairs = 0
        for start in nodes:
            wait = ir.only_user(start) if start.target in ir.STARTS else None
            if wait is None or ordered.called(wait)[0] is not ir.WAIT:
                continue
            between = [node for node in nodes[place[start] : place[wait]] if node.target in LONG]
            if between:
                for node in between:
                    later.setdefault(node, []).append(start)
                later.setdefault(wait, []).append(between[-1])
                pairs += 1
        for node, long in _beside_host(nodes):
            later.setdefault(node, []).append(long)
            pairs += 1
        if pairs:
            ordered.after(graph, dict(sorted(later.items(), key=lambda item: place[item[0]])))
        return pairs


def _beside_host(nodes: Sequence[fx.Node]) -> Iterator[tuple[fx.Node, fx.Node]]:
    """What runs after what in order that tensors are on the host as long as the graph has them there: the next long
    computation after a copy to it, and a copy from it after the last long computation before."""
    last, put = None, list[fx.Node]()
    for node in nodes:
        if node.target is to_host:
            put.append(node)
        elif node.target is from_host_start and last is not None:
            yield node, last
        elif node.target in LONG:
            yield from ((node, x) for x in put)
            last, put = node, []


__all__ = ["LONG", "Pin"]
