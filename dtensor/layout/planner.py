"""The planner: the cheapest sequence of redistribution steps from one layout to another.

A* search (Hart, Nilsson and Raphael, 1968) finds a shortest path over the layouts and steps of
`dtensor.layout.transitions`, in seconds as estimated by `dtensor.prices.links`. By default, no intermediate layout is
larger than the larger of source and target, as long as such a path sends no more than gathering the full tensor would.
The memory held at once is then at most that size plus the result of one step. Planning is pure and cached: the
executor, the reports and `Plan.cost` read the same plan, in eager mode and at trace time, on every rank.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from functools import lru_cache
from math import inf, prod
from typing import Any, Literal

from ..errors import ArgumentError, PlacementError
from ..prices.links import WORK, Network, wire_bytes
from ..torch_private.on_demand import sympy
from .layout import Layout
from .transitions import Dims, Edge, Space, State

Prefer = Literal["time", "memory"]


@dataclass(frozen=True)
class Step:
    """One redistribution step.

    Attributes:
        op: A name in `dtensor.comm.collectives.KERNELS`, or "partial" (R -> P, local).
        axes: The mesh axes of its process group, ascending.
        src, dst: The layouts before and after.
        dim: The dimension that is sharded or gathered (for all_to_all: gathered); None if there is none.
        scatter_dim: For all_to_all, the dimension that is sharded.
        reduce_op: The reduction of the reducing steps and of "partial".
        pieces, count: The buffer that the cost depends on: `count` times a shard whose dimensions are sharded over the
            axes in `pieces`.
        bytes: Bytes that each rank sends.
        seconds: Estimated time.
        peak: Bytes of the largest shard before the step plus the largest after it.
    """

    op: str
    axes: tuple[int, ...]
    src: Layout
    dst: Layout
    dim: int | None
    scatter_dim: int | None
    reduce_op: str | None
    pieces: Dims
    count: int
    bytes: float
    seconds: float
    peak: int

    def __str__(self) -> str:
        over = "axis" if len(self.axes) == 1 else "axes"
        sent = _readable(self.bytes) if self.op in WORK else "local"
        return f"{self.src} -> {self.dst}: {self.op} over {over} {', '.join(map(str, self.axes))}, {sent}"


@dataclass(frozen=True)
class Cost:
    """The cost of a plan, as numbers or sympy expressions.

    Attributes:
        bytes: Bytes that each rank puts on the wire; for uneven shards, those of the longest.
        seconds: Estimated time.
    """

    bytes: float | sympy.Expr
    seconds: float | sympy.Expr


@dataclass(frozen=True)
class Plan:
    """The steps that redistribute a tensor from `src` to `dst`.

    Attributes:
        src, dst: The layouts before and after.
        steps: The steps, in order.
        shape: The global sizes that the plan was made for.
        network: The mesh that the plan was made for.
        itemsize: Bytes per element.
        bytes: Bytes that each rank sends in all steps.
        seconds: Estimated time of all steps.
        peak: The most bytes held at once.
    """

    src: Layout
    dst: Layout
    steps: tuple[Step, ...]
    shape: tuple[int, ...]
    network: Network
    itemsize: int
    bytes: float
    seconds: float
    peak: int

    def __str__(self) -> str:
        return "\n".join(map(str, self.steps)) or f"{self.src} -> {self.dst}: nothing to do"

    def cost(self, *, symbolic: bool = False) -> Cost:
        """Bytes on the wire per rank, and seconds.

        Args:
            symbolic: Return expressions in the sizes `s0`, `s1`, … of the dimensions and `n0`, `n1`, … of the mesh
                axes, all positive integers. They hold for all sizes for which this plan is valid, and assume that the
                dimensions that it shards evenly are sharded evenly.
        """
        if not symbolic:
            return Cost(self.bytes, self.seconds)
        sent, time = sympy.Integer(0), sympy.Integer(0)
        for step in self.steps:
            n = prod([_symbol("n", a) for a in step.axes])
            count = n if step.count > 1 else 1
            size = count * self.itemsize * prod([self._length(d, axes) for d, axes in enumerate(step.pieces)])
            link = self.network.link(step.axes)
            if step.op in WORK:
                wire = wire_bytes(step.op, size, n)
                sent += wire
                time += link.start + link.alpha * WORK[step.op][0](n, _symbolic_log2) + wire / link.bandwidth
            else:
                time += link.launch + size / link.memory
        return Cost(sympy.simplify(sent), time)

    def _length(self, dim: int, axes: tuple[int, ...]) -> sympy.Expr:
        cut = _symbol("s", dim) / prod([_symbol("n", a) for a in axes], start=sympy.Integer(1))
        return cut if self.shape[dim] % self.network.size(axes) == 0 else sympy.ceiling(cut)


def _symbol(kind: str, index: int) -> sympy.Symbol:
    return sympy.Symbol(f"{kind}{index}", positive=True, integer=True)


def _symbolic_log2(n: sympy.Expr) -> sympy.Expr:
    return sympy.ceiling(sympy.log(n, 2))


def plan(
    src: Layout,
    dst: Layout,
    shape: tuple[int, ...],
    mesh: Network | tuple[int, ...],
    itemsize: int = 4,
    prefer: Prefer = "time",
) -> Plan:
    """Find the cheapest plan from `src` to `dst`.

    Args:
        src, dst: Layouts over the same mesh and the same number of dimensions.
        shape: Global sizes as ints. For symbolic sizes, pass their hints, which only choose between plans.
        mesh: The network, or only the sizes of the mesh axes (then without merged groups, and with the default link).
        itemsize: Bytes per element.
        prefer: "time" takes the fastest path on which no layout is larger than the larger of source and target. If
            there is none, or if it sends more than gathering the full tensor, it takes the fastest of all paths.
            "memory" takes the path that holds the least memory at once, and the fastest of these.

    Returns:
        The plan, cached.

    Raises:
        PlacementError: The layouts do not fit the shape or the mesh.
        ValueError: `prefer` is neither of the two.
    """
    return _plan(src, dst, shape, mesh if mesh.__class__ is Network else Network.of(mesh), itemsize, prefer)  # pyright: ignore


@lru_cache(maxsize=16384)
def _plan(src: Layout, dst: Layout, shape: Any, network: Network, itemsize: int, prefer: str) -> Plan:
    _check(src, dst, shape, network, prefer)
    real = [n > 1 for n in network.sizes]
    start, goal = _bare(src, real), _bare(dst, real)
    named = frozenset(d for d in range(len(shape)) if start.dims[d] or goal.dims[d])
    space = Space(shape, network, named, goal.partial)
    larger = max(space.elements(start.dims), space.elements(goal.dims))
    if prefer == "memory":
        found = _search(space, start, goal, itemsize, inf, _least_peak(space, start, goal))
    else:
        found = _search(space, start, goal, itemsize, larger, inf)
        if found is None or _sent(found, space) > _sent_by_way_of_whole(space, start, goal):
            found = _search(space, start, goal, itemsize, inf, inf)
    assert found is not None, f"no path from {src} to {dst}: there is always one through replication"
    steps = _named_steps(found, src, dst, space, itemsize)
    largest = itemsize * larger
    return Plan(
        src,
        dst,
        steps,
        shape,
        network,
        itemsize,
        sum([s.bytes for s in steps]),
        sum([s.seconds for s in steps]),
        max([largest, *[s.peak for s in steps]]),
    )


def forget() -> None:
    """Drop all cached plans, to time planning."""
    _plan.cache_clear()


def _check(src: Layout, dst: Layout, shape: Any, network: Network, prefer: str) -> None:
    if prefer not in ("time", "memory"):
        raise ArgumentError(f"prefer is 'time' or 'memory'; got {prefer!r}")
    for layout in (src, dst):
        if layout.mesh_ndim != len(network.sizes) or len(layout.dims) != len(shape):
            raise PlacementError(
                f"layout {layout} is for a {len(layout.dims)}-dimensional tensor on {layout.mesh_ndim} mesh axes, but "
                f"the plan is for shape {tuple(shape)} on a mesh of sizes {network.sizes}"
            )


def _bare(layout: Layout, real: list[bool]) -> State:
    """`layout` without the mesh axes of a single rank, which split nothing."""
    dims = tuple([tuple([a for a in axes if real[a]]) for axes in layout.dims])
    return State(dims, tuple([p for p in layout.partial if real[p[0]]]))


def _search(space: Space, start: State, goal: State, itemsize: int, limit: float, peak: float) -> list[Edge] | None:
    """The fastest path over states of at most `limit` elements and steps that hold at most `peak`; None if none.

    A* with `_Bound` as the heuristic, which never exceeds the true cost. A state that is reached at a lower cost is
    opened again, so the heuristic does not have to be consistent.
    """
    bound = _Bound(space, goal, itemsize)
    best: dict[State, float] = {start: 0.0}
    came: dict[State, tuple[State, Edge]] = {}
    heap: list[tuple[float, int, float, State]] = [(0.0, 0, 0.0, start)]
    order = 0
    while heap:
        _, _, so_far, at = heapq.heappop(heap)
        if at == goal:
            return _path(came, at)
        if so_far > best[at]:
            continue
        held = space.elements(at.dims) if peak < inf else 0
        for edge in space.edges(at):
            total = so_far + edge.fixed + edge.per_byte * itemsize * space.elements(edge.pieces)
            if total >= best.get(edge.to, inf):
                continue
            if limit < inf or peak < inf:
                size = space.elements(edge.to.dims)
                if size > limit or held + size > peak:
                    continue
            best[edge.to], came[edge.to] = total, (at, edge)
            order -= 1
            heapq.heappush(heap, (total + bound(edge.to), order, total, edge.to))
    return None


def _sent(path: list[Edge], space: Space) -> float:
    """Number of elements that each rank sends along a path."""
    return sum([wire_bytes(e.op, e.times * space.elements(e.pieces), space.network.size(e.axes)) for e in path])


def _sent_by_way_of_whole(space: Space, start: State, goal: State) -> float:
    """Number of elements that each rank sends if it reduces its shard, gathers the full tensor and then shards that."""
    shard = space.elements(start.dims)
    reduced = [
        wire_bytes("all_reduce", shard, space.network.size((a,)))
        for a, op in start.partial
        if (a, op) not in goal.partial
    ]
    return prod(space.lengths) - shard + sum(reduced)


def _path(came: dict[State, tuple[State, Edge]], at: State) -> list[Edge]:
    path: list[Any] = []
    while at in came:
        at, edge = came[at]
        path.append(edge)
    return path[::-1]


class _Bound:
    """A lower bound on the seconds from a state to the goal.

    It counts what every path has to do. That is one collective per pending reduction operation; one for each dimension
    that has to lose axes, and at least one if the axes of some dimension are not those that the goal's begin with; and
    local steps for what still has to be sharded or made partial. To this it adds the bytes that a rank cannot hold
    before the goal: a step over n ranks brings at most n-1 times what is kept.
    """

    def __init__(self, space: Space, goal: State, itemsize: int) -> None:
        self.space, self.goal = space, goal
        links = space.network.links
        self.collective = min([link.start + link.alpha for link in links], default=0.0)
        self.local = min([link.launch for link in links], default=0.0)
        self.per_byte = itemsize / max([link.bandwidth for link in links], default=1.0)
        self.size = space.elements(goal.dims)
        self.cut = {a for axes in goal.dims for a in axes}
        self.states: dict[State, float] = {}
        self.dims: dict[tuple[int, tuple[int, ...]], tuple[bool, bool, int]] = {}

    def __call__(self, at: State) -> float:
        found = self.states.get(at)
        if found is None:
            found = self.states[at] = self._of(at)
        return found

    def _of(self, at: State) -> float:
        opened = {op for axis, op in at.partial if (axis, op) not in self.goal.partial} if at.partial else ()
        other, full, kept = False, 0, 1
        used = len(at.partial)
        for key in enumerate(at.dims):
            found = self.dims.get(key)
            if found is None:
                found = self.dims[key] = self._of_dim(*key)
            other, full, kept = other or found[0], full + found[1], kept * found[2]
            used += len(key[1])
        local = 0
        if used < len(self.space.axes) and self.cut:
            local = bool(self.cut - {a for axes in at.dims for a in axes} - {a for a, _ in at.partial})
        for made in self.goal.partial:
            local += made not in at.partial
        total = self.local * local
        if not opened and not other:
            return total
        collectives = len(opened) + (max(full, 1) if other else 0)
        return total + self.collective * collectives + self.per_byte * (self.size - (0 if opened else kept))

    def _of_dim(self, dim: int, axes: tuple[int, ...]) -> tuple[bool, bool, int]:
        """Whether the goal's axes of `dim` do not begin with `axes`, whether some must go, and the length to keep."""
        goal, network = self.goal.dims[dim], self.space.network
        other = axes != goal[: len(axes)]
        # A permutation keeps the number of blocks, so it helps only if the goal can be reached from that number.
        blocks = network.size(axes)
        full = other and all(network.size(goal[:k]) % blocks for k in range(len(goal) + 1))
        return other, full, min(self.space.length(dim, axes), self.space.length(dim, goal))


