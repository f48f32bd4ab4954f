"""The steps of redistributions: which steps lead out of a layout, what they send and what they hold.

The planner searches over these. Each step is one operator over one process group: that of a mesh axis, or of several
axes that have a group of their own (`Network.merged`). Only the innermost axes of a dimension can change, because only
their shards are contiguous locally:

    all_gather      S(d) -> R       all_to_all   S(d) -> S(e)      reduce_scatter       P -> S(d)
    all_reduce      P -> R          shard        R -> S(d)         collective_permute   same blocks, other ranks
    partial         R -> P

Two rules keep values exact. First, several axes are merged on a dimension, and blocks are permuted, only if its length
is divisible: otherwise splitting twice and splitting once give different shards. Merged axes are in ascending order,
like the numbering of the group's ranks. Second, a value that is partial over several axes is the reduction over the
first axis of the reduction over the second, and so on. So an axis is reduced only when no later axis is partial by an
operation that does not commute with its own.

For the speed of the search, `Space` works on plain tuples, and only on axes of more than one rank.
"""

from collections.abc import Iterator
from functools import lru_cache
from itertools import accumulate, combinations, islice, pairwise, permutations, product
from math import prod
from typing import Any, NamedTuple

from ..prices.links import Network

Dims = tuple[tuple[int, ...], ...]
Partials = tuple[tuple[int, str], ...]


class State(NamedTuple):
    """A layout as plain tuples: for each dimension the axes that shard it, outermost first; ascending partial axes."""

    dims: Dims
    partial: Partials


class Edge(NamedTuple):
    """A step out of a state.

    Attributes:
        op: The name of the operator.
        axes: The mesh axes of its process group, ascending.
        dim: The dimension that is sharded or gathered (for all_to_all: gathered); None if there is none.
        scatter_dim: For all_to_all, the dimension that is sharded.
        reduce_op: The reduction of the reducing steps and of "partial".
        pieces: For each dimension, the axes that shard one buffer. `count` such buffers are the size of the step as
            `links.wire_bytes` takes it.
        count: Number of such buffers.
        to: The state after the step.
        fixed, per_byte: Seconds of the step for any size, and per byte of one buffer.
    """

    op: str
    axes: tuple[int, ...]
    dim: int | None
    scatter_dim: int | None
    reduce_op: str | None
    pieces: Dims
    times: int
    to: State
    fixed: float
    per_byte: float


def commute(a: str, b: str) -> bool:
    """Whether a reduction by `a` over one axis and one by `b` over another can be done in either order."""
    return a == b or {a, b} == {"sum", "avg"}


