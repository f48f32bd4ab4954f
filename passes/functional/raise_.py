"""Raising: functional collectives, with the glue around them, become redistribution operators."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import getitem, mul
from typing import Any

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from dtensor.comm.wire_dtypes import CARRIED, form

from ..graph import ir
from ..stages import Pass
from . import glue
from .start_wait_pairs import Pair, pairs, tell_sizes
from .unlower import unlower

aten: Any = ir.aten


class Raise(Pass):
    """Rewrites a start of `_c10d_functional`, its wait and the glue around them to one `dtensor` operator.

    Before:

        %all_gather_into_tensor: f32[8,4] = _c10d_functional.all_gather_into_tensor(%x, 2, tp)
        %wait_tensor: f32[8,4] = _c10d_functional.wait_tensor(%all_gather_into_tensor)
        %split: (f32[4,4], f32[4,4]) = aten.split.Tensor(%wait_tensor, 4)
        %getitem: f32[4,4] = getitem(%split, 0)
        %getitem_1: f32[4,4] = getitem(%split, 1)
        %cat: f32[4,8] = aten.cat([%getitem, %getitem_1], 1)

    After:

        %all_gather: f32[4,8] = dtensor.all_gather(%x, 1, 8, tp)

    Later passes read redistribution operators only. What `lower` made is put back as it was. Of other functional
    collectives, the pass raises those that mean the same on every rank:

    - A coalesced start becomes one operator for each tensor, if all of its tensors can be raised.
    - An all_to_all is raised together with the glue that makes it an exchange of dims; without such glue it stays.
    - The backend's own "avg" stays, since it rounds differently from a sum and a division. So do bitwise reductions,
      and dtypes that would be sent as another dtype, such as the floating-point numbers of a maximum.
    - A wait stays with its start if work stands between the two: whoever separated them wants both to run at the same
      time.
    - A gather or an exchange stays if its operand is padded or its result is sliced, and a scatter stays if its operand
      is padded: on uneven shards some ranks pad and slice and others do not, but the passes must see the same graph on
      all ranks.
    - A chunk at this rank's index stays a chunk: the graph of one rank does not show that the index is the rank's.
    """

    name = "raise"
    stage = "raise"
    exactness = "bitwise"

    def __call__(self, graph: fx.Graph) -> int:
        for node in [node for node in graph.nodes if node.target is ir.WAIT_FOR_ALL]:
            _wait_for_each(node)
        starts = [node for node in graph.nodes if node.target in ir.STARTS]
        return sum([_raise(pairs(start)) for start in starts])


def _wait_for_each(wait: fx.Node) -> None:
    """Replace a wait for a list by one wait for each item, unless a user takes the list as a whole."""
    given: Any = wait.args[0]
    if isinstance(given, fx.Node) or any(user.target is not getitem for user in wait.users):
        return
    waits = [ir.insert(wait, ir.WAIT, (x,), like=wait) for x in given]
    for user in list(wait.users):
        item: Any = user.args[1]
        ir.replace(user, waits[item])
    wait.graph.erase_node(wait)


@dataclass(frozen=True)
class _Reading:
    """The operator `op` that a pair and its glue amount to. It replaces `result`; `glue` may be erased with the
    pair."""

    op: ir.Collective
    result: fx.Node
    glue: tuple[fx.Node, ...]


def _raise(found: list[Pair]) -> int:
    """Raise either all pairs of one start or none of them; return the number of operators they became."""
    if not found or unlower(found[0].start):
        return len(found)
    readings = list[_Reading]()
    for pair in found:
        reading = _read(pair)
        if reading is None:
            return 0
        readings.append(reading)
    gone = set[fx.Node]()
    for pair, reading in zip(found, readings, strict=True):
        gone |= {pair.start, pair.started, pair.wait, *reading.glue} - {reading.result}
        tell_sizes(pair)
        _write(pair, reading)
    for node in sorted(gone, reverse=True):
        if not node.users:
            node.graph.erase_node(node)
    return len(readings)


def _read(pair: Pair) -> _Reading | None:
    val = ir.value(pair.x)
    if not _alike(pair.start, pair.wait) or val.dim() == 0 or val.dtype not in CARRIED:
        return None
    reading = _READERS[ir.STARTS[pair.start.target]](pair)
    return reading if reading is not None and ir.memory_order(ir.value(reading.result)) is not None else None


def _write(pair: Pair, reading: _Reading) -> None:
    c = reading.op
    if c.gather_dim is not None:
        c = replace(c, size=_whole(pair, c.x, c.gather_dim))
    new = ir.emit(pair.start, c, like=pair.start)
    # The partitioner recomputes functional collectives, which it recognises by namespace, only where they are marked.
    new.meta.setdefault("recompute", CheckpointPolicy.MUST_SAVE)
    ir.replace(reading.result, new)


def _whole(pair: Pair, x: fx.Node, dim: int) -> int | fx.Node:
    """The length of `dim` of `x` summed over all ranks."""
    size = ir.value(x).shape[dim]
    if isinstance(size, int):
        return size * pair.n
    node = ir.insert(pair.start, glue.SIZE, (x, dim), like=x)
    return ir.insert(pair.start, mul, (node, pair.n), like=x)


def _alike(start: fx.Node, *nodes: fx.Node) -> bool:
    """Whether the partitioner is to treat `nodes` as it treats `start`: one operator can have only one place."""
    return all(_place(node) == _place(start) for node in nodes)


def _place(node: fx.Node) -> tuple[Any, ...]:
    policy = node.meta.get("recompute", CheckpointPolicy.MUST_SAVE)
    return policy, node.meta.get("ac_graph_id"), node.meta.get("partitioner_tag")


def _is_unwritten(start: fx.Node, *nodes: fx.Node) -> bool:
    """Whether nothing is written to between the first of `nodes` and `start`."""
    node = min(nodes)
    while node is not start and not ir.mutates(node):
        node = node.next
    return node is start


def _before(pair: Pair) -> tuple[glue.Joined | None, tuple[fx.Node, ...]]:
    """The chunks, one for each rank, that are joined along dim 0 to make the sent tensor; and the nodes that do it."""
    found = glue.joined(pair.x)
    if found is None or found.dim != 0 or found.parts != pair.n or found.rows:
        return None, ()
    nodes = (pair.x, *found.inner)
    fits = _alike(pair.start, *nodes) and _is_unwritten(pair.start, *nodes)
    return (found, nodes) if fits else (None, ())


def _after(pair: Pair) -> tuple[glue.Joined | None, fx.Node, tuple[fx.Node, ...]]:
    """The chunks of dim 0 of the received tensor, one for each rank, that are joined anew; the node that joins them;
    the rest."""
    node, found = glue.around(pair.wait) or (pair.wait, None)
    if found is None or found.cut != 0 or found.parts != pair.n or found.stacked:
        return None, pair.wait, ()
    return (found, node, found.inner) if _alike(pair.start, node, *found.inner) else (None, pair.wait, ())


def _original(pair: Pair) -> tuple[fx.Node, tuple[fx.Node, ...]]:
    """The source of the copy that was made for the start, which copies anyway, and the copy; or the sent tensor and no
    copy."""
    source = pair.x.args[0] if pair.x.target is aten.clone.default else None
    if isinstance(source, fx.Node) and _alike(pair.start, pair.x) and _is_unwritten(pair.start, pair.x):
        return source, (pair.x,)
    return pair.x, ()


def _all_gather(pair: Pair) -> _Reading | None:
    found, result, inner = _after(pair)
    if found is not None and found.rows:
        found, result, inner = None, pair.wait, ()
    if pair.given != (pair.n,) or _is_padded(pair.x) or _is_cut(result):
        return None
    source, copies = _original(pair)
    c = ir.Collective("all_gather", source, pair.group, gather_dim=found.dim if found else 0)
    return _Reading(c, result, (*inner, *copies))


def _reduce_scatter(pair: Pair) -> _Reading | None:
    reduce_op, parts = pair.given
    if parts != pair.n or not _is_ours(pair, reduce_op) or _is_padded(pair.x):
        return None
    found, inner = _before(pair)
    source, dim = (found.source, found.cut) if found is not None and not found.stacked else (None, 0)
    if source is None:
        source, inner = _original(pair)
    return _Reading(ir.Collective("reduce_scatter", source, pair.group, reduce_op, None, dim), pair.wait, inner)


def _all_reduce(pair: Pair) -> _Reading | None:
    (reduce_op,) = pair.given
    if not _is_ours(pair, reduce_op):
        return None
    source, copies = _original(pair)
    return _Reading(ir.Collective("all_reduce", source, pair.group, reduce_op), pair.wait, copies)


def _all_to_all(pair: Pair) -> _Reading | None:
    if not all(_is_even(splits, pair) for splits in pair.given):
        return None
    before, made = _before(pair)
    after, result, used = _after(pair)
    # If each rank's chunk was made a row, the rows have to be removed again.
    if (before is not None and before.stacked) != (after is not None and after.rows):
        return None
    source, scatter_dim = (before.source, before.cut) if before is not None else (pair.x, 0)
    gather_dim = after.dim if after is not None else 0
    if gather_dim == scatter_dim or _is_padded(pair.x) or _is_cut(result):
        return None
    c = ir.Collective("all_to_all", source, pair.group, None, gather_dim, scatter_dim)
    return _Reading(c, result, (*made, *used))


def _collective_permute(pair: Pair) -> _Reading | None:
    source, copies = _original(pair)
    c = ir.Collective("collective_permute", source, pair.group, senders=tuple(pair.given[0]))
    return _Reading(c, pair.wait, copies)


def _is_even(splits: Any, pair: Pair) -> bool:
    sizes = [ir.value(size) if isinstance(size, fx.Node) else size for size in splits]
    rows = ir.value(pair.x).shape[0]
    return len(sizes) == pair.n and all(ir.same(size * pair.n, rows) for size in sizes)


def _is_ours(pair: Pair, reduce_op: str) -> bool:
    """Whether `lower` would turn a reduction by `reduce_op` back into the same functional collective."""
    return reduce_op in REDUCTIONS and form(ir.value(pair.x).dtype, reduce_op) is None


def _is_padded(x: fx.Node) -> bool:
    return any(node.target in PADDING for node in glue.moved_from(x))


def _is_cut(result: fx.Node) -> bool:
    return any(glue.leaves_out(node) for node in glue.moved_to(result))


REDUCTIONS = ir.REDUCE_OPS - {"avg"}
"""The reductions that ranks carry out as the operator names them, if they do so for the dtype."""

PADDING = frozenset((aten.constant_pad_nd.default, aten.new_zeros.default, aten.zeros.default))
"""Operators that make the zeros with which a tensor is padded."""

_READERS: dict[str, Callable[[Pair], _Reading | None]] = {
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_reduce": _all_reduce,
    "all_to_all": _all_to_all,
    "collective_permute": _collective_permute,
}
"""Started collective -> the function that reads it."""

__all__ = ["PADDING", "REDUCTIONS", "Raise"]