def _least_peak(space: Space, start: State, goal: State) -> float:
    """The fewest elements that a path can hold at once: the sum of those before and those after a step."""
    best: dict[State, int] = {start: 0}
    heap: list[tuple[int, int, State]] = [(0, 0, start)]
    order = 0
    while heap:
        peak, _, at = heapq.heappop(heap)
        if at == goal:
            return peak
        if peak > best[at]:
            continue
        held = space.elements(at.dims)
        for edge in space.edges(at):
            most = max(peak, held + space.elements(edge.to.dims))
            if most < best.get(edge.to, inf):
                best[edge.to] = most
                order += 1
                heapq.heappush(heap, (most, order, edge.to))
    return inf


def _named_steps(path: list[Edge], src: Layout, dst: Layout, space: Space, itemsize: int) -> tuple[Step, ...]:
    """The steps of a path with complete layouts: axes of one rank are placed as in `dst` from the first step on."""
    sizes = space.network.sizes
    steps: list[Step] = []
    single = [tuple([a for a in axes if sizes[a] == 1]) for axes in dst.dims]
    partial = tuple([p for p in dst.partial if sizes[p[0]] == 1])
    at, held = src, space.elements(_bare(src, [n > 1 for n in sizes]).dims)
    for index, edge in enumerate(path):
        dims = tuple([axes + more for axes, more in zip(edge.to.dims, single)])
        last = index == len(path) - 1
        to = dst if last else Layout.make(src.mesh_ndim, dims, tuple(sorted(edge.to.partial + partial)))
        after = space.elements(edge.to.dims)
        one = itemsize * space.elements(edge.pieces)
        sent = wire_bytes(edge.op, one * edge.times, space.network.size(edge.axes))
        time = edge.fixed + edge.per_byte * one
        steps.append(Step(edge.op, edge.axes, at, to, *edge[2:7], sent, time, itemsize * (held + after)))
        at, held = to, after
    return tuple(steps)


def _readable(size: float) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size:.0f} B"


__all__ = ["Cost", "Plan", "Prefer", "Step", "forget", "plan"]