class Space:
    """The states and edges of one search.

    Args:
        lengths: Global length of each dimension.
        network: The mesh.
        named: Dimensions that are sharded in the source or the target.
        wanted: Partial axes of the target.
    """

    def __init__(self, lengths: tuple[int, ...], network: Network, named: frozenset[int], wanted: Partials) -> None:
        self.lengths = lengths
        self.network = network
        self.wanted = wanted
        self.axes: tuple[int, ...] = tuple(a for a, n in enumerate(network.sizes) if n > 1)
        self.runs: dict[tuple[int, ...], None] = dict.fromkeys(sorted([*[(a,) for a in self.axes], *network.merged]))
        self.classes: Any = _interchangeable(lengths, named, prod(network.sizes))
        self._lengths: dict[tuple[int, tuple[int, ...]], int] = {}
        self._elements: dict[Dims, int] = {}
        n = prod(network.sizes)
        self._edges = _edge_table(network, named, wanted, tuple([0 if x and x % n == 0 else x for x in lengths]))

    def length(self, dim: int, axes: tuple[int, ...]) -> int:
        """Length of the longest shard of `dim` when it is sharded over `axes`."""
        key = (dim, axes)
        found = self._lengths.get(key)
        if found is None:
            found = self._lengths[key] = -(-self.lengths[dim] // self.network.size(axes))
        return found

    def elements(self, dims: Dims) -> int:
        """Number of elements of the largest shard."""
        found = self._elements.get(dims)
        if found is None:
            found = self._elements[dims] = prod([self.length(*key) for key in enumerate(dims)])
        return found

    def divides(self, dim: int, axes: tuple[int, ...]) -> bool:
        """Whether `axes` shard `dim` evenly."""
        return self.lengths[dim] % self.network.size(axes) == 0

    def edges(self, at: State) -> tuple[Edge, ...]:
        """All steps out of `at` that can be on a shortest path; of interchangeable dimensions, only one is tried."""
        found = self._edges.get(at)
        if found is None:
            found = self._edges[at] = tuple(self._steps(at))
        return found

    def _edge(
        self, op: str, axes: Any, dim: Any, scatter_dim: Any, reduce_op: Any, pieces: Dims, count: int, to: State
    ) -> Edge:
        fixed, per_byte = self.network.terms(op, axes)
        return Edge(op, axes, dim, scatter_dim, reduce_op, pieces, count, to, fixed, per_byte * count)

    def _steps(self, at: State) -> Iterator[Edge]:
        targets = self._targets(at.dims)
        yield from self._out_of_dims(at, targets)
        yield from self._reductions(at, targets)
        yield from self._local(at, targets)
        for dims, group in rearranged(at.dims, self.network):
            if group in self.runs and all(a == b or self.divides(d, a) for d, (a, b) in enumerate(zip(at.dims, dims))):
                yield self._edge("collective_permute", group, None, None, None, at.dims, 1, State(dims, at.partial))

    def _targets(self, dims: Dims) -> list[int]:
        """Dimensions worth sharding: of several interchangeable unsharded ones, only the first."""
        found: list[int] = []
        for alike in self.classes:
            for d in alike:
                found.append(d)
                if not dims[d] and len(alike) > 1:
                    break
        return found

    def _cut(self, dims: Dims, dim: int, run: tuple[int, ...]) -> Dims | None:
        """`dims` with `run` innermost on `dim`; None if a merged `run` splits differently from its axes in turn."""
        axes = dims[dim] + run
        if len(run) > 1 and not self.divides(dim, axes):
            return None
        return (*dims[:dim], axes, *dims[dim + 1 :])

    def _out_of_dims(self, at: State, targets: list[int]) -> Iterator[Edge]:
        dims = at.dims
        for d, axes in enumerate(dims):
            for k in range(1, len(axes) + 1):
                run = axes[-k:]
                if run not in self.runs or (k > 1 and not self.divides(d, axes)):
                    continue
                n = self.network.size(run)
                without = (*dims[:d], axes[:-k], *dims[d + 1 :])
                yield self._edge("all_gather", run, d, None, None, dims, n, State(without, at.partial))
                for e in targets:
                    to = self._cut(without, e, run) if e != d else None
                    if to is not None:
                        both = (*to[:d], axes, *to[d + 1 :])
                        yield self._edge("all_to_all", run, d, e, None, both, n, State(to, at.partial))

    def _reductions(self, at: State, targets: list[int]) -> Iterator[Edge]:
        for op, run in _reducible(at.partial, self.runs):
            n = self.network.size(run)
            rest = tuple([p for p in at.partial if p[0] not in run])
            yield self._edge("all_reduce", run, None, None, op, at.dims, 1, State(at.dims, rest))
            for d in targets:
                to = self._cut(at.dims, d, run)
                if to is not None:
                    yield self._edge("reduce_scatter", run, d, None, op, to, n, State(to, rest))

    def _local(self, at: State, targets: list[int]) -> Iterator[Edge]:
        taken = {a for axes in at.dims for a in axes} | {a for a, _ in at.partial}
        free = [a for a in self.axes if a not in taken]
        for run in self.runs if len(free) > 1 else [(a,) for a in free]:
            if not taken.isdisjoint(run):
                continue
            for d in targets:
                to = self._cut(at.dims, d, run)
                if to is not None:
                    yield self._edge("shard", run, d, None, None, to, 1, State(to, at.partial))
        # Also consider partial axes that the target does not have: one merged reduction can be cheaper than two.
        open_ops = sorted({op for _, op in at.partial}) if len(self.runs) > len(self.axes) else ()
        for axis, op in dict.fromkeys([*self.wanted, *[(a, op) for a in free for op in open_ops]]):
            # The other ranks of a product hold ones, and a sum over a later axis would turn them into larger numbers.
            if axis in free and not (op == "product" and any(b > axis and o == "sum" for b, o in at.partial)):
                made = State(at.dims, tuple(sorted((*at.partial, (axis, op)))))
                yield self._edge("partial", (axis,), None, None, op, at.dims, 1, made)


def _interchangeable(lengths: tuple[int, ...], named: frozenset[int], n: int) -> list[list[int]]:
    """Classes of interchangeable dimensions: unsharded in source and target, and split in the same way."""
    classes: dict[int, list[int]] = {}
    for d, length in enumerate(lengths):
        if d not in named:
            classes.setdefault(0 if length and length % n == 0 else -length - 1, []).append(d)
    return [[d] for d in sorted(named)] + list(classes.values())


@lru_cache(maxsize=1024)
def _edge_table(
    network: Network, named: frozenset[int], wanted: Partials, lengths: Any
) -> dict[State, tuple[Edge, ...]]:
    """Known edges, shared by all searches over the same steps: `lengths` that divide (given as 0) or are equal."""
    return {}


def forget() -> None:
    """Drop all cached steps, to time planning."""
    for known in (_edge_table, _reducible_sets, rearranged):
        known.cache_clear()


@lru_cache(maxsize=4096)
def _reducible_sets(partial: Partials) -> tuple[tuple[str, tuple[int, ...]], ...]:
    found: list[tuple[str, tuple[int, ...]]] = []
    for op in dict.fromkeys([op for _, op in partial]):
        axes = [a for a, o in partial if o == op]
        last = max([a for a, o in partial if not commute(o, op)], default=-1)
        ready = [a for a in axes if a > last]
        found += [(op, run) for k in range(1, len(ready) + 1) for run in combinations(ready, k)]
    return tuple(found)


def _reducible(partial: Partials, runs: dict[tuple[int, ...], None]) -> list[tuple[str, tuple[int, ...]]]:
    """The sets of axes that one collective can reduce now, each with its operation."""
    return [(op, run) for op, run in _reducible_sets(partial) if run in runs] if partial else []


@lru_cache(maxsize=65536)
def rearranged(dims: Dims, network: Network) -> tuple[tuple[Dims, tuple[int, ...]], ...]:
    """Other assignments of the axes that split every dimension into as many blocks, with the axes that change."""
    axes = tuple([a for cut in dims for a in cut])
    if len(axes) < 2 or not network.merged:
        return ()
    if len({network.sizes[a] for a in axes}) == 1:
        return tuple(_relabelled(axes, dims))
    ways = [_dealt(order, dims, network) for order in permutations(axes)]
    assert ways[0] is not None, "the axes as they are cut the dimensions as they are cut"
    digits, ascending = ways[0][1], sorted(axes)
    found: list[Any] = []
    for way in ways[1:]:
        if way is not None:
            found.append((way[0], tuple([a for a in ascending if way[1][a] != digits[a]])))
    return tuple(found)


def _relabelled(axes: tuple[int, ...], dims: Dims) -> Iterator[tuple[Dims, tuple[int, ...]]]:
    """Like `rearranged`, for axes of equal size: they change places with each other."""
    ends = list(accumulate([len(cut) for cut in dims], initial=0))
    places = list(pairwise(ends))
    for order in islice(permutations(axes), 1, None):
        moved = tuple(sorted([a for a, b in zip(axes, order) if a != b]))
        yield tuple([order[i:j] for i, j in places]), moved


def _dealt(order: tuple[int, ...], dims: Dims, network: Network) -> tuple[Dims, dict[int, tuple[int, int]]] | None:
    """`order` divided so that every dimension gets as many blocks as in `dims`; None if that is impossible.

    Also returns, for each axis, its dimension and the number of blocks between neighbours along the axis.
    """
    found: list[Any] = []
    digits: dict[Any, Any] = {}
    begin, sizes = 0, network.sizes
    for d, cut in enumerate(dims):
        end, blocks = begin, network.size(cut)
        while blocks > 1 and end < len(order) and blocks % sizes[order[end]] == 0:
            blocks //= sizes[order[end]]
            digits[order[end]] = (d, blocks)
            end += 1
        if blocks > 1:
            return None
        found.append(order[begin:end])
        begin = end
    return tuple(found), digits


def senders(before: Dims, after: Dims, group: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[int, ...]:
    """For each rank of the group over the axes `group`, the rank of that group whose block it receives."""

    def block(dims: Dims, at: dict[int, int]) -> tuple[int, ...]:
        found: list[Any] = []
        for axes in dims:
            index = 0
            for a in axes:
                index = index * sizes[a] + at.get(a, 0)
            found.append(index)
        return tuple(found)

    ranks = [dict(zip(group, at)) for at in product(*[range(sizes[a]) for a in group])]
    holder = {block(before, at): rank for rank, at in enumerate(ranks)}
    return tuple([holder[block(after, at)] for at in ranks])


__all__ = ["Dims", "Edge", "Partials", "Space", "State", "commute", "forget", "rearranged", "senders"]
