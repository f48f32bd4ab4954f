"""The agreement: before a graph first runs, the ranks compare what it communicates."""

import json
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import fx

from dtensor.comm.agreement import dumps
from dtensor.comm.collectives import COMMUNICATING
from dtensor.comm.replication_check import DRAWN
from dtensor.comm.start_collectives import OVER_GLOO, REDUCING, starts
from dtensor.job.collective_order import Entry
from dtensor.job.groups import group_size
from dtensor.layout.chunks import chunk_length
from dtensor.mesh.provenance import ALIKE, PARAMETER, PARTS, PLACES, RECORD, TAKEN, Taken

from ..graph import ir, ordered
from ..graph.count import between_ranks
from ..graph.source import module, place, source
from ..stages import BACKWARD, FORWARD, Compilation, Pass
from .collective_names import graph_named

agree: Any = torch.ops.dtensor.agree.default


class Agree(Pass):
    """Inserts the agreement into a graph that communicates, with the list of the collectives of each group.

    Before:

        %all_reduce: f32[4] = _c10d_functional.all_reduce(%x, 'sum', tp)

    After:

        %empty: f32[1] = aten.empty.memory_format([1])
        %agree: none = dtensor.agree(%empty, '...', [], '...')
        %all_reduce: f32[4] = _c10d_functional.all_reduce(%x, 'sum', tp) after [%agree, %empty]

    The operator stands at the start of the graph. Where Inductor compiles it, the first collective is made to wait for
    it. Over gloo, an all_reduce that is the first on its group becomes one of tagged messages,
    `dtensor::all_reduce_start`, so that those of another graph cannot be taken for its own. The texts are those of
    `dtensor.comm.agreement`. Values stay the same, but for the order in which more than two ranks add up.
    """

    name = "agree"
    stage = "borders"
    exactness = "bitwise"
    when = "unless the option `agreement` is off"

    def __init__(self, compilation: Compilation | None = None) -> None:
        self.compilation: Compilation = compilation or Compilation(FORWARD)

    def taking(self, compilation: Compilation) -> Pass | None:
        return Agree(compilation) if compilation.agreement else None

    def __call__(self, graph: fx.Graph) -> int:
        found = between_ranks(graph)
        if not found or graph.find_nodes(op="call_function", target=agree):
            return 0
        places = ir.gradients(graph)
        sequences: dict[str, list[Entry]] = {}
        untagged: list[str] = []
        for node, group in found:
            if group not in sequences and not _is_tagged(node) and not _tagged(node, group):
                untagged.append(group)
            sequences.setdefault(group, []).append((entry(node, places), str(source(node) or place(node))))
        first = found[0][0]
        start = next(node for node in graph.nodes if node.op != "placeholder")
        token = ir.insert(start, torch.ops.aten.empty.memory_format, ([1],), like=first)
        taken, told = self._compared(graph, start, first)
        said = json.dumps([self.compilation.graph, told, graph_named(found, self.compilation)])
        args = (token, dumps(sequences, untagged), taken, said)
        agreed = ir.insert(start, agree, args, like=first)
        if self.compilation.inner == "inductor":
            ordered.after(graph, {first: [agreed, token]})
        return 1

    def _compared(self, graph: fx.Graph, start: fx.Node, first: fx.Node) -> tuple[list[fx.Node], list[list[Any]]]:
        """The values that ranks compare, and for each what it is and the groups."""
        if self.compilation.graph == BACKWARD:
            return [], []
        taken = _taken(graph)
        told = [[_said(node), node.meta[TAKEN].groups] for node in taken]
        if self.compilation.drawn:
            device = ir.value(first).device
            taken.append(ir.insert(start, torch.ops.dtensor.generator_state.default, (device,), like=first))
            told.append([DRAWN, self.compilation.drawn])
        return taken, told


def _taken(graph: fx.Graph) -> list[fx.Node]:
    """The inputs of a forward or inference graph that count as replicated. Parameters are left out, except inputs of a
    global view, which may be any tensor that a module holds."""
    inputs = graph.find_nodes(op="placeholder")
    taken = [n for n in inputs if TAKEN in n.meta and (ALIKE in n.meta or PARAMETER not in n.meta)]
    return [n for n in taken if isinstance(ir.value(n), torch.Tensor)]


def _said(node: fx.Node) -> str:
    """Describe an input that counts as replicated."""
    taken: Taken = node.meta[TAKEN]
    there: Any = SimpleNamespace(meta=taken._asdict())
    path, line = module(there), source(there)
    return taken.said.format((path or "the model") + (f" ({line})" if line is not None else ""))


def _tagged(node: fx.Node, group: str) -> bool:
    """Make an all_reduce over gloo one of tagged messages, and return whether it is one that can be."""
    if node.target is not ir.c10d.all_reduce.default or node.args[1] not in REDUCING:
        return False
    x: torch.Tensor = ir.value(node)
    if x.dtype in (torch.bool, torch.complex64, torch.complex128) or starts(group, x.device) is not OVER_GLOO:
        return False
    node.target = ir.ops.all_reduce_start.default
    return True


def _is_tagged(node: fx.Node) -> bool:
    """Whether a collective over gloo consists of tagged messages (`dtensor.comm.start_collectives`)."""
    target: Any = node.target
    return target.namespace == "dtensor" and target is not torch.ops.dtensor.all_reduce.default


def entry(node: fx.Node, places: Mapping[fx.Node, int]) -> str:
    """Return the text by which ranks compare a collective: operator, reduction, dtype and sizes of what is sent; "?"
    for symbols.

    Args:
        node: the collective, or the start of one.
        places: as `ir.gradients` returns it, so that two gradients of one shape are not mistaken for each other.
    """
    c, record = ir.collective(node), node.meta.get(RECORD)
    op = c.op if c is not None else record.op if record is not None else ir.STARTS.get(node.target)
    assert op in COMMUNICATING, f"{node.format_node()} does not communicate"
    reduce_op = node.args[1] if op in ("all_reduce", "reduce_scatter") else None
    if record is not None:
        reduce_op = record.reduce_op  # an all_to_all whose parts are then reduced does not name the reduction
    sent = node.args[0] if isinstance(node.args[0], (list, tuple)) else [node.args[0]]
    # For a bucket list every part in order: the sum of their sizes would hide a different order.
    parts = node.meta.get(PARTS) or [ir.value(x) for x in sent if isinstance(x, fx.Node)]
    # An all_to_all from outside this library exchanges the rows that it states, which may differ between ranks.
    rows_differ = node.target in ir.ALL_TO_ALLS and record is None
    if c is not None and c.gather_dim is not None and isinstance(c.size, int):
        # A shard shorter than the first one is padded when it is sent.
        parts = [_of_length(parts[0], c.gather_dim, chunk_length(c.size, group_size(c.group), 0))]
    if op == "reduce_scatter" and node.target in ir.ALL_TO_ALLS:
        parts = [part.flatten(0, 1) for part in parts]  # over gloo it is an exchange of rows
    to = node.meta.get(PLACES) or [places.get(node)] * len(parts)
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


__all__ = ["Agree", "entry"]
