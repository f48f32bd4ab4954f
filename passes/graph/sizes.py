"""Sizes that are the same on all ranks. Every decision that depends on the size or shape of a value must use them.

Where lengths do not divide evenly, local tensors differ from rank to rank. Decisions based on their own sizes (what is
saved for the backward, which rewrite fires, which collectives travel together) would differ too, and with them the
order of the collectives. The trace therefore records how the local tensors of DTensors are sharded
(`dtensor.mesh.provenance.SHARDS`). Intermediate values count by the values they are computed from, and their lengths
are unknown. Where all shards are even, every answer here comes from the values themselves.
"""

from math import prod
from typing import Any

import torch
from torch import fx

from dtensor.job.groups import group_size
from dtensor.mesh.provenance import SHARDS, SIZE, shards_of
from dtensor.torch_private.core import FakeTensor, tree_map
from dtensor.torch_private.symbolic_sizes import hint, number_if_guarded, number_if_known, write_numbers

from . import ir


def elements(node: fx.Node) -> int:
    """Return the elements of the value of `node` on the rank that has the most; the total if it is several tensors."""
    return _of(node)[0]


def nbytes(node: fx.Node) -> int:
    """Return the bytes of the value of `node` on the rank that has the most; 0 if it is not a tensor."""
    found = _tensors(node)
    if is_even(node) and SHARDS not in node.meta:
        return sum([hint(x.numel()) * x.element_size() for x in found])
    return elements(node) * sum([x.element_size() for x in found])


def is_even(node: fx.Node) -> bool:
    """Whether the value of `node` is known to have the same shape on all ranks."""
    return _of(node)[1]


def lengths(node: fx.Node) -> tuple[Any, ...] | None:
    """Return for each dim its length, or a `Cut` where it differs between ranks; None if the lengths are unknown.

    Two of them are equal (`ir.same`) only if they are equal on every rank.
    """
    noted = shards_of(node)
    if noted is not None and not noted.even:
        return noted.lengths
    return tuple(ir.value(node).shape) if is_even(node) else None


def length(node: fx.Node, dim: int) -> Any:
    """Return the length of one dim as `lengths` gives it. If unknown it is None, which `same` never takes for equal."""
    found = lengths(node)
    return None if found is None else found[dim]


def same(a: Any, b: Any) -> bool:
    """Whether lengths, or sequences of lengths, are known to be equal on every rank."""
    return a is not None and b is not None and ir.same(a, b)


def same_kind(a: fx.Node, b: fx.Node) -> bool:
    """Whether two values are known to have equal dtypes, and shapes that are equal on every rank."""
    return ir.value(a).dtype == ir.value(b).dtype and same(lengths(a), lengths(b))


def settle(graph: fx.Graph, known: int = -1) -> int:
    """Replace symbols that turned out to be numbers by these numbers: in the shapes of values, and in the sizes of
    gathers.

    A trace may learn that a symbol is a number only at its end, or when a pass checks a size. For a shard it is a
    different number on some ranks. A pass that distinguishes symbols from numbers must see the same kind on all ranks:
    on some of them the shard is padded before it is sent, and the padded shape holds only numbers.

    Args:
        graph: the graph, changed in place.
        known: the result of the previous call; nothing is done if no more symbols have become numbers since.

    Returns:
        How many symbols have become numbers.
    """
    first = next(iter(graph.nodes), None)
    mode = None if first is None else ir.fake_mode(first)
    env = None if mode is None else mode.shape_env
    count = 0 if env is None else write_numbers(env)
    if count == known:
        return count
    for node in graph.nodes if count else ():
        if any(n is not number_if_known(n) for x in ir.tensors(node) for n in x.shape):
            node.meta["val"] = tree_map(_of_numbers, ir.value(node))
    for node in ir.calls(graph, "all_gather", "all_to_all"):
        node.args = tuple([_number(x) if isinstance(x, fx.Node) else x for x in node.args])
    return count


def _number(x: fx.Node) -> fx.Node | int:
    found = number_if_guarded(ir.value(x))
    return found if isinstance(found, int) else x


def _of_numbers(x: Any) -> Any:
    """A view of the same part of the same memory: Inductor recognises by the memory which values are views of each
    other."""
    if not isinstance(x, FakeTensor) or x.layout != torch.strided:
        return x
    shape, stride = ([number_if_known(n) for n in sizes] for sizes in (x.shape, x.stride()))
    with ir.inside(x.fake_mode):
        return x.as_strided(shape, stride, number_if_known(x.storage_offset()))


_KNOWN = SIZE


def _of(node: fx.Node) -> tuple[int, bool]:
    """Return the number of elements on the rank that has the most, and whether all ranks have as many."""
    todo = [node]
    while todo:
        at = todo[-1]
        missing = [] if SHARDS in at.meta else [x for x in at.all_input_nodes if _KNOWN not in x.meta]
        if missing and _KNOWN not in at.meta:
            todo += missing
            continue
        todo.pop()
        if _KNOWN not in at.meta:
            at.meta[_KNOWN] = _worked_out(at)
    return node.meta[_KNOWN]


def _worked_out(node: fx.Node) -> tuple[int, bool]:
    noted = shards_of(node)
    if noted is not None:
        return prod(noted.largest), noted.even
    given = [x.meta[_KNOWN] for x in node.all_input_nodes]
    if all(even for _, even in given):
        return sum([hint(x.numel()) for x in _tensors(node)]), True
    return _resized(node, max([count for count, _ in given])), False


def _resized(node: fx.Node, count: int) -> int:
    """Return the number of elements that `node` makes of `count`."""
    c = ir.collective(node)
    op, group = (ir.STARTS.get(node.target), node.args[-1:]) if c is None else (c.op, (c.group,))
    if op == "all_gather":
        return count * group_size(str(*group))
    if op in ("reduce_scatter", "shard"):
        return -(-count // group_size(str(*group)))
    return count


def _tensors(node: fx.Node) -> list[torch.Tensor]:
    found: Any = node.meta.get("val")
    return [x for x in (found if isinstance(found, (list, tuple)) else [found]) if isinstance(x, torch.Tensor)]


__all__ = ["elements", "is_even", "length", "lengths", "nbytes", "same", "same_kind", "settle"]
