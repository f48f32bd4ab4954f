"""Bucketing: small collectives of one kind, none of which depends on another, are sent together."""

from collections.abc import Callable
from dataclasses import dataclass
from operator import getitem
from typing import Any

from torch import fx

from dtensor.job.groups import group_size
from dtensor.mesh.provenance import PART, PARTS, PLACES, RECORD, SENT, TRACED, WRITTEN
from dtensor.prices.overlap import joins

from ..graph import groups, ir
from ..graph.count import CollectiveInfo, describe
from ..graph.node_order import Before, dependencies, floating, sort
from ..stages import Pass

aten: Any = ir.aten


class Bucket(Pass):
    """Merges started collectives over one group, of one dtype and one reduction, to one collective on all their
    elements.

    Before:

        %all_reduce: f32[8] = _c10d_functional.all_reduce(%x, 'sum', tp)
        %wait_tensor: f32[8] = _c10d_functional.wait_tensor(%all_reduce)
        %all_reduce_1: f32[4] = _c10d_functional.all_reduce(%y, 'sum', tp)
        %wait_tensor_1: f32[4] = _c10d_functional.wait_tensor(%all_reduce_1)

    After:

        %view: f32[8] = aten.view(%x, [8])
        %view_1: f32[4] = aten.view(%y, [4])
        %cat: f32[12] = aten.cat([%view, %view_1])
        %all_reduce: f32[12] = _c10d_functional.all_reduce(%cat, 'sum', tp)
        %wait_tensor: f32[12] = _c10d_functional.wait_tensor(%all_reduce)
        %split_with_sizes: (f32[8], f32[4]) = aten.split_with_sizes(%wait_tensor, [8, 4])
        %getitem: f32[8] = getitem(%split_with_sizes, 0)
        %getitem_1: f32[4] = getitem(%split_with_sizes, 1)

    Only collectives that `lower` made take part; those that others started and `raise` left stay as they are. A
    collective joins a bucket if copying it in and out takes less time than starting it, and if the bucket has room
    left (`prices/overlap.py`): a large collective already uses the link well and gains nothing by waiting for others.
    No result in the bucket may be needed before all of the bucket can start, because overlap is not given up for fewer
    starts. Large buckets do not wait for collectives that are ready later, even if no result is needed sooner, as with
    gradients.

    A bucket stands where its first member stood, or as soon after it as all members can start, so that what needs
    nothing of it does not move before what does.

    Each rank finds its place in the buffer when the graph runs. Decisions use the sizes on the rank that sends most, so
    that all ranks decide the same. Collectives with symbolic sizes are left alone, and so is memory that is written to.
    Results that leave the graph are copied out of the buffer. Collectives of different microbatches are not merged,
    since that would defeat the purpose of splitting the batch. Nor, in a whole step, are those of the forward merged
    with those of the backward, which gathers again what was not to be held in between.

    A ring splits the buffer at other places than it would split each tensor, so reductions may add in another order,
    hence `reassociates`.
    """

    name = "bucket"
    stage = "overlap"
    exactness = "reassociates"

    def __call__(self, graph: fx.Graph) -> int:
        starts = [found for found in map(_read, graph.nodes) if found is not None]
        if len(starts) < 2:
            return 0
        before = dependencies(graph)
        buckets = _packed(starts, _Windows(graph, before))
        places = ir.gradients(graph) if buckets else {}
        for bucket in buckets:
            _write(sorted(bucket, key=lambda s: places.get(s.node, -1)), places)
        if buckets:
            sort(graph, before)
        return len(buckets)


@dataclass(frozen=True)
class _Start:
    """A start that may share a buffer.

    Attributes:
        node: the start.
        wait: its wait.
        op: name of the collective that `node` calls.
        key: starts with equal keys may share a buffer.
        size: bytes as in `links.wire_bytes`.
        fixed: seconds that it takes whatever the size.
        per_byte: seconds per byte of `size`.
        copy: seconds to copy it into a buffer and out again.
    """

    node: fx.Node
    wait: fx.Node
    op: str
    key: tuple[Any, ...]
    size: int
    fixed: float
    per_byte: float
    copy: float

    @property
    def x(self) -> fx.Node:
        """The tensor that is sent. It is read from the node since another bucket may have replaced it."""
        return self.node.all_input_nodes[0]


