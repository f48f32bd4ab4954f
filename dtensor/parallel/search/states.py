"""Layouts as the search sees them, and what it costs to change one.

A state has an entry for each mesh axis: None (replicated), a dim (sharded) or a reduce op (partial). Axes that shard
one dim do so in the order of the mesh. A tensor moves from state to state one axis at a time; what a move costs follows
from what the other axes hold then, and the cheapest sequence of moves is the price. `dtensor.layout.planner`, which
carries moves out, also merges moves over several axes into one, which saves no bytes but their starts.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import inf, prod
from typing import Any

import numpy

from ...layout.layout import Layout
from ...layout.placements import Partial, Placement, Replicate, Shard
from ...prices.links import WORK, Link, Network, seconds
from ...prices.overlap import ROOM
from ...rules.choose import MOVES
from ...rules.rule import State


def state_of(layout: Layout) -> State:
    """The state of a layout."""
    found: list[int | str | None] = [None] * layout.mesh_ndim
    for dim, axes in enumerate(layout.dims):
        for axis in axes:
            found[axis] = dim
    for axis, op in layout.partial:
        found[axis] = op
    return tuple(found)


def layout_of(state: State, ndim: int) -> Layout:
    """The layout of an `ndim`-dimensional tensor in a state."""
    dims = tuple([tuple([a for a, s in enumerate(state) if s == d and s is not None]) for d in range(ndim)])
    return Layout.make(len(state), dims, tuple([(a, s) for a, s in enumerate(state) if isinstance(s, str)]))


def placements_of(state: State) -> tuple[Placement, ...]:
    """The placements that a state stands for."""
    return tuple([Shard(s) if isinstance(s, int) else Partial(s) if isinstance(s, str) else Replicate() for s in state])


def parts(state: State, sizes: Sequence[int]) -> int:
    """Into how many parts a tensor is cut."""
    return prod([n for s, n in zip(state, sizes) if isinstance(s, int)])


def fits(state: State, shape: Sequence[int], sizes: Sequence[int]) -> bool:
    """Whether every dim is cut evenly."""
    for dim in {s for s in state if isinstance(s, int)}:
        if dim >= len(shape) or shape[dim] % prod([n for s, n in zip(state, sizes) if s == dim]):
            return False
    return True


def fitting(state: State, ndim: int) -> State:
    """The state with None in place of dims that a tensor does not have."""
    return tuple([None if isinstance(s, int) and s >= ndim else s for s in state])


ROUNDING = 1e-12
"""Ways whose seconds differ by less than this fraction are equally long."""


def bucket_bytes(link: Link) -> float:
    """Bytes of a full bucket on a link, as the passes fill it."""
    return ROOM * (link.start + link.alpha) * link.bandwidth


def _bucketed(link: Link, full: float) -> Link:
    """A link as it is for what shares full buckets with much else."""
    per_byte = 1 / link.bandwidth + (link.start + link.alpha) / max(1.0, full)
    return replace(link, alpha=0.0, launch=0.0, start=0.0, bandwidth=1 / per_byte)


PARTIAL = ("all_to_all", "shard")
"""Moves that send or write only this rank's part."""


@dataclass(frozen=True)
class Sending:
    """What a single move sends.

    Attributes:
        op: the collective, or a local operator.
        axis: the axis of the mesh.
        bytes: as in `dtensor.prices.links.wire_bytes`.
        alone, shared: bytes that are copied before and after, if it is sent alone, or in a bucket.
    """

    op: str
    axis: int
    bytes: float
    alone: float
    shared: float


def changed_axis(a: State, b: State) -> int:
    """The axis of a single move."""
    return next(k for k, (x, y) in enumerate(zip(a, b)) if x != y)


def first_start(network: Network, a: State, b: State) -> tuple[int, float]:
    """The axis of a single move, and the seconds that a collective takes to start over it; 0.0 if it needs none."""
    axis = changed_axis(a, b)
    sent = MOVES.get((type(a[axis]), type(b[axis]))) in WORK
    return axis, seconds("all_gather", 0.0, network.sizes[axis], network.links[axis]) if sent else 0.0


