"""What a graph communicates: each collective with its bytes on the wire, before and after lowering.

`lower` records a `CollectiveInfo` in the metadata of each start that it makes, so a lowered graph counts like the graph
it came from. A start that was in the graph before is read from its operator.
"""

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from dtensor.comm.collectives import COMMUNICATING
from dtensor.job.groups import group_size
from dtensor.mesh.provenance import RECORD
from dtensor.prices import links
from dtensor.torch_private.symbolic_sizes import hint

from . import ir, ordered


@dataclass(frozen=True)
class CollectiveInfo:
    """One collective of a graph.

    Attributes:
        op: name of the collective.
        group: name of the process group.
        group_size: number of ranks in the group.
        bytes: bytes that each rank sends; a symbolic size counts with its example value.
        reduce_op: the reduction, if any.
        gather_dim: dim along which it gathers, if any.
        scatter_dim: dim along which it scatters, if any.
    """

    op: str
    group: str
    group_size: int
    bytes: int
    reduce_op: str | None = None
    gather_dim: int | None = None
    scatter_dim: int | None = None


def collectives(graph: fx.Graph | fx.GraphModule) -> list[CollectiveInfo]:
    """Return the collectives of `graph` in order, lowered or not. `shard` sends nothing and is not included."""
    graph = graph.graph if isinstance(graph, fx.GraphModule) else graph
    return [info for info in map(describe, ir.communicating(graph)) if info is not None]


def count(graph: fx.Graph | fx.GraphModule) -> Counter[str]:
    """Return how often each collective occurs in `graph`."""
    return Counter([info.op for info in collectives(graph)])


def wire_bytes(graph: fx.Graph | fx.GraphModule) -> int:
    """Return the bytes that each rank sends in one run of `graph`."""
    return sum([info.bytes for info in collectives(graph)])


def describe(node: fx.Node) -> CollectiveInfo | None:
    """Return the collective that `node` is or starts; None for any other node."""
    if RECORD in node.meta:
        return node.meta[RECORD]
    c = ir.collective(node)
    if c is not None and c.op in COMMUNICATING:
        n, full = group_size(c.group), _bytes(ir.value(node if c.op == "all_gather" else c.x))
        sent = round(links.wire_bytes(c.op, full, n) * (links.moved(c.senders) if c.senders is not None else 1))
        return CollectiveInfo(c.op, c.group, n, sent, c.reduce_op, c.gather_dim, c.scatter_dim)
    # If one rank compiles for all, the group is an input of the graph.
    target, args = ordered.called(node)
    return _describe_start(node, target, args) if target in ir.STARTS and isinstance(args[-1], str) else None


def between_ranks(graph: fx.Graph) -> list[tuple[fx.Node, str]]:
    """Return the collectives over more than one rank in graph order, each with its group."""
    found = [(node, describe(node)) for node in ir.communicating(graph)]
    return [(node, info.group) for node, info in found if info is not None and info.group_size > 1]


def _describe_start(node: fx.Node, target: Any, args: tuple[Any, ...]) -> CollectiveInfo:
    op, group, x = ir.STARTS[target], str(args[-1]), args[0]
    n = group_size(group)
    inputs = [ir.value(leaf) for leaf in (x if isinstance(x, (tuple, list)) else [x]) if isinstance(leaf, fx.Node)]
    full = _bytes(ir.value(node) if op == "all_gather" else inputs)
    reduce_op = str(args[1]) if op in ("all_reduce", "reduce_scatter") else None
    gather_dim = 0 if op == "all_gather" else None
    sent = links.wire_bytes(op, full, n) * (links.moved(args[1]) if op == "collective_permute" else 1)
    return CollectiveInfo(op, group, n, round(sent), reduce_op, gather_dim, 0 if op == "reduce_scatter" else None)


def _bytes(val: Any) -> int:
    if isinstance(val, (tuple, list)):
        return sum([_bytes(item) for item in val])
    assert isinstance(val, torch.Tensor), f"a collective takes tensors, not {type(val).__name__}"
    return math.prod([hint(n) for n in val.shape]) * val.element_size()


__all__ = ["CollectiveInfo", "between_ranks", "collectives", "count", "describe", "wire_bytes"]
