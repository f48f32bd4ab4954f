"""What a graph sends as it is about to run: each call that puts bytes on the wire, ours, torch's or others'.

`dtensor.passes.count` reads what the passes work on. Here is read what is left in the end, by whatever compiler: the
variants that write in place or into a buffer, several tensors in one call, calls that Inductor wraps to order them.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from dtensor.comm.collectives import COMMUNICATING
from dtensor.layout import cost
from dtensor.mesh.groups import group_ranks
from dtensor.passes.graph import ir
from dtensor.torch_private.core import tree_leaves
from dtensor.torch_private.symbolic_sizes import hint

NAMES = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all": "all_to_all",
    "all_to_all_single": "all_to_all",
    "all_gather_start": "all_gather",
    "all_to_all_start": "all_to_all",
    "shard_dim_alltoall": "all_to_all",
    "broadcast": "broadcast",
    "collective_permute": "collective_permute",
}
"""Operator, without what its variants add to the name -> the collective it is."""

SPACES = ("dtensor", "_c10d_functional", "_c10d_functional_autograd", "_dtensor")
VARIANTS = ("_out", "_coalesced", "_")
WAITS = ("wait_tensor",)


@dataclass(frozen=True)
class Sent:
    """One call that communicates.

    Attributes:
        op: a collective of `dtensor.layout.cost.WORK`, or "broadcast".
        carried: the collective called for it: an all_to_all where a reduce_scatter's parts are exchanged.
        group: name of the process group.
        ranks: its ranks; empty if the group is not known here.
        reduce_op: of the reducing ones.
        dtype: short name of the elements' type.
        shapes: of the tensors that this rank hands over.
        buffer: their bytes.
        bytes: bytes this rank puts on the wire, by a ring algorithm (`dtensor.layout.cost`).
        size: what the cost is counted by: the gathered result, or else the buffer; in bytes.
        starts: whether the call only starts, and a wait follows.
    """

    op: str
    carried: str
    group: str
    ranks: tuple[int, ...]
    reduce_op: str | None
    dtype: str
    shapes: tuple[tuple[int, ...], ...]
    buffer: int
    bytes: int
    size: int
    starts: bool


def called(node: fx.Node) -> tuple[Any, tuple[Any, ...]]:
    """Operator and arguments of a call, out of the wrapping by which Inductor puts it into order."""
    if str(node.target) == "control_deps" and len(node.args) > 1:
        inner: Any = getattr(node.graph.owning_module, str(getattr(node.args[1], "target", "")), None)
        calls = [n for n in inner.graph.nodes if n.op == "call_function"] if inner is not None else []
        if inner is not None and len(calls) == 1:
            outer = dict(zip([n for n in inner.graph.nodes if n.op == "placeholder"], node.args[2:]))
            return calls[0].target, tuple(map_arg(calls[0].args, lambda n: outer.get(n, n)))
    return node.target, node.args


def operator(target: Any) -> str:
    """The collective that an operator is; "" if it is none."""
    if getattr(target, "namespace", None) not in SPACES:
        return ""
    name = target._schema.name.split("::")[1]
    for variant in VARIANTS:
        name = name.removesuffix(variant)
    return NAMES.get(name, "")


def is_wait(target: Any) -> bool:
    """Whether an operator waits for what was started."""
    return getattr(target, "namespace", None) in SPACES and target._schema.name.split("::")[1] in WAITS


def sent(node: fx.Node) -> Sent | None:
    """What a node sends; None if it sends nothing, or names its group in a way that is not known here."""
    if node.op != "call_function":
        return None
    target, args = called(node)
    carried, record = operator(target), node.meta.get(ir.RECORD)
    op = record.op if record is not None else carried
    group = next((a for a in reversed(args) if isinstance(a, str)), None) if carried else None
    if group is None:
        return None
    ranks = _ranks(group)
    given = [x for x in tree_leaves(_values(args[0])) if isinstance(x, torch.Tensor)]
    buffer = sum(map(bytes_of, given))
    size = buffer * len(ranks) if carried == "all_gather" else buffer
    wire = size if op == "broadcast" else cost.wire_bytes(op, size, len(ranks) or 1)
    reduce_op = str(args[1]) if carried in ("all_reduce", "reduce_scatter") else record.reduce_op if record else None
    shapes = tuple([tuple([hint(n) for n in x.shape]) for x in given])
    dtype = str(given[0].dtype).removeprefix("torch.") if given else ""
    starts = target.namespace == "_c10d_functional" or target in ir.STARTS
    return Sent(op, carried, group, ranks, reduce_op, dtype, shapes, buffer, round(wire), size, starts)


def traffic(graph: fx.Graph) -> Iterator[tuple[fx.Node, Sent]]:
    """The nodes that communicate, in order."""
    for node in graph.nodes:
        found = sent(node)
        if found is not None and len(found.ranks) != 1:
            yield node, found


def bytes_of(x: torch.Tensor) -> int:
    """Bytes of a tensor's elements; symbolic sizes count with their example values."""
    return math.prod([hint(n) for n in x.shape]) * x.element_size()


def _values(arg: Any) -> Any:
    return map_arg(arg, ir.value)


def _ranks(group: str) -> tuple[int, ...]:
    try:
        return group_ranks(group)
    except (RuntimeError, ValueError, KeyError):  # torch's, for a name that no group has
        return ()


assert set(COMMUNICATING) <= set(NAMES.values()), "an operator of ours is not counted"

__all__ = ["Sent", "bytes_of", "called", "is_wait", "operator", "sent", "traffic"]