def _without_terms(state: State, have: State) -> State:
    """The state with None in place of terms of another kind than sums, which are made of whole tensors only, unless a
    tensor has them."""
    return tuple([None if isinstance(s, str) and s not in ("sum", x) else s for s, x in zip(state, have)])


class Moves:
    """The prices of moves of a tensor with so many bytes and dims.

    Args:
        network: the mesh.
        shape: sizes of the whole tensor.
        itemsize: bytes of an element.
        memory: bytes per second that a rank reads or writes.
        full: bytes of a full bucket over each axis, for what shares its collectives with others, so that bytes count,
            and their part of the starts of full buckets; the first bucket's start comes on top, see `first_start`. None
            for what is moved alone.
    """

    def __init__(
        self,
        network: Network,
        shape: tuple[int, ...],
        itemsize: int,
        *,
        memory: float = inf,
        full: tuple[float, ...] | None = None,
    ) -> None:
        self.network: Network = network
        self.shape: tuple[int, ...] = shape
        self.bytes: int = prod(shape) * itemsize
        self.memory: float = memory
        self.full: tuple[float, ...] | None = full
        self._bucketed = [_bucketed(*pair) for pair in zip(network.links, full or ())]
        self._steps: dict[Any, float] = {}
        self._sending: dict[tuple[State, State], Sending] = {}
        self._ways: dict[frozenset[str], _Ways] = {}
        self._found: dict[tuple[State, State], dict[tuple[State, State], float]] = {}
        self._between: dict[tuple[frozenset[State], frozenset[State]], list[tuple[State, State, float]]] = {}

    def _size(self, state: State, axis: int) -> float:
        """Bytes on a rank, if this axis did not cut the tensor."""
        n = self.network.sizes[axis] if isinstance(state[axis], int) else 1
        return self.bytes * n / parts(state, self.network.sizes)

    def sending(self, a: State, b: State) -> "Sending":
        """What a single move sends and copies."""
        known = self._sending.get((a, b))
        if known is None:
            known = self._sending[a, b] = self._sent(a, b, changed_axis(a, b))
        return known

    def _sent(self, a: State, b: State, axis: int) -> "Sending":
        have, to, size = a[axis], b[axis], self._size(a, axis)
        op = MOVES[type(have), type(to)]
        sent = size / self.network.sizes[axis] if op in PARTIAL else size
        alone, shared = (self._copied(op, axis, have, to, size, together) for together in (False, True))
        return Sending(op, axis, sent, alone, shared)

    def step(self, state: State, axis: int, to: int | str | None) -> float:
        """Seconds to change the entry of one axis."""
        have, n = state[axis], self.network.sizes[axis]
        if have == to or n == 1:
            return 0.0
        size = self._size(state, axis)
        known = self._steps.get((axis, have, to, size))
        if known is None:
            known = self._steps[axis, have, to, size] = self._step(axis, have, to, size)
        return known

    def _step(self, axis: int, have: int | str | None, to: int | str | None, size: float) -> float:
        """The same for a tensor that without this axis has so many bytes on a rank."""
        n, op = self.network.sizes[axis], MOVES.get((type(have), type(to)))
        if op is None:
            return inf
        sent = size / n if op in PARTIAL else size
        if op not in WORK:
            return self.network.links[axis].launch + 2 * sent / self.memory
        shared = self.full is not None and size < self.full[axis]
        link = self._bucketed[axis] if shared else self.network.links[axis]
        return seconds(op, sent, n, link) + 2 * self._copied(op, axis, have, to, size, shared) / self.memory

    def _copied(
        self, op: str, axis: int, have: int | str | None, to: int | str | None, size: float, shared: bool
    ) -> float:
        """Bytes that are copied before and after a collective: into a bucket and out of it, and where shards are not
        contiguous, as they are along the first dim only; those of an all-to-all are copied along any."""
        part = size / self.network.sizes[axis]
        before, after = size if isinstance(have, str) else part, size if to is None else part
        shared |= op == "all_to_all"
        return before * (shared or to not in (0, None)) + after * (shared or (have != 0 and isinstance(have, int)))

    def targets(self, state: State, axis: int) -> Iterator[int | str | None]:
        """What the entry of one axis can become, if that cuts the tensor evenly."""
        if state[axis] is not None:
            yield None
        yield from [dim for dim in range(len(self.shape)) if dim != state[axis]]
        if state[axis] is None:
            yield "sum"

    def price(self, a: State, b: State) -> float:
        """Seconds of the cheapest way from `a` to `b`."""
        return sum(self.way(a, b).values())

    def way(self, a: State, b: State) -> dict[tuple[State, State], float]:
        """The single moves of the cheapest way from `a` to `b`, and what each costs."""
        found = self._found.get((a, b))
        if found is None:
            ways, vias = self._all([a, b]), [b, _without_terms(b, a)]
            start, end = ways.pairs([a], vias)
            led = ways.lead(start, end)
            via = vias[int(led.argmax())] if led.any() else a  # else axis by axis
            found = ways.moves(start[led][:1], end[led][:1]) | self._by_axis(via, b)
            self._found[a, b] = found
        return found

    def _by_axis(self, a: State, b: State) -> dict[tuple[State, State], float]:
        """Moves from `a` to `b`, axis by axis."""
        steps, at = dict[tuple[State, State], float](), a
        for axis, to in enumerate(b):
            for entry in (None, to) if isinstance(to, str) and at[axis] not in (None, to) else (to,):
                if at[axis] != entry:
                    after = (*at[:axis], entry, *at[axis + 1 :])
                    steps[at, after] = self.step(at, axis, entry)
                    at = after
        return steps

    def prices(self, made: Sequence[State], wanted: Sequence[State]) -> Any:
        """Seconds of the cheapest ways from each state in `made` to each in `wanted`, as a matrix."""
        ways = self._all([*made, *wanted])
        start, end = ways.pairs(made, wanted)
        ways.find(start[:, 0])
        found = ways.seconds(start, end)
        for k, m in zip(*numpy.nonzero(numpy.isinf(found))):
            found[k, m] = self.price(made[k], wanted[m])
        return found

    def between(self, made: frozenset[State], wanted: frozenset[State]) -> list[tuple[State, State, float]]:
        """The single moves, with their prices, on the cheapest ways from each state in `made` to each in `wanted`."""
        known = self._between.get((made, wanted)) if made and wanted else []
        if known is None:
            ways, starts, ends = self._all([*made, *wanted]), sorted(made, key=str), sorted(wanted, key=str)
            start, end = ways.pairs(starts, ends)
            ways.find(start[:, 0])
            led = ways.lead(start, end)
            found = ways.moves(start[led], end[led])
            for k, m in zip(*numpy.nonzero(~led)):
                found |= self.way(starts[k], ends[m])
            known = self._between[made, wanted] = [(a, b, price) for (a, b), price in found.items()]
        return known

    def _all(self, states: Iterable[State]) -> "_Ways":
        """The cheapest ways between all states in which every dim is cut evenly, and terms are sums or as in these."""
        key = frozenset(["sum", *[x for s in states for x in s if isinstance(x, str)]])
        known = self._ways.get(key)
        if known is None:
            sizes = self.network.sizes
            entries = [None, *range(len(self.shape)), *sorted(key)]
            nodes = dict.fromkeys([s for s in product(entries, repeat=len(sizes)) if fits(s, self.shape, sizes)])
            edges: dict[tuple[State, State], float] = {}
            for s in nodes:
                for axis in range(len(s)):
                    for to in self.targets(s, axis):
                        after = (*s[:axis], to, *s[axis + 1 :])
                        if after in nodes:
                            edges[s, after] = self.step(s, axis, to)
            known = self._ways[key] = _Ways([*nodes], edges)
        return known


