"""Raising: functional collectives, with the glue around them, become redistribution operators."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import floordiv, getitem, mul

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from dtensor.collectives import CARRIED, group_size

from . import glue, ir
from .count import RECORD
from .lower import ORIGIN
from .unlower import unlower

aten = ir.aten


class Raise:
    """A start of `_c10d_functional` and its wait become one operator of `dtensor`.

    Before:

        %all_gather_into_tensor: f32[8,4] = _c10d_functional.all_gather_into_tensor(%x, 2, tp)
        %wait_tensor: f32[8,4] = _c10d_functional.wait_tensor(%all_gather_into_tensor)
        %split: (f32[4,4], f32[4,4]) = aten.split.Tensor(%wait_tensor, 4)
        %getitem: f32[4,4] = getitem(%split, 0)
        %getitem_1: f32[4,4] = getitem(%split, 1)
        %cat: f32[4,8] = aten.cat([%getitem, %getitem_1], 1)

    After:

        %all_gather: f32[4,8] = dtensor.all_gather(%x, 1, 8, tp)

    What `lower` made is put back as it was. Of others' collectives it takes those that mean the same on every rank:

    - a coalesced start becomes one operator for each tensor, if all of its tensors can be raised;
    - an all_to_all is raised with the glue that makes it an exchange of dims, and stays without;
    - the backend's own "avg" stays (it rounds otherwise than sum and division), as do bitwise reductions and dtypes
      that would travel as others;
    - a wait that work lies before stays with its start: whoever put them apart wants both to run at once;
    - what is padded before a scatter, or cut off after a gather, stays: on uneven shards some ranks pad and cut and
      others do not, and the passes must find one graph on all ranks;
    - a chunk of this rank's index stays a chunk: the graph of one rank does not say that it is the rank's.
    """

    name = "raise"
    exactness = "bitwise"

    def __call__(self, graph: fx.Graph) -> int:
        starts = [node for node in graph.nodes if node.target in ir.STARTS]
        return sum([int(unlower(start)) or _raise(start) for start in starts if _waits_at_once(start)])


@dataclass(frozen=True)
class _Reading:
    """The operator that a start and its glue are; `result` is what it stands for, `gone` what may go with it."""

    op: ir.Collective
    result: fx.Node
    gone: tuple[fx.Node, ...]


def _raise(start: fx.Node) -> int:
    """Raise what `start` starts, all of it or nothing; the number of operators it became."""
    sent, readings = _started(start), list[_Reading]()
    for x, started in sent:
        reading = _read(start, x, started)
        if reading is None:
            return 0
        readings.append(reading)
    gone = {start}
    for (x, started), reading in zip(sent, readings, strict=True):
        gone.update(reading.gone)
        gone.discard(reading.result)
        _tell_sizes(start, x, started)
        _write(start, reading)
    for node in sorted(gone, reverse=True):
        if not node.users:
            node.graph.erase_node(node)
    return len(readings)


def _started(start: fx.Node) -> list[tuple[fx.Node, fx.Node]]:
    """What is communicated, and the node that has to be waited for; several for a coalesced start."""
    x = start.args[0]
    if isinstance(x, fx.Node):
        return [(x, start)]
    items = [user for user in start.users if user.target is getitem]
    if len(items) < len(start.users) or len({item.args[1] for item in items}) < len(items):
        return []
    return [(x[item.args[1]], item) for item in sorted(items, key=lambda item: item.args[1])]


def _read(start: fx.Node, x: fx.Node, started: fx.Node) -> _Reading | None:
    wait, val = glue.readers(started)[0], ir.value(x)
    if not _alike(start, wait) or val.dim() == 0 or val.dtype not in CARRIED:
        return None
    reading = _READERS[ir.STARTS[start.target]](start, x, wait)
    if reading is None or ir.memory_order(ir.value(reading.result)) is None:
        return None
    return replace(reading, gone=(started, wait, *reading.gone))


def _write(start: fx.Node, reading: _Reading) -> None:
    c = reading.op
    if c.gather_dim is not None:
        c = replace(c, size=_whole(start, c.x, c.gather_dim, group_size(c.group)))
    new = ir.emit(start, c, like=start)
    for key in (RECORD, ORIGIN):
        new.meta.pop(key, None)
    # The partitioner recomputes functional collectives only if told so, which it knows by their namespace.
    new.meta.setdefault("recompute", CheckpointPolicy.MUST_SAVE)
    ir.replace(reading.result, new)


def _tell_sizes(start: fx.Node, x: fx.Node, started: fx.Node) -> None:
    """Answer what asks for a size of `started`, or of its wait, by sizes of the `x` that is sent."""
    n, op = group_size(start.args[-1]), ir.STARTS[start.target]
    rows = {"all_gather": mul, "reduce_scatter": floordiv}.get(op)
    for node in (started, *glue.readers(started)):
        for ask in [user for user in node.users if user.target is glue.SIZE]:
            size = ir.insert(start, glue.SIZE, (x, ask.args[1]), like=ask)
            if ask.args[1] == 0 and rows is not None:
                size = ir.insert(start, rows, (size, n), like=ask)
            ask.replace_all_uses_with(size)
            ask.graph.erase_node(ask)


def _whole(before: fx.Node, x: fx.Node, dim: int, n: int) -> int | fx.Node:
    """The length of `n` times `dim` of `x`."""
    size = ir.value(x).shape[dim]
    if isinstance(size, int):
        return size * n
    node = ir.insert(before, glue.SIZE, (x, dim), like=x)
    return ir.insert(before, mul, (node, n), like=x)


def _waits_at_once(start: fx.Node) -> bool:
    """Whether all that `start` starts is waited for once, with nothing that takes time, and no write, before that."""
    waits = [glue.readers(started) for _, started in _started(start)]
    return isinstance(start.args[-1], str) and all(len(w) == 1 and _at_once(start, w[0]) for w in waits)


def _at_once(start: fx.Node, wait: fx.Node) -> bool:
    if wait.target is not ir.WAIT:
        return False
    node = start.next
    while node is not wait:
        if node.op == "output" or ir.mutates(node):
            return False
        if isinstance(ir.value(node), _TENSORS) and node.target not in ir.STARTS and not ir.aliases(node):
            return False
        node = node.next
    return True


_TENSORS = (torch.Tensor, tuple, list)


def _alike(start: fx.Node, *nodes: fx.Node) -> bool:
    """Whether the partitioner is told to treat `nodes` as `start`: one operator can have one place only."""
    return all(_place(node) == _place(start) for node in nodes)


def _place(node: fx.Node) -> tuple:
    policy = node.meta.get("recompute", CheckpointPolicy.MUST_SAVE)
    return policy, node.meta.get("ac_graph_id"), node.meta.get("partitioner_tag")


def _is_unwritten(start: fx.Node, *nodes: fx.Node) -> bool:
    """Whether nothing is written to from the first of `nodes` on up to `start`."""
    node = min(nodes)
    while node is not start and not ir.mutates(node):
        node = node.next
    return node is start


def _before(start: fx.Node, x: fx.Node, n: int) -> tuple[glue.Joined | None, tuple[fx.Node, ...]]:
    """The chunks that are joined along dim 0 to the `x` that is sent, one for each rank; and the nodes that do it."""
    found = glue.joined(x)
    if found is None or found.dim != 0 or found.parts != n or found.rows:
        return None, ()
    nodes = (x, *found.inner)
    return (found, nodes) if _alike(start, *nodes) and _is_unwritten(start, *nodes) else (None, ())


def _after(start: fx.Node, wait: fx.Node, n: int) -> tuple[glue.Joined | None, fx.Node, tuple[fx.Node, ...]]:
    """The chunks of dim 0 of what arrives, one for each rank, joined anew; the node that joins them, and the rest."""
    node, found = glue.around(wait) or (wait, None)
    if found is None or found.cut != 0 or found.parts != n or found.stacked or not _alike(start, node, *found.inner):
        return None, wait, ()
    return found, node, found.inner


def _original(start: fx.Node, x: fx.Node) -> tuple[fx.Node, tuple[fx.Node, ...]]:
    """What `x` is a copy of, made for `start` (which copies by itself); and the copy."""
    source = x.args[0] if x.target is aten.clone.default else None
    if isinstance(source, fx.Node) and _alike(start, x) and _is_unwritten(start, x):
        return source, (x,)
    return x, ()


def _all_gather(start: fx.Node, x: fx.Node, wait: fx.Node) -> _Reading | None:
    n, group = group_size(start.args[-1]), start.args[-1]
    found, result, inner = _after(start, wait, n)
    if found is not None and found.rows:
        found, result, inner = None, wait, ()
    if start.args[-2] != n or _is_cut_off(result):
        return None
    source, copies = _original(start, x)
    c = ir.Collective("all_gather", source, group, gather_dim=found.dim if found else 0)
    return _Reading(c, result, (*inner, *copies))


def _reduce_scatter(start: fx.Node, x: fx.Node, wait: fx.Node) -> _Reading | None:
    _, reduce_op, parts, group = start.args
    n = group_size(group)
    if parts != n or reduce_op not in _REDUCTIONS or _is_padded(x):
        return None
    found, inner = _before(start, x, n)
    if found is not None and not found.stacked:
        c = ir.Collective("reduce_scatter", found.source, group, reduce_op, scatter_dim=found.cut)
        return _Reading(c, wait, inner)
    source, copies = _original(start, x)
    return _Reading(ir.Collective("reduce_scatter", source, group, reduce_op, scatter_dim=0), wait, copies)


def _all_reduce(start: fx.Node, x: fx.Node, wait: fx.Node) -> _Reading | None:
    _, reduce_op, group = start.args
    if reduce_op not in _REDUCTIONS:
        return None
    source, copies = _original(start, x)
    return _Reading(ir.Collective("all_reduce", source, group, reduce_op), wait, copies)


def _all_to_all(start: fx.Node, x: fx.Node, wait: fx.Node) -> _Reading | None:
    _, received, sent, group = start.args
    n = group_size(group)
    if not _is_even(sent, ir.value(x).shape[0], n) or not _is_even(received, ir.value(x).shape[0], n):
        return None
    before, made = _before(start, x, n)
    after, result, used = _after(start, wait, n)
    if before is not None and before.stacked:
        # Each rank's chunk is a row: rows must come off again.
        if after is None or not after.rows:
            return None
    elif after is not None and after.rows:
        return None
    source, scatter_dim = (before.source, before.cut) if before is not None else (x, 0)
    gather_dim = after.dim if after is not None else 0
    if gather_dim == scatter_dim or _is_padded(x) or _is_cut_off(result):
        return None
    c = ir.Collective("all_to_all", source, group, gather_dim=gather_dim, scatter_dim=scatter_dim)
    return _Reading(c, result, (*made, *used))


def _is_even(splits: object, rows: object, n: int) -> bool:
    if not isinstance(splits, (list, tuple)) or len(splits) != n:
        return False
    sizes = [ir.value(size) if isinstance(size, fx.Node) else size for size in splits]
    return all(ir.same(size, sizes[0]) for size in sizes) and ir.same(sizes[0] * n, rows)


_REDUCTIONS = ir.REDUCE_OPS - {"avg"}
_PADDING = frozenset((aten.constant_pad_nd.default, aten.new_zeros.default, aten.zeros.default))


def _is_padded(x: fx.Node) -> bool:
    return any(node.target in _PADDING for node in glue.moved_from(x))


def _is_cut_off(result: fx.Node) -> bool:
    """Whether a last part of `result` is cut off somewhere."""
    return any(node.target is aten.slice.Tensor and glue.drops_end(node) for node in glue.moved_to(result))


_READERS: dict[str, Callable[[fx.Node, fx.Node, fx.Node], _Reading | None]] = {
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_reduce": _all_reduce,
    "all_to_all": _all_to_all,
}
"""What is started -> how it is read: start, what it sends, and its wait."""

__all__ = ["Raise"]
