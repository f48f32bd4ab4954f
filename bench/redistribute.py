"""Redistribution: bytes on the wire against torch.distributed.tensor, time to plan: `python bench/redistribute.py`.

One process on a fake process group. Bytes: for every pair of layouts that placements can say, on every mesh up to
2×2×2, both libraries redistribute the same tensor and what this rank sends is counted from the collectives that run
(ring algorithm, `dtensor.cost`), ours with and without groups over several axes. Time: planning pairs of layouts on a
2×2×2 mesh for the first time, in a process that knows the steps out of layouts or not; again; and, for comparison, what
starting a collective costs in this process without any communication.
"""

import gc
import random
import statistics
import time
from collections.abc import Callable
from itertools import product
from typing import Any

import click
import torch
import torch.distributed as dist
from torch.distributed import tensor as theirs
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import dtensor as ours
from dtensor import plan as planning
from dtensor import steps
from dtensor.layout import Layout
from dtensor.mesh import facts
from dtensor.testing import CountCollectives

MESHES = ((2,), (1, 2), (2, 1), (2, 2), (1, 2, 2), (2, 1, 2), (2, 2, 1), (2, 2, 2))
REPEATS = 5
"""A cold plan is timed so often, and the least counts: other processes take the machine away for milliseconds."""


class Sent(CountCollectives):
    """Counts what either library sends."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if any(issubclass(t, theirs.DTensor) for t in types):
            return NotImplemented
        return super().__torch_dispatch__(func, types, args, kwargs)


def layouts(mesh_ndim: int, ndim: int) -> list[tuple]:
    """All placements of `mesh_ndim` axes, as names: a dimension, "R" or "P"."""
    return list(product([*range(ndim), "R", "P"], repeat=mesh_ndim))


def placed(lib: Any, names: tuple) -> list[Any]:
    return [lib.Shard(p) if isinstance(p, int) else lib.Partial() if p == "P" else lib.Replicate() for p in names]


def bytes_of(lib: Any, mesh: Any, src: tuple, dst: tuple, shape: tuple[int, ...]) -> float:
    """Bytes this rank sends to redistribute a tensor of `shape`."""
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
    """For every pair of layouts: its text, our bytes, torch's bytes."""
    plain, mesh = init_device_mesh("cpu", sizes), init_device_mesh("cpu", sizes)
    if merged:
        ours.prepare(mesh)
    found = []
    for src, dst in product(layouts(len(sizes), len(shape)), repeat=2):
        if src != dst and all(b != "P" or a == "P" for a, b in zip(src, dst)):
            text = " -> ".join([str(Layout.of(tuple(placed(ours, names)), len(shape))) for names in (src, dst)])
            found.append((text, bytes_of(ours, mesh, src, dst, shape), bytes_of(theirs, plain, src, dst, shape)))
    return found


def print_bytes(shape: tuple[int, ...]) -> None:
    size = torch.empty(shape, device="meta").nbytes
    click.echo(f"\nbytes each rank sends, float32 tensor {list(shape)} ({size / 1e6:g} MB); ratio dtensor / torch")
    click.echo(
        f"{'mesh':10}{'groups':>9}{'pairs':>7}{'dtensor':>12}{'torch':>12}{'quartiles':>22}{'max':>6}{'more':>6}"
    )
    for sizes in MESHES:
        for merged in (False, True):
            rows = compared(sizes, shape, merged)
            ratios = [a / b if b else float(a > 0) + 1 for _, a, b in rows if a or b]
            low, middle, high = statistics.quantiles(ratios, n=4)
            more = [row for row in rows if row[1] > row[2] * (1 + 1e-9)]
            a, b = sum([row[1] for row in rows]) / 1e6, sum([row[2] for row in rows]) / 1e6
            spread = f"{low:.2f} {middle:.2f} {high:.2f}"
            kind = "merged" if merged else "single"
            name = "×".join(map(str, sizes))
            click.echo(
                f"{name:10}{kind:>9}{len(rows):7}{a:9.1f} MB{b:9.1f} MB{spread:>22}{max(ratios):6.2f}{len(more):6}"
            )
            for text, a, b in more[:3]:
                click.echo(f"    {text}: {a:g} against {b:g}")


def microseconds(run: Callable[[], object], calls: int) -> float:
    """Mean time of a call."""
    start = time.perf_counter()
    for _ in range(calls):
        run()
    return (time.perf_counter() - start) / calls * 1e6


def all_pairs(ndim: int) -> list[tuple[Layout, Layout]]:
    """Pairs of layouts on three axes that a user can ask for: partial only where it was."""
    made = [Layout.of(tuple(placed(ours, names)), ndim) for names in layouts(3, ndim)]
    return [(a, b) for a in made for b in made if a is not b and set(b.partial) <= set(a.partial)]


def print_times(pairs: int, calls: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2, 2))
    ours.prepare(mesh)
    network = facts(mesh).network
    group = facts(mesh).groups[(0,)]
    x = torch.empty(64)
    launch = microseconds(lambda: torch.ops.dtensor.all_reduce(x, "sum", group), calls)
    click.echo(f"\ntime to plan on a 2×2×2 mesh; starting a collective takes {launch:.1f} µs without communication")
    click.echo(f"{'':34}{'median':>12}{'99 in 100':>12}{'max':>12}{'median / start':>16}")
    for shape in ((1024, 1024), (64, 512, 1024)):
        picked = random.Random(0).sample(all_pairs(len(shape)), pairs)
        for name, before in (
            ("cold, steps unknown", lambda: (planning.forget(), steps.forget())),
            ("cold, steps known", planning.forget),
            ("cached", None),
        ):
            times = sorted(_planned(picked, shape, network, before, calls))
            row = statistics.median(times), times[int(0.99 * len(times))], times[-1]
            head = f"{len(shape)} dimensions, {name}"
            click.echo(f"{head:34}" + "".join(f"{t:9.2f} µs" for t in row) + f"{row[0] / launch:16.3f}")


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
            found.append(microseconds(run, calls))
            continue
        once = []
        for _ in range(REPEATS):
            before()
            once.append(microseconds(run, 1))
        found.append(min(once))
    gc.enable()
    return found


@click.command(help=__doc__)
@click.option("--pairs", default=400, show_default=True, help="Pairs of layouts whose planning is timed.")
@click.option("--calls", default=2000, show_default=True, help="Calls of what is quick.")
def main(pairs: int, calls: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    click.echo(f"torch {torch.__version__}")
    print_times(pairs, calls)
    for shape in ((1024, 4096), (16, 16)):
        print_bytes(shape)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
