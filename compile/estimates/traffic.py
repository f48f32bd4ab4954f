"""What a graph that is about to run sends: every call that puts bytes on the wire, from this library, torch or others.

`dtensor.passes.count` reads the operators that the passes work on. This module reads what is left in the end, whatever
compiler made it: in-place and out variants, calls on several tensors, and calls that Inductor wraps to order them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from dtensor.comm.collectives import COMMUNICATING
from dtensor.job.groups import group_ranks
from dtensor.mesh.provenance import RECORD
from dtensor.passes.graph import ir
from dtensor.passes.graph.estimate import bytes_of
from dtensor.passes.graph.ordered import called
from dtensor.prices import links
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
    "all_reduce_start": "all_reduce",
    "collective_permute_start": "collective_permute",
    "shard_dim_alltoall": "all_to_all",
    "broadcast": "broadcast",
    "collective_permute": "collective_permute",
}
"""Operator name, without the suffixes of its variants -> the collective."""

SPACES = ("dtensor", "_c10d_functional", "_c10d_functional_autograd", "_dtensor")
VARIANTS = ("_out", "_coalesced", "_")
WAITS = ("wait_tensor",)


@dataclass(frozen=True)
class Sent:
    """One call that communicates.

    Attributes:
        op: a collective of `dtensor.prices.links.WORK`, or "broadcast".
        carried: the collective that is called for it: an all_to_all where the parts of a reduce_scatter are exchanged.
        group: name of the process group.
        ranks: ranks of the group; empty if the group is unknown.
        reduce_op: the reduction, if any.
        dtype: short name of the elements' dtype.
        shapes: shapes of the tensors that this rank passes in.
        buffer: bytes of these tensors.
        bytes: bytes this rank puts on the wire, with a ring algorithm (`dtensor.prices.links`).
        size: bytes that the cost is computed from: those of the gathered result, or else of the buffer.
        starts: whether the call only starts the collective, and a wait follows.
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


def operator(target: Any) -> str:
    """Return the collective that an operator performs; "" if none."""
    return collective_named(target._schema.name) if getattr(target, "namespace", None) in SPACES else ""


def collective_named(operator_name: str) -> str:
    """Return the collective that an operator with a name such as `_c10d_functional::all_reduce_` performs; "" if
    none."""
    space, _, name = operator_name.partition("::")
    for variant in VARIANTS:
        name = name.removesuffix(variant)
    return NAMES.get(name, "") if space in SPACES else ""


def is_wait(target: Any) -> bool:
    """Whether an operator waits for a started collective."""
    return getattr(target, "namespace", None) in SPACES and is_wait_named(target._schema.name)


def is_wait_named(operator_name: str) -> bool:
    """Whether an operator with a name such as `_c10d_functional::wait_tensor` waits for a started collective."""
    space, _, name = operator_name.partition("::")
    return space in SPACES and name in WAITS


def sent(node: fx.Node) -> Sent | None:
    """Return what a node sends; None if it sends nothing, or if its group cannot be determined."""
    if node.op != "call_function":
        return None
    target, args = called(node)
    carried, record = operator(target), node.meta.get(RECORD)
    op = record.op if record is not None else carried
    group = next((a for a in reversed(args) if isinstance(a, str)), None) if carried else None
    if group is None:
        return None
    ranks = _ranks(group)
    given = [x for x in tree_leaves(_values(args[0])) if isinstance(x, torch.Tensor)]
    buffer = sum(map(bytes_of, given))
    size = buffer * len(ranks) if carried == "all_gather" else buffer
    wire = size if op == "broadcast" else links.wire_bytes(op, size, len(ranks) or 1)
    wire *= links.moved(args[1]) if carried == "collective_permute" else 1
    reduce_op = str(args[1]) if carried in ("all_reduce", "reduce_scatter") else record.reduce_op if record else None
    shapes = tuple([tuple([hint(n) for n in x.shape]) for x in given])
    dtype = str(given[0].dtype).removeprefix("torch.") if given else ""
    starts = target.namespace == "_c10d_functional" or target in ir.STARTS
    return Sent(op, carried, group, ranks, reduce_op, dtype, shapes, buffer, round(wire), size, starts)


def traffic(graph: fx.Graph) -> Iterator[tuple[fx.Node, Sent]]:
    """Yield the nodes that communicate, in order, with what they send."""
    for node in graph.nodes:
        found = sent(node)
        if found is not None and len(found.ranks) != 1:
            yield node, found


def _values(arg: Any) -> Any:
    return map_arg(arg, ir.value)


def _ranks(group: str) -> tuple[int, ...]:
    try:
        return group_ranks(group)
    except (RuntimeError, ValueError, KeyError):  # torch raises these for an unknown name
        return ()


assert set(COMMUNICATING) <= set(NAMES.values()), "an operator of ours is not counted"

__all__ = [
    "Sent", "bytes_of", "collective_named", "is_wait", "is_wait_named", "operator", "sent", "traffic",
]  # fmt: skip
