"""redistribute: bytes to redistribute from any layout to any other, compared with torch DTensor; time to plan.

It runs in one process on a fake process group. Bytes: for every pair of layouts that placements can express, on every
mesh up to 2×2×2, both libraries redistribute the same tensor, and the bytes that this rank sends are counted from the
collectives (in a ring algorithm, `dtensor.prices.links`), with and without groups over several axes for this library.
Time: planning pairs of layouts on a 2×2×2 mesh for the first time, with the transitions from a layout cached or not,
and again. It is compared with the time to start a collective in this process, without any communication.
"""

import gc
import math
import random
import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch.distributed import tensor as theirs
from torch.distributed.device_mesh import init_device_mesh

import dtensor as ours
from dtensor.layout import planner as planning
from dtensor.layout import transitions as steps
from dtensor.layout.layout import Layout
from dtensor.mesh.mesh import facts
from dtensor.testing import CountCollectives, fake_ranks

from ..effort import Effort
from ..record import Record, Setting
from ..timing import quartiles, seconds

TORCH = "torch eager"
SHAPES = ((1024, 4096), (16, 16))
AMOUNTS = {"tiny": (5, 20, SHAPES[1:], 2), "quick": (100, 500, SHAPES, 8), "full": (400, 2000, SHAPES, 8)}
"""(pairs of layouts whose planning is timed, calls of quick functions, shapes whose bytes are counted, meshes)."""

MESHES = ((2,), (1, 2), (2, 1), (2, 2), (1, 2, 2), (2, 1, 2), (2, 2, 1), (2, 2, 2))
REPEATS = 5
"""Measurements of a cold plan, of which the least counts, as other processes may run for milliseconds meanwhile."""


class Sent(CountCollectives):
    """Counts what both libraries send."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if any(issubclass(t, theirs.DTensor) for t in types):
            return NotImplemented
        return super().__torch_dispatch__(func, types, args, kwargs)


def layouts(mesh_ndim: int, ndim: int) -> list[tuple]:
    """Return all placements on `mesh_ndim` axes, each as a dim, "R" or "P"."""
    return list(product([*range(ndim), "R", "P"], repeat=mesh_ndim))


def placed(lib: Any, names: tuple) -> list[Any]:
    return [lib.Shard(p) if isinstance(p, int) else lib.Partial() if p == "P" else lib.Replicate() for p in names]


def bytes_of(lib: Any, mesh: Any, src: tuple, dst: tuple, shape: tuple[int, ...]) -> float:
    """Return the bytes that this rank sends to redistribute a tensor of global `shape`."""
    local = list(shape)
    for n, p in zip(mesh.shape, src):
        if isinstance(p, int):
            local[p] //= n
    stride = torch.empty(shape, device="meta").stride()
    x = lib.DTensor.from_local(torch.empty(local), mesh, placed(lib, src), shape=torch.Size(shape), stride=stride)
    with Sent() as sent:
        x.redistribute(mesh, placed(lib, dst))
    return sent.bytes


def compared(sizes: tuple[int, ...], shape: tuple[int, ...], merged: bool) -> list[tuple[str, float, float]]:
    """Return (text, bytes of this library, bytes of torch) for every pair of layouts."""
    plain, mesh = init_device_mesh("cpu", sizes), init_device_mesh("cpu", sizes)
    if merged:
        ours.prepare(mesh)
    found = []
    for src, dst in product(layouts(len(sizes), len(shape)), repeat=2):
        if src != dst and all(b != "P" or a == "P" for a, b in zip(src, dst)):
            text = " -> ".join([str(Layout.of(tuple(placed(ours, names)), len(shape))) for names in (src, dst)])
            found.append((text, bytes_of(ours, mesh, src, dst, shape), bytes_of(theirs, plain, src, dst, shape)))
    return found


def _bytes(sizes: tuple[int, ...], merged: bool, shape: tuple[int, ...]) -> Iterator[Record]:
    """Yield the bytes of all pairs of layouts of a tensor on a mesh; the spread is that over the pairs."""
    rows = compared(sizes, shape, merged)
    low, middle, high = quartiles([a / b if b else float(a > 0) + 1 for _, a, b in rows if a or b])
    more = [row for row in rows if row[1] > row[2] * (1 + 1e-9)]
    a, b = sum([row[1] for row in rows]), sum([row[2] for row in rows])
    kind, mesh = "merged groups" if merged else "single groups", "×".join(map(str, sizes))
    worst = "".join(f"; {text}: {x:g} against {y:g}" for text, x, y in more[:3])
    note = f"{len(rows)} pairs, median ratio {middle:.2f}, {len(more)} of them more than torch{worst}"
    made = Setting("redistribute", f"float32 {list(shape)}", f"mesh {mesh}", math.prod(sizes)).counted(
        f"bytes, {kind}", "bytes", a, TORCH, b, note=note
    )
    yield replace(made, spread=(low, high))


def all_pairs(ndim: int) -> list[tuple[Layout, Layout]]:
    """Return the pairs of layouts on three axes that users can request: partial only on axes that already are."""
    made = [Layout.of(tuple(placed(ours, names)), ndim) for names in layouts(3, ndim)]
    return [(a, b) for a in made for b in made if a is not b and set(b.partial) <= set(a.partial)]


def _times(pairs: int, calls: int) -> Iterator[Record]:
    mesh = init_device_mesh("cpu", (2, 2, 2))
    ours.prepare(mesh)
    network, group = facts(mesh).network, facts(mesh).groups[(0,)]
    x = torch.empty(64)
    launch = seconds(lambda: torch.ops.dtensor.all_reduce(x, "sum", group), calls)
    for shape in ((1024, 1024), (64, 512, 1024)):
        picked = random.Random(0).sample(all_pairs(len(shape)), pairs)
        for name, before in (
            ("cold, steps unknown", lambda: (planning.forget(), steps.forget())),
            ("cold, steps known", planning.forget),
            ("cached", None),
        ):
            times = sorted(_planned(picked, shape, network, before, calls))
            note = f"99 in 100 below {1e6 * times[int(0.99 * len(times))]:.2f} µs, the longest {1e6 * times[-1]:.2f}"
            at = Setting("redistribute", f"{len(shape)} dimensions", "mesh 2×2×2", 8)
            value = 1e6 * statistics.median(times)
            yield at.counted(f"plan, {name}", "µs", value, "starting a collective", 1e6 * launch, note=note)


def _planned(picked: list, shape: tuple[int, ...], network: Any, before: Callable | None, calls: int) -> list[float]:
    for a, b in picked:
        planning.plan(a, b, shape, network)
    gc.collect()
    gc.disable()
    found = []
    for a, b in picked:
        if before is not None:
            before()
        run = lambda a=a, b=b: planning.plan(a, b, shape, network)  # noqa: E731
        if before is None:
            found.append(seconds(run, calls))
            continue
        once = []
        for _ in range(REPEATS):
            before()
            once.append(seconds(run, 1))
        found.append(min(once))
    gc.enable()
    return found


def run(effort: Effort) -> Iterator[Record]:
    """Yield records of all meshes, and of planning."""
    pairs, calls, shapes, meshes = effort.of(AMOUNTS)
    jobs = [
        "plan",
        *[(sizes, merged, shape) for shape in shapes for sizes in MESHES[:meshes] for merged in (False, True)],
    ]
    with fake_ranks(8):
        for job in effort.progress(jobs, "redistribute"):
            yield from _times(pairs, calls) if isinstance(job, str) else _bytes(*job)


__all__ = ["bytes_of", "compared", "run"]
