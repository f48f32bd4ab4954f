"""Plan: the cheapest sequence of redistribution steps from one layout to another.

A shortest path (Dijkstra) over layouts. Each edge is one step on one mesh axis, and changes the innermost cut of a
dimension only, since only that one is contiguous in the local shard:

    all_gather      S(d) -> R       all_to_all   S(d) -> S(e)      reduce_scatter   P -> S(d)
    all_reduce      P -> R          shard        R -> S(d)         partial          R -> P (no communication)

Pure and cached: the executor, the cost search of the rules and the reports all read the same plan.
"""

import heapq
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from math import prod

from .cost import DEFAULT, Link, seconds, wire_bytes
from .errors import PlacementError
from .layout import Layout


@dataclass(frozen=True)
class Step:
    """One redistribution step over mesh axis `axis`.

    Attributes:
        op: a name of `dtensor.collectives.KERNELS`, or "partial" (R -> P, local).
        src, dst: the layouts before and after.
        dim: the dimension cut or put together (for all_to_all: put together); None for all_reduce and partial.
        scatter_dim: for all_to_all the dimension that is cut.
        reduce_op: for the reducing steps and "partial".
    """

    op: str
    axis: int
    src: Layout
    dst: Layout
    dim: int | None = None
    scatter_dim: int | None = None
    reduce_op: str | None = None

    def __str__(self) -> str:
        return f"{self.src} -> {self.dst}: {self.op} over axis {self.axis}"


@dataclass(frozen=True)
class Plan:
    """Steps from `src` to `dst`, with the bytes each rank sends and the estimated seconds."""

    src: Layout
    dst: Layout
    steps: tuple[Step, ...]
    bytes: float
    seconds: float

    def __str__(self) -> str:
        return "\n".join(map(str, self.steps)) or f"{self.src}: nothing to do"


@lru_cache(maxsize=16384)
def plan(
    src: Layout,
    dst: Layout,
    shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    itemsize: int,
    link: Link = DEFAULT,
) -> Plan:
    """The cheapest plan from `src` to `dst`.

    Args:
        src, dst: layouts over the same mesh and number of dimensions.
        shape: global sizes as ints; for symbolic sizes pass their hints, which only choose between plans.
        mesh_shape: sizes of the mesh axes.
        itemsize: bytes per element.
        link: the constants of the cost model.

    Raises:
        PlacementError: there is no path, as from Shard to Partial("product").
    """
    found = _search(src, dst, shape, mesh_shape, itemsize, link)
    if found is None:
        raise PlacementError(f"there is no redistribution from {src} to {dst}; go through Replicate() first")
    total, steps = found
    sent = sum(wire_bytes(s.op, _step_bytes(s, shape, mesh_shape, itemsize), mesh_shape[s.axis]) for s in steps)
    return Plan(src, dst, steps, sent, total)


def _search(src, dst, shape, mesh_shape, itemsize, link) -> tuple[float, tuple[Step, ...]] | None:
    order = count()
    heap: list[tuple[float, int, Layout, tuple[Step, ...]]] = [(0.0, next(order), src, ())]
    done: set[Layout] = set()
    while heap:
        total, _, at, steps = heapq.heappop(heap)
        if at is dst:
            return total, steps
        if at in done:
            continue
        done.add(at)
        for step in _edges(at, src, dst):
            if step.dst not in done:
                size = _step_bytes(step, shape, mesh_shape, itemsize)
                price = seconds(step.op, size, mesh_shape[step.axis], link)
                heapq.heappush(heap, (total + price, next(order), step.dst, (*steps, step)))
    return None


def _edges(at: Layout, src: Layout, dst: Layout):
    """Steps that leave layout `at`. Only dimensions and partials that `src` or `dst` name are worth visiting."""
    dims = [d for d in range(len(at.dims)) if dst.dims[d] or src.dims[d]]
    wanted = dict(dst.partial)
    partial = dict(at.partial)
    for d, axes in enumerate(at.dims):
        if axes and axes != dst.dims[d][: len(axes)]:
            axis = axes[-1]
            yield Step("all_gather", axis, at, at.moved(axis), dim=d)
            for e in dims:
                if e != d:
                    yield Step("all_to_all", axis, at, at.moved(axis, dim=e), dim=d, scatter_dim=e)
    for axis in range(at.mesh_ndim):
        op = partial.get(axis)
        if op is not None and wanted.get(axis) != op:
            yield Step("all_reduce", axis, at, at.moved(axis), reduce_op=op)
            for d in dims:
                yield Step("reduce_scatter", axis, at, at.moved(axis, dim=d), dim=d, reduce_op=op)
        elif op is None and axis not in at.sharded_axes:
            for d in dims:
                yield Step("shard", axis, at, at.moved(axis, dim=d), dim=d)
            if axis in wanted and wanted[axis] != "product":
                yield Step("partial", axis, at, at.moved(axis, reduce_op=wanted[axis]), reduce_op=wanted[axis])


def _step_bytes(step: Step, shape, mesh_shape, itemsize: int) -> float:
    """Bytes of the buffer that prices `step`: the result of all_gather, the input of the others; as if even."""
    at = step.dst if step.op == "all_gather" else step.src
    return itemsize * prod(shape) / prod(mesh_shape[axis] for axis in at.sharded_axes)


__all__ = ["Plan", "Step", "plan"]