class _Ways:
    """The cheapest ways between states, from many at once as Bellman ("On a routing problem", 1958) finds them.

    Args:
        nodes: the states.
        edges: from which state to which -> the seconds of a single move.
    """

    AT_ONCE = 1 << 22
    """Ways that are compared at once."""

    def __init__(self, nodes: list[State], edges: dict[tuple[State, State], float]) -> None:
        self.nodes, self.edges = nodes, edges
        self.number = {s: k for k, s in enumerate(nodes)}
        into: list[list[tuple[int, float]]] = [[] for _ in nodes]
        for (a, b), price in edges.items():
            into[self.number[b]].append((self.number[a], price))
        most = max(1, *[len(some) for some in into])
        padded = [some + [(0, inf)] * (most - len(some)) for some in into]
        self._sources, self._prices = (numpy.array([[e[k] for e in some] for some in padded]) for k in (0, 1))
        self._rows: dict[int, tuple[Any, Any]] = {}

    def pairs(self, some: Sequence[State], others: Sequence[State]) -> tuple[Any, Any]:
        """The indices of each of some states and of each of others; -1 for those that are not known here."""
        a, b = (numpy.array([self.number.get(s, -1) for s in given]) for given in (some, others))
        return numpy.meshgrid(a, b, indexing="ij")

    def seconds(self, start: Any, end: Any) -> Any:
        """Seconds of the cheapest ways between states, by their indices, or inf; all of a row start at the same one."""
        none = numpy.full(len(self.nodes), inf)
        took = [self._from(k)[0] if k >= 0 else none for k in start[:, 0]]
        return numpy.stack([numpy.where(ends >= 0, row[ends], inf) for row, ends in zip(took, end)])

    def lead(self, start: Any, end: Any) -> Any:
        """Whether there are ways between states, by their indices; all of a row start at the same one."""
        return numpy.isfinite(self.seconds(start, end))

    def moves(self, start: Any, end: Any) -> dict[tuple[State, State], float]:
        """The moves on the cheapest ways between states, by their indices, and the seconds of each."""
        found, n = dict[tuple[State, State], float](), len(self.nodes)
        some, row = numpy.unique(start, return_inverse=True)
        before = numpy.stack([self._from(int(k))[1] for k in some]) if len(some) else None
        used: list[Any] = []
        while before is not None and (left := end != start).any():
            row, start, end = row[left], start[left], end[left]
            last = before[row, end]
            used.append(numpy.unique(last * n + end))
            end = last
        for k in numpy.unique(numpy.concatenate(used)).tolist() if used else ():
            way = self.nodes[k // n], self.nodes[k % n]
            found[way] = self.edges[way]
        return found

    def find(self, start: Any) -> None:
        """Find the ways from these states, by their indices."""
        new = numpy.array([k for k in dict.fromkeys(start.tolist()) if k >= 0 and k not in self._rows], int)
        step = max(1, self.AT_ONCE // self._prices.size)
        for some in (new[k : k + step] for k in range(0, len(new), step)):
            took = numpy.full((len(some), len(self.nodes)), inf)
            before = numpy.tile(some[:, None], len(self.nodes))
            took[numpy.arange(len(some)), some] = 0.0
            while True:
                over = took[:, self._sources] + self._prices
                last = over.argmin(2)
                least = numpy.take_along_axis(over, last[..., None], 2)[..., 0]
                better = least < took * (1 - ROUNDING)
                if not better.any():
                    break
                numpy.copyto(took, least, where=better)
                numpy.copyto(before, self._sources[numpy.arange(len(self.nodes)), last], where=better)
            self._rows |= {int(k): (seconds_to, last) for k, seconds_to, last in zip(some, took, before)}

    def _from(self, k: int) -> Any:
        """Seconds of the cheapest way to each state, and the last state but one on it."""
        if k not in self._rows:
            self.find(numpy.array([k]))
        return self._rows[k]


__all__ = [
    "Moves",
    "State",
    "bucket_bytes",
    "first_start",
    "fits",
    "fitting",
    "layout_of",
    "parts",
    "placements_of",
    "state_of",
]