def _read(node: fx.Node) -> _Start | None:
    if node.target not in MEMBERS or RECORD not in node.meta or not _is_even(node):
        return None
    x, wait = node.args[0], ir.only_user(node)
    if not isinstance(x, fx.Node) or wait is None or wait.target is not ir.WAIT:
        return None
    val, info = ir.value(x), describe(node)
    if info is None or info.group_size == 1 or not all(isinstance(n, int) for n in val.shape) or val.dim() == 0:
        return None
    if not ir.is_contiguous(val) or _is_written(node, x) or ir.is_written(wait):
        return None
    op, group = MEMBERS[node.target], str(node.args[-1])
    nbytes = node.meta.get(SENT, val.numel() * val.element_size())
    size = nbytes * info.group_size if op == "all_gather" else nbytes
    fixed = groups.seconds(op, 0, group)
    per_byte = groups.seconds(op, 1, group) - fixed
    copied = groups.seconds("shard", size, group) - groups.seconds("shard", 0, group)
    kind = node.target, info.op, info.reduce_op, val.dtype, *map(str, node.args[1:])
    key = (*kind, node.meta.get(PART), ir.in_backward(node))
    return _Start(node, wait, op, key, size, fixed, per_byte, 2 * copied)


def _sent(s: _Start) -> int:
    return s.size // group_size(str(s.node.args[-1])) if s.op == "all_gather" else s.size


def _is_written(node: fx.Node, x: fx.Node) -> bool:
    """Whether the sent tensor is written to later, on this rank or on another."""
    return node.meta.get(WRITTEN, False) or ir.is_written(x)


def _is_even(node: fx.Node) -> bool:
    """Whether an all_to_all sends one row to each rank; True for other collectives."""
    return MEMBERS[node.target] != "all_to_all" or {*node.args[1], *node.args[2]} == {1}  # pyright: ignore


class _Windows:
    """The computations between which each node may stand while the other nodes stay; and the starts each start waits
    for."""

    def __init__(self, graph: fx.Graph, before: Before) -> None:
        self.place = {node: k for k, node in enumerate(graph.nodes)}
        self.users: Before = {}
        self.floats = floats = floating(self.place)
        for node, earlier in before.items():
            for x in earlier:
                self.users.setdefault(x, []).append(node)
        self.first, self.last, self.above = dict[fx.Node, int](), dict[fx.Node, int](), dict[fx.Node, int]()
        for node, k in self.place.items():
            self.first[node] = max([self.first[x] for x in before[node]], default=0) if node in floats else k
            self.above[node] = 0
            for x in before[node]:
                self.above[node] |= self.above[x] | (1 << self.place[x] if x.target in ir.STARTS else 0)
        for node, k in reversed(self.place.items()):
            latest = min([self.last[x] for x in self.users.get(node, ())], default=len(self.place))
            self.last[node] = latest if node in floats else k

    def delay(self, bucket: list[_Start]) -> None:
        """Record that all of a bucket starts when the last of it can, and that what depends on its results starts later
        too."""
        late = max([self.first[s.node] for s in bucket])
        todo = [s.node for s in bucket]
        while todo:
            node = todo.pop()
            if node in self.floats and self.first[node] < late:
                self.first[node] = late
                todo += self.users.get(node, ())

    def bits(self, bucket: list[_Start]) -> int:
        """The starts of a bucket as a bit set."""
        return sum([1 << self.place[s.node] for s in bucket])

    def is_circle(self, bucket: list[_Start], others: list[list[_Start]]) -> bool:
        """Whether `bucket` would have to wait for itself, possibly through `others`."""
        found = 0
        for s in bucket:
            found |= self.above[s.node]
        todo = [(self.bits(other), other) for other in others]
        grows = True
        while grows:
            grows = False
            for k, (bits, other) in enumerate(todo):
                if bits & found:
                    for s in other:
                        found |= self.above[s.node]
                    del todo[k]
                    grows = True
                    break
        return bool(found & self.bits(bucket))


def _packed(starts: list[_Start], windows: _Windows) -> list[list[_Start]]:
    """Return the groups of two or more starts that share a buffer, in order of first use, then of readiness.

    Kinds are packed one after the other, in the order of the graph. A collective that sends on the results of a bucket
    is ready when that bucket is.
    """
    by_kind: dict[tuple[Any, ...], list[_Start]] = {}
    for s in starts:
        if s.copy < s.fixed:
            by_kind.setdefault(s.key, []).append(s)
    full = list[list[_Start]]()
    for alike in by_kind.values():
        order = sorted(alike, key=lambda s: (windows.last[s.wait], windows.first[s.node], windows.place[s.node]))
        filled = [order[:1]]
        for s in order[1:]:
            if _fits([*filled[-1], s], windows) and not windows.is_circle([*filled[-1], s], full + filled[:-1]):
                filled[-1].append(s)
            else:
                filled.append([s])
        for bucket in filled:
            windows.delay(bucket)
        full += filled
    return [bucket for bucket in full if len(bucket) > 1]


