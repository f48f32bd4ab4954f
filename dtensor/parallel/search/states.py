"""Layouts as the search sees them, and what it costs to change one.

A state has an entry for each mesh axis: None (replicated), a dim (sharded) or a reduce op (partial). Axes that shard
one dim do so in the order of the mesh. A tensor moves from state to state one axis at a time; what a move costs follows
from what the other axes hold then, and the cheapest sequence of moves is the price. `dtensor.layout.planner`, which
carries moves out, also merges moves over several axes into one, which saves no bytes but their starts.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf, prod
from typing import TypeAlias

from ...layout.cost import WORK, Link, Network, seconds
from ...layout.layout import Layout
from ...layout.placements import Partial, Placement, Replicate, Shard
from ...rules.choose import MOVES

State: TypeAlias = tuple[int | str | None, ...]


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


BUCKET = 10
"""Starts of a collective that the bytes of a full bucket take, as in `dtensor.passes`."""


def bucket_bytes(link: Link) -> float:
    """Bytes of a full bucket on a link, as the passes fill it."""
    return BUCKET * (link.start + link.alpha) * link.bandwidth


def bucketed(network: Network, choosing: Network) -> Network:
    """The mesh as it is for what shares its collectives with much else: bytes count, and their part of the starts of
    full buckets, which are as large as by `choosing`. The first bucket's start comes on top; see `first_start`."""
    links = [
        replace(
            link,
            alpha=0.0,
            launch=0.0,
            start=0.0,
            bandwidth=1 / (1 / link.bandwidth + (link.start + link.alpha) / max(1.0, bucket_bytes(known))),
        )
        for link, known in zip(network.links, choosing.links)
    ]
    return Network.of(network.sizes, tuple(links))


def first_start(network: Network, a: State, b: State) -> tuple[int, float]:
    """The axis of a single move, and the seconds that a collective takes to start over it; 0.0 if it needs none."""
    axis = next(k for k, (x, y) in enumerate(zip(a, b)) if x != y)
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
    """

    def __init__(self, network: Network, shape: tuple[int, ...], itemsize: int) -> None:
        self.network, self.shape, self.bytes = network, shape, prod(shape) * itemsize
        self._prices: dict[tuple[State, State], float] = {}
        self._found: dict[State, dict[State, tuple[float, State | None]]] = {}
        self._edges: dict[State, list[tuple[State, float]]] = {}
        self._between: dict[tuple[frozenset[State], frozenset[State]], list[tuple[State, State, float]]] = {}

    def step(self, state: State, axis: int, to: int | str | None) -> float:
        """Seconds to change the entry of one axis."""
        have, n = state[axis], self.network.sizes[axis]
        if have == to or n == 1:
            return 0.0
        op = MOVES.get((type(have), type(to)))
        if op is None:
            return inf
        others = parts(tuple([None if a == axis else s for a, s in enumerate(state)]), self.network.sizes)
        size = self.bytes / others
        return seconds(op, size / n if op in ("all_to_all", "shard") else size, n, self.network.links[axis])

    def targets(self, state: State, axis: int) -> Iterator[int | str | None]:
        """What the entry of one axis can become."""
        if state[axis] is not None:
            yield None
        for dim in range(len(self.shape)):
            made = (*state[:axis], dim, *state[axis + 1 :])
            if dim != state[axis] and fits(made, self.shape, self.network.sizes):
                yield dim
        if state[axis] is None:
            yield "sum"

    def edges(self, state: State) -> list[tuple[State, float]]:
        """The states that are one move away, and the price of the move."""
        found = self._edges.get(state)
        if found is None:
            found = self._edges[state] = [
                ((*state[:axis], to, *state[axis + 1 :]), self.step(state, axis, to))
                for axis in range(len(state))
                for to in self.targets(state, axis)
            ]
        return found

    def price(self, a: State, b: State) -> float:
        """Seconds of the cheapest way from `a` to `b`."""
        found = self._prices.get((a, b))
        if found is None:
            found = self._prices[a, b] = sum(self.way(a, b).values())
        return found

    def way(self, a: State, b: State) -> dict[tuple[State, State], float]:
        """The single moves of the cheapest way from `a` to `b`, and what each costs."""
        found, steps = self._from(a), dict[tuple[State, State], float]()
        via = b if b in found else _without_terms(b, a)
        if via in found:
            at: State = via
            while (before := found[at][1]) is not None:
                steps[before, at] = found[at][0] - found[before][0]
                at = before
        else:
            via = a  # to shards of different lengths, axis by axis
        return steps | self._by_axis(via, b)

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

    def between(self, made: frozenset[State], wanted: frozenset[State]) -> list[tuple[State, State, float]]:
        """The single moves, with their prices, on the cheapest ways from each state in `made` to each in `wanted`."""
        known = self._between.get((made, wanted))
        if known is not None:
            return known
        found: dict[tuple[State, State], float] = {}
        ends, last = sorted(wanted, key=str), set[tuple[State, State]]()
        for a in sorted(made, key=str):
            tree = self._from(a)
            seen = {a}
            for b in ends:
                at: State = b
                if b not in tree:
                    at = _without_terms(b, a)
                    if at not in tree:
                        found.update(self.way(a, b))
                        continue
                    if (at, b) not in last:
                        last.add((at, b))
                        found.update(self._by_axis(at, b))
                while at not in seen and (before := tree[at][1]) is not None:
                    seen.add(at)
                    found[before, at] = tree[at][0] - tree[before][0]
                    at = before
        known = self._between[made, wanted] = [(a, b, price) for (a, b), price in found.items()]
        return known

    def _from(self, a: State) -> dict[State, tuple[float, State | None]]:
        found = self._found.get(a)
        if found is not None:
            return found
        found = self._found[a] = {}
        least: dict[State, float] = {a: 0.0}
        heap: list[tuple[float, int, State, State | None]] = [(0.0, 0, a, None)]
        count = 0
        while heap:
            so_far, _, at, before = heapq.heappop(heap)
            if at in found:
                continue
            found[at] = so_far, before
            for made, price in self.edges(at):
                cost = so_far + price
                if cost < least.get(made, inf):
                    least[made] = cost
                    count += 1
                    heapq.heappush(heap, (cost, count, made, at))
        return found


__all__ = [
    "Moves",
    "State",
    "bucket_bytes",
    "bucketed",
    "first_start",
    "fits",
    "fitting",
    "layout_of",
    "parts",
    "placements_of",
    "state_of",
]
