"""compile: time to compile a training step, by layers and by ranks; share of the passes; time of a second process.

One process on a fake process group compiles forward and backward of a Transformer, with `backend="dtensor"` and with
torch's DTensor under torch.compile, in interleaved rounds. The time is that from the first call to the end of the
backward, without caches of compiled code. "aot_eager" ends with a graph that runs operator by operator; "inductor"
generates code for it. By ranks, the time of this library is compared with its time on fewer ranks. A second process
uses the caches of the first.

The share of the passes is measured in separate steps, in which each pass is timed, and also the work around them:
verification, counting, facts about meshes, sealing of the agreement. Python's garbage collector is off there, as in
`timeit`: a collection visits the whole heap, and would be charged to the pass in which it happens to run.
"""

import contextlib
import gc
import multiprocessing
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch

from dtensor import init_device_mesh
from dtensor.compile import Statistics, statistics
from dtensor.testing import fake_ranks
from dtensor.torch_private.compiling import without_compile_caches

from .. import models
from ..caches import cold_caches
from ..effort import Effort
from ..models import Sizes, named
from ..plans import applied
from ..record import OURS, Record, Setting
from ..sides import around
from ..timing import compared, quartiles

TORCH = "torch compiled"
PARTS = {
    "verify": "dtensor.passes.runner.verify_graph",
    "count": "dtensor.passes.runner.count",
    "list collectives": "dtensor.passes.collectives",
    "know meshes": "dtensor.compile.backends.run_passes.mesh_groups",
    "take down what is sent": "dtensor.compile.backends.run_passes.sent_counted",
}
"""Work to time besides the passes -> the function that does it."""

WHOLE = [f"dtensor.compile.backends.{m}.{f}" for m in ("backend", "inductor") for f in ("simplify_joint", "optimise")]
SIZES = Sizes(dim=16, seq=16, batch=2, vocab=32)
ALL = "the passes and all around"
SLOWEST = 6
"""Number of passes and parts that get a record of their own, the slowest ones."""

LAYERS = {
    "tiny": [("aot_eager", "tp", 1, 2)],
    "quick": [("aot_eager", "tp", 2, 5), ("aot_eager", "sp", 8, 3)],
    "full": [
        *[("aot_eager", plan, n, 5) for plan in ("tp", "sp") for n in (2, 4, 8, 16, 32, 64)],
        *[("inductor", plan, n, 3) for plan in ("tp", "sp") for n in (2, 8, 32)],
    ],
}
"""(backend, plan, layers, rounds) of each job."""

RANKS = {"tiny": (2, 4), "quick": (2, 4, 4096), "full": (2, 4, 64, 512, 4096)}
RANK_ROUNDS = {"tiny": 1, "quick": 5, "full": 7}
PROCESS_ROUNDS = {"tiny": 0, "quick": 2, "full": 5}


@contextmanager
def uncollected() -> Iterator[None]:
    """Context manager that turns off Python's garbage collector."""
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()