def _fits(bucket: list[_Start], windows: _Windows) -> bool:
    """Whether the last of `bucket` has room in it, and work can still run between its start and its wait."""
    *others, s = bucket
    waiting, ready = sum([x.size for x in others]), max([windows.first[x.node] for x in others])
    if not joins(waiting, s.size, s.fixed, s.per_byte, later=windows.first[s.node] > ready):
        return False
    return max(ready, windows.first[s.node]) < min([windows.last[x.wait] for x in bucket])


def _write(bucket: list[_Start], places: dict[fx.Node, int]) -> None:
    """Replace the starts and waits of `bucket` by one of each; `places` comes from `ir.gradients`."""
    here, first = min([s.node for s in bucket]), bucket[0].node
    join, part = LAYOUTS[bucket[0].op]
    n = group_size(str(first.args[-1]))
    lengths = [ir.value(s.x).numel() // (n if join is _rows else 1) for s in bucket]
    buffer = join(here, [s.x for s in bucket], n, first)
    start = ir.insert(here, first.target, (buffer, *first.args[1:]), like=first)
    start.meta[RECORD] = _record(bucket)
    if any(SENT in s.node.meta for s in bucket):
        start.meta[SENT] = sum([_sent(s) for s in bucket])
    start.meta[PARTS] = [ir.value(s.x) for s in bucket]
    start.meta[PLACES] = [places.get(s.node) for s in bucket]
    start.meta[TRACED] = ir.traced([s.node for s in bucket])
    wait = ir.insert(here, ir.WAIT, (start,), like=bucket[0].wait)
    pieces = part(here, wait, n, lengths, first)
    for k, s in enumerate(bucket):
        piece = ir.insert(here, getitem, (pieces, k), like=s.wait)
        shape = list(ir.value(s.wait).shape)
        if not ir.is_contiguous(ir.value(piece)) or ir.escapes(s.wait):
            piece = ir.copy(here, piece)
        ir.replace(s.wait, ir.insert(here, aten.view.default, (piece, shape), like=s.wait))
    for s in bucket:
        s.node.graph.erase_node(s.node)


def _record(bucket: list[_Start]) -> CollectiveInfo:
    infos = [info for info in [describe(s.node) for s in bucket] if info is not None]
    return CollectiveInfo(
        infos[0].op, infos[0].group, infos[0].group_size, sum([i.bytes for i in infos]), infos[0].reduce_op
    )


def _flat(here: fx.Node, xs: list[fx.Node], n: int, like: fx.Node) -> fx.Node:
    """The elements of `xs`, concatenated."""
    rows = [ir.insert(here, aten.view.default, (x, [ir.value(x).numel()]), like=x) for x in xs]
    return ir.insert(here, aten.cat.default, (rows,), like=like)


def _rows(here: fx.Node, xs: list[fx.Node], n: int, like: fx.Node) -> fx.Node:
    """One row for each rank: its elements of each of `xs`, concatenated."""
    rows = [ir.insert(here, aten.view.default, (x, [n, ir.value(x).numel() // n]), like=x) for x in xs]
    return ir.insert(here, aten.cat.default, (rows, 1), like=like)


def _pieces(here: fx.Node, y: fx.Node, n: int, lengths: list[int], like: fx.Node) -> fx.Node:
    dim = ir.value(y).dim() - 1
    return ir.insert(here, aten.split_with_sizes.default, (y, lengths, dim), like=like)


def _pieces_of_rows(here: fx.Node, y: fx.Node, n: int, lengths: list[int], like: fx.Node) -> fx.Node:
    rows = ir.insert(here, aten.view.default, (y, [n, sum(lengths)]), like=like)
    return _pieces(here, rows, n, lengths, like)


LAYOUTS: dict[str, tuple[Callable[..., fx.Node], Callable[..., fx.Node]]] = {
    "all_gather": (_flat, _pieces_of_rows),
    "reduce_scatter": (_rows, _pieces),
    "all_to_all": (_rows, _pieces),
    "all_reduce": (_flat, _pieces),
}
"""Collective -> the functions that put operands into a buffer and take results out of it."""

MEMBERS: dict[Any, str] = {
    ir.c10d.all_gather_into_tensor.default: "all_gather",
    ir.c10d.reduce_scatter_tensor.default: "reduce_scatter",
    ir.c10d.all_reduce.default: "all_reduce",
    ir.c10d.all_to_all_single.default: "all_to_all",
    ir.ops.all_gather_start.default: "all_gather",
    ir.ops.all_to_all_start.default: "all_to_all",
}
"""The starts that can share a buffer -> the collective."""

__all__ = ["LAYOUTS", "MEMBERS", "Bucket"]
