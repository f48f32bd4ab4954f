"""Reads the local glue around a functional collective: chunks of one tensor, concatenated along another dim.

Functional collectives gather and scatter along dim 0 only. Any other dim takes glue: `cat(chunks(y))` after a gather or
before a scatter. A chunk is written as `split` and `getitem`, `unbind` and `getitem`, `slice`, or `select`.
"""

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import fx

from ..graph import ir

aten: Any = ir.aten


@dataclass(frozen=True)
class Joined:
    """Chunks of `source` along `cut`, in order and of equal length, concatenated along `dim`.

    Attributes:
        source: the tensor that is chunked.
        cut: the dim along which it is chunked.
        dim: the dim along which the chunks are concatenated.
        parts: number of chunks.
        inner: the nodes that make the chunks.
        rows: whether each chunk is a single row whose dim is removed (`unbind`, `select`) before it is joined.
        stacked: whether each chunk gets a new dim 0 (`unsqueeze`), along which the chunks are joined.
    """

    source: fx.Node
    cut: int
    dim: int
    parts: int
    inner: tuple[fx.Node, ...]
    rows: bool = False
    stacked: bool = False


@dataclass(frozen=True)
class _Chunk:
    source: fx.Node
    dim: int
    start: Any
    length: Any
    inner: tuple[fx.Node, ...]
    row: bool = False


def joined(node: fx.Node) -> Joined | None:
    """Return the chunks that `node` concatenates; None if it does not, or if they do not make up one tensor."""
    if node.target is not aten.cat.default or node.kwargs or not isinstance(node.args[0], (list, tuple)):
        return None
    parts, dim = list[Any](node.args[0]), _dim(node, 1)
    new = [part for part in parts if isinstance(part, fx.Node) and _is_new_row(part)]
    stacked = len(new) == len(parts) and dim == 0
    chunks = [_chunk(part.args[0] if stacked else part) for part in parts]
    first = chunks[0] if chunks else None
    if first is None or not _is_partition(first, chunks):
        return None
    inner = [node for c in chunks if c is not None for node in c.inner] + (new if stacked else [])
    return Joined(first.source, first.dim, dim, len(parts), tuple(dict.fromkeys(inner)), first.row, stacked)


SIZE = aten.sym_size.int


def readers(y: fx.Node) -> list[fx.Node]:
    """Return the users of `y` except those that query its size."""
    return [user for user in y.users if user.target is not SIZE]


def around(y: fx.Node) -> tuple[fx.Node, Joined] | None:
    """Return the single node that joins all chunks of `y`. None unless it is the only reader of `y` and its chunks;
    queries of the size of `y` do not count."""
    node: fx.Node | None = y
    while node is not None and (node is y or node.target is not aten.cat.default):
        node = next(iter(readers(node)), None)
    found = None if node is None else joined(node)
    if node is None or found is None or found.source is not y:
        return None
    users = [*readers(y), *[user for x in found.inner for user in x.users]]
    return (node, found) if {node, *found.inner}.issuperset(users) else None


def _chunk(node: Any) -> _Chunk | None:
    if not isinstance(node, fx.Node) or node.kwargs:
        return None
    if node.target is aten.slice.Tensor:
        dim, start, step = _dim(node, 1), _arg(node, 2, None), _arg(node, 4, 1)
        start = 0 if start is None else start
        return _made(node.args[0], dim, start, _length(node, dim), (node,)) if step == 1 else None
    if node.target is aten.select.int:
        return _made(node.args[0], _dim(node, 1, below=True), node.args[2], 1, (node,), row=True)
    call = node.args[0] if node.target is operator.getitem else None
    if not isinstance(call, fx.Node) or call.kwargs:
        return None
    return _piece(node, call, node.args[1])


def _piece(node: fx.Node, call: fx.Node, index: Any) -> _Chunk | None:
    """The chunk `node`, item `index` of the chunks that `call` makes."""
    if call.target is aten.unbind.int:
        return _made(call.args[0], _dim(call, 1, below=True), index, 1, (call, node), row=True)
    if call.target not in (aten.split.Tensor, aten.split_with_sizes.default):
        return None
    dim = _dim(call, 2, of=node)
    start = sum([_length(x, dim) for x in ir.value(call)[:index]])
    return _made(call.args[0], dim, start, _length(node, dim), (call, node))


def _made(source: Any, dim: int, start: Any, length: Any, inner: tuple[Any, ...], row: bool = False) -> _Chunk | None:
    return _Chunk(source, dim, start, length, inner, row) if isinstance(source, fx.Node) else None


def _is_partition(first: _Chunk, chunks: list[_Chunk | None]) -> bool:
    """Whether `chunks` are adjacent, in order, of equal length, and together make up one tensor."""
    start: Any = 0
    for c in chunks:
        if c is None or (c.source, c.dim, c.row) != (first.source, first.dim, first.row):
            return False
        if not ir.same(c.start, start) or not ir.same(c.length, first.length):
            return False
        start = start + first.length
    return ir.same(start, ir.value(first.source).shape[first.dim])


def _is_new_row(node: fx.Node) -> bool:
    return node.target is aten.unsqueeze.default and _dim(node, 1) == 0


def _arg(node: fx.Node, k: int, default: Any) -> Any:
    found = node.args[k] if k < len(node.args) else default
    return ir.value(found) if isinstance(found, fx.Node) else found


def _dim(node: fx.Node, k: int, *, of: fx.Node | None = None, below: bool = False) -> int:
    """Argument `k` of `node`, a dim counted from the front; of a tensor with one dim more than the result if
    `below`."""
    dim = _arg(node, k, 0)
    val = ir.value(of or node)
    ndim = (val[0] if isinstance(val, (tuple, list)) else val).dim() + below
    return dim + ndim if dim < 0 else dim


def _length(x: Any, dim: int) -> Any:
    return (ir.value(x) if isinstance(x, fx.Node) else x).shape[dim]


def leaves_out(node: fx.Node) -> bool:
    """Whether `node` is a slice that may be shorter than its operand."""
    if node.target is not aten.slice.Tensor:
        return False
    dim = _dim(node, 1)
    return not ir.same(_length(node, dim), _length(node.args[0], dim))


_MOVES = frozenset((aten.cat.default, aten.clone.default, aten.constant_pad_nd.default))


def moved_from(node: fx.Node) -> Iterator[fx.Node]:
    """Yield `node` and all nodes whose elements reach it through views, copies, padding and concatenation only."""
    yield from _reach(node, lambda x: x.all_input_nodes if _moves(x) else [])


def moved_to(node: fx.Node) -> Iterator[fx.Node]:
    """Yield `node` and all nodes that its elements reach through views, copies, padding and concatenation only."""
    yield from _reach(node, lambda x: [user for user in x.users if _moves(user)])


def _moves(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is not ir.WAIT and (node.target in _MOVES or ir.aliases(node))


def _reach(node: fx.Node, following: Any) -> Iterator[fx.Node]:
    seen, todo = {node}, [node]
    while todo:
        x = todo.pop()
        yield x
        fresh = [y for y in following(x) if y not in seen]
        seen.update(fresh)
        todo += fresh


__all__ = ["SIZE", "Joined", "around", "joined", "leaves_out", "moved_from", "moved_to", "readers"]