@contextmanager
def timed(names: dict[str, str], seconds: dict[str, float]) -> Iterator[None]:
    """Context manager that adds the time of each call of a function in `names` to `seconds`, under the same key."""

    def wrapped(key: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return run(*args, **kwargs)
            finally:
                seconds[key] += time.perf_counter() - start

        return call

    with ExitStack() as stack:
        for key, name in names.items():
            patcher = patch(name)
            original, _ = patcher.get_original()
            stack.enter_context(patch(name, wrapped(key, original)))
        yield


def step(side: str, inner: str, plan: str, layers: int, mesh: Any) -> float:
    """Return the seconds of the first forward and backward, including compilation."""
    torch.compiler.reset()
    model = named(f"transformer-{layers}", SIZES)
    library = "dtensor" if side == OURS else "torch"
    built = applied(model.dense(), model.family, library, plan, mesh)
    how: dict[str, Any] = {"backend": inner}
    if side == OURS:
        how = {"backend": "dtensor", "options": {"inner": inner, "agreement": False}}

    def loss(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return models.loss(built(inputs), targets)

    run, given = torch.compile(loss, **how), model.batch(0)
    gc.collect()  # so that this round does not pay for garbage of earlier ones
    with around(library, plan)():
        start = time.perf_counter()
        run(*given).backward()
        return time.perf_counter() - start


def our_step(inner: str, plan: str, layers: int, mesh: Any) -> tuple[float, float, dict[str, float], Statistics]:
    """Return the seconds of the step, of all work of this library in it, and of the parts of that; and the statistics.

    The garbage collector is off.
    """
    ours: dict[str, float] = defaultdict(float)
    parts: dict[str, float] = defaultdict(float)
    with statistics() as s, timed({name: name for name in WHOLE}, ours), timed(PARTS, parts), uncollected():
        total = step(OURS, inner, plan, layers, mesh)
    return total, sum(ours.values()), parts, s


def breakdown(parts: dict[str, float], s: Statistics) -> list[tuple[str, float, int]]:
    """Return (name, seconds, rewrites) of each pass and part, the slowest first."""
    seconds = defaultdict(float, parts)
    rewrites: Counter[str] = Counter()
    for p in [p for record in s.records for p in record.passes]:
        seconds[p.name] += p.seconds
        rewrites[p.name] += p.rewrites
    return [(name, t, rewrites[name]) for name, t in sorted(seconds.items(), key=lambda item: -item[1])]


def run(effort: Effort) -> Iterator[Record]:
    """Yield records by layers, by ranks, and of a second process."""
    with fake_ranks(2):  # run once what is imported and registered on first use
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        for side in (OURS, TORCH):
            step(side, "aot_eager", "tp", 1, mesh)
    jobs = [*effort.of(LAYERS), "by ranks", *(["second process"] if effort.of(PROCESS_ROUNDS) else [])]
    for job in effort.progress(jobs, "compile"):
        if job == "by ranks":
            yield from _by_ranks(effort.of(RANKS), effort.of(RANK_ROUNDS))
        elif job == "second process":
            yield from _second_process(effort.of(PROCESS_ROUNDS))
        else:
            yield from _by_layers(*job)


def _by_layers(inner: str, plan: str, layers: int, rounds: int) -> Iterator[Record]:
    times: dict[str, list[float]] = {OURS: [], TORCH: []}
    shares: dict[str, list[float]] = defaultdict(list)
    with fake_ranks(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        for i in range(rounds):
            for side in (OURS, TORCH) if i % 2 else (TORCH, OURS):
                with without_compile_caches():
                    times[side].append(step(side, inner, plan, layers, mesh))
            total, ours, parts, s = our_step(inner, plan, layers, mesh)
            rows = breakdown(parts, s)
            for name, t in [(ALL, ours), *[(name, t) for name, t, _ in rows]]:
                shares[name].append(100 * t / total)
    at = Setting("compile", f"transformer-{layers}", plan, 2)
    yield at.timed(f"{inner}: time", "s", compared(times[OURS], times[TORCH]), TORCH)
    more = {name: f"{n} rewrites" for name, _, n in rows} | {ALL: f"graph breaks: {s.graph_breaks}"}
    found = {name: quartiles(percent) for name, percent in shares.items()}
    for name, (low, middle, high) in sorted(found.items(), key=lambda item: -item[1][1])[: SLOWEST + 1]:
        spread = f"quartiles {low:.1f} to {high:.1f}"
        yield at.alone(f"{inner}: share of {name}", middle, "%", note=f"{spread}; {more[name]}")


def _by_ranks(worlds: tuple[int, ...], rounds: int) -> Iterator[Record]:
    """Yield records of hybrid sharding on meshes (n / 2, 2).

    On 2 ranks there is one replica, and so no sum over replicas. From 4 ranks on, graphs differ only in their groups,
    so the ratio to 4 ranks is the cost of the number of ranks.
    """
    times: dict[int, list[float]] = {n: [] for n in worlds}
    for i in range(rounds):
        for n in reversed(worlds) if i % 2 else worlds:
            with fake_ranks(n), without_compile_caches():
                mesh = init_device_mesh("cpu", (n // 2, 2), mesh_dim_names=("replicate", "shard"))
                times[n].append(step(OURS, "aot_eager", "hsdp", 2, mesh))
    for k, n in enumerate(worlds):
        at = Setting("compile", "transformer-2", "hsdp", n)
        for base in worlds[: min(k, 2)]:
            peer = f"dtensor, {base} ranks"
            yield at.timed("aot_eager: time by ranks", "s", compared(times[n], times[base]), peer)


def first_call(side: str) -> float:
    """Return the seconds of the first step in this process, with Inductor."""
    torch.set_num_threads(1)
    with fake_ranks(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        return step(side, "inductor", "tp", 1, mesh)


def _second_process(rounds: int) -> Iterator[Record]:
    found: dict[str, tuple[list[float], list[float]]] = {OURS: ([], []), TORCH: ([], [])}
    for i in range(rounds):
        for side in (OURS, TORCH) if i % 2 else (TORCH, OURS):
            with cold_caches():
                for times in found[side]:
                    times.append(_in_a_process(side))
    at = Setting("compile", "transformer-1", "tp", 2)
    for index, figure in enumerate(("first process", "second process")):
        yield at.timed(f"inductor: {figure}", "s", compared(found[OURS][index], found[TORCH][index]), TORCH)
    for side, (first, second) in found.items():
        yield at.timed("inductor: second process", "s", compared(second, first), "its first process", side=side)


def _in_a_process(side: str) -> float:
    with contextlib.closing(multiprocessing.get_context("spawn").Pool(1)) as pool:
        found = pool.apply(first_call, (side,))
    pool.join()
    return found


__all__ = ["breakdown", "our_step", "run", "step"]
