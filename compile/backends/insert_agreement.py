"""Inserts the agreement into a compiled graph: before it first runs, the ranks compare what it communicates.

This is the last step on a graph, after which nothing reorders its collectives. It lists the collectives of each group,
inserts a `dtensor::agree` with that list at the start of the graph, and makes the first collective wait for it.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from torch import fx

from dtensor.comm.agreement import dumps
from dtensor.comm.collectives import COMMUNICATING
from dtensor.comm.replication_check import DRAWN, drawn
from dtensor.job.collective_order import Entry
from dtensor.job.groups import group_ranks, group_size
from dtensor.layout.chunks import chunk_length
from dtensor.mesh.provenance import ALIKE, TAKEN, Taken
from dtensor.passes.graph import ir
from dtensor.passes.graph.count import describe
from dtensor.passes.graph.source import module, source
from dtensor.torch_private.compiling import order_after

from ..recording.node_remarks import place
from .collective_names import graph_named


def seal(graph: fx.Graph, direction: str, *, scheduled: bool, agreement: bool = True) -> None:
    """Insert the agreement into `graph`, in place, if it communicates, and fix the order of its collectives.

    Where shards are uneven, each collective is made to depend on the one before it. A rank with an empty shard computes
    less, so fewer of its collectives depend on each other, and Inductor would start them in another order.

    Args:
        graph: a graph that no pass changes any more.
        direction: "forward", "backward" or "inference".
        scheduled: whether the compiler may reorder independent nodes, as Inductor does.
        agreement: whether the ranks compare what they run.
    """
    found = _communicating(graph)
    later: dict[fx.Node, list[fx.Node]] = {}
    if any(ir.SENT in node.meta for node, _ in found):
        later = {node: [before] for (before, _), (node, _) in pairwise(found)}
    if agreement:
        later |= _agreeing(graph, direction, found)
    if scheduled and later:
        order_after(graph, later)


def _agreeing(graph: fx.Graph, direction: str, found: list[tuple[fx.Node, str]]) -> dict[fx.Node, list[fx.Node]]:
    """Insert the agreement at the start; return which nodes must wait for it, and for what."""
    places = ir.gradients(graph)
    if (heard := _heard.get()) is not None:
        heard.append([(group_ranks(group), entry(node, places)) for node, group in found])
    if not found:
        return {}
    sequences: dict[str, list[Entry]] = {}
    untagged: list[str] = []
    for node, group in found:
        if group not in sequences and not _is_tagged(node):
            untagged.append(group)
        sequences.setdefault(group, []).append((entry(node, places), str(source(node) or place(node))))
    first = found[0][0]
    start = next(node for node in graph.nodes if node.op != "placeholder")
    token = ir.insert(start, torch.ops.aten.empty.memory_format, ([1],), like=first)
    taken = _taken(graph) if direction != "backward" else []
    told = [[_said(node), node.meta[TAKEN].groups] for node in taken]
    if direction != "backward" and (groups := drawn()):
        device = ir.value(first).device
        taken = [*taken, ir.insert(start, torch.ops.dtensor.generator_state.default, (device,), like=first)]
        told.append([DRAWN, groups])
    said = json.dumps([direction, told, graph_named(found, direction)])
    args = (token, dumps(sequences, untagged), taken, said)
    agreed = ir.insert(start, torch.ops.dtensor.agree.default, args, like=first)
    return {first: [agreed, token]}


def _taken(graph: fx.Graph) -> list[fx.Node]:
    """The inputs of a forward or inference graph that count as replicated. Parameters are left out, except inputs of a
    global view, which may be any tensor that a module holds."""
    inputs = graph.find_nodes(op="placeholder")
    taken = [n for n in inputs if TAKEN in n.meta and (ALIKE in n.meta or ir.PARAMETER not in n.meta)]
    return [n for n in taken if isinstance(ir.value(n), torch.Tensor)]


def _said(node: fx.Node) -> str:
    """Describe an input that counts as replicated."""
    taken: Taken = node.meta[TAKEN]
    there: Any = SimpleNamespace(meta=taken._asdict())
    path, line = module(there), source(there)
    return taken.said.format((path or "the model") + (f" ({line})" if line is not None else ""))


def _is_tagged(node: fx.Node) -> bool:
    """Whether a collective over gloo consists of tagged messages (`dtensor.comm.start_collectives`)."""
    target: Any = node.target
    return target.namespace == "dtensor" and target is not torch.ops.dtensor.all_reduce.default


def _communicating(graph: fx.Graph) -> list[tuple[fx.Node, str]]:
    """The collectives over more than one rank in graph order, each with its group."""
    found = [(node, describe(node)) for node in ir.communicating(graph)]
    return [(node, info.group) for node, info in found if info is not None and info.group_size > 1]


Collectives = list[tuple[tuple[int, ...], str]]
"""What a graph communicates, in order: the ranks of each collective, and the text by which ranks compare it."""

_heard: ContextVar[list[Collectives] | None] = ContextVar("dtensor_heard", default=None)


@contextmanager
def overheard() -> Iterator[list[Collectives]]:
    """Collect what each graph sealed inside the context communicates: one list item per graph, forwards first."""
    token = _heard.set(heard := [])
    try:
        yield heard
    finally:
        _heard.reset(token)


def entry(node: fx.Node, places: Mapping[fx.Node, int]) -> str:
    """Return the text by which ranks compare a collective: operator, reduction, dtype and sizes of what is sent; "?"
    for symbols.

    Args:
        node: the collective, or the start of one.
        places: as `ir.gradients` returns it, so that two gradients of one shape are not mistaken for each other.
    """
    c, record = ir.collective(node), node.meta.get(ir.RECORD)
    op = c.op if c is not None else record.op if record is not None else ir.STARTS.get(node.target)
    assert op in COMMUNICATING, f"{node.format_node()} does not communicate"
    reduce_op = node.args[1] if op in ("all_reduce", "reduce_scatter") else None
    if record is not None:
        reduce_op = record.reduce_op  # an all_to_all whose parts are then reduced does not name the reduction
    sent = node.args[0] if isinstance(node.args[0], (list, tuple)) else [node.args[0]]
    # For a bucket list every part in order: the sum of their sizes would hide a different order.
    parts = node.meta.get(ir.PARTS) or [ir.value(x) for x in sent if isinstance(x, fx.Node)]
    # An all_to_all from outside this library exchanges the rows that it states, which may differ between ranks.
    rows_differ = node.target in ir.ALL_TO_ALLS and record is None
    if c is not None and c.gather_dim is not None and isinstance(c.size, int):
        # A shard shorter than the first one is padded when it is sent.
        parts = [_of_length(parts[0], c.gather_dim, chunk_length(c.size, group_size(c.group), 0))]
    if op == "reduce_scatter" and node.target in ir.ALL_TO_ALLS:
        parts = [part.flatten(0, 1) for part in parts]  # over gloo it is an exchange of rows
    to = node.meta.get(ir.PLACES) or [places.get(node)] * len(parts)
    given = ", ".join([_kind(part, rows_differ) + _to(place) for part, place in zip(parts, to, strict=True)])
    how = f"{op} {reduce_op}" if reduce_op else op if c is None or c.senders is None else f"{op} from {c.senders}"
    return f"{how} of {given}"


def _to(place: int | None) -> str:
    return "" if place is None else f" for gradient {place}"


def _of_length(x: Any, dim: int, length: int) -> torch.Tensor:
    return torch.empty([length if d == dim else n for d, n in enumerate(x.shape)], dtype=x.dtype, device="meta")


def _kind(x: Any, rows_differ: bool = False) -> str:
    known = [isinstance(n, int) and not (rows_differ and dim == 0) for dim, n in enumerate(x.shape)]
    sizes = ", ".join([str(n) if k else "?" for n, k in zip(x.shape, known, strict=True)])
    return f"{str(x.dtype).removeprefix('torch.')}[{sizes}]"


__all__ = ["Collectives", "entry", "overheard", "seal"]
