"""compile: time to compile a training step, by layers and by ranks; the passes' share; what a second process saves.

One process on a fake process group compiles forward and backward of a Transformer, by `backend="dtensor"` and torch's
DTensor by torch.compile, in rounds that take turns. The clock runs from the first call to the end of the backward,
caches of compiled code passed over. "aot_eager" ends with a graph that runs operator by operator, "inductor" makes
code of it. By ranks it is our own time over that on the fewest; a second process has the caches of the first.

The passes' share is of steps of their own, in which passes are timed one by one, and so is what stands around them:
verifying, counting, what is known of meshes, sealing the agreement. There Python's collector is off, as in `timeit`: a
collection goes over the whole heap, and the pass that it happens to fall into would pay for all.
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
    "verify": "dtensor.passes.pipeline.verify_graph",
    "count": "dtensor.passes.pipeline.count",
    "list collectives": "dtensor.passes.collectives",
    "seal agreement": "dtensor.compile.backends.run_passes.seal",
    "know meshes": "dtensor.compile.backends.run_passes.mesh_groups",
    "take down what is sent": "dtensor.compile.backends.run_passes.finished",
}
"""What is timed beside the passes -> the name under which it is called."""

WHOLE = [f"dtensor.compile.{m}.{f}" for m in ("backend", "inductor") for f in ("simplify_joint", "optimise")]
SIZES = Sizes(dim=16, seq=16, batch=2, vocab=32)
ALL = "the passes and all around"
SLOWEST = 6
"""Passes that get a record of their own."""

LAYERS = {
    "tiny": [("aot_eager", "tp", 1, 2)],
    "quick": [("aot_eager", "tp", 2, 5), ("aot_eager", "sp", 8, 3)],
    "full": [
        *[("aot_eager", plan, n, 5) for plan in ("tp", "sp") for n in (2, 4, 8, 16, 32, 64)],
        *[("inductor", plan, n, 3) for plan in ("tp", "sp") for n in (2, 8, 32)],
    ],
}
"""How, plan, layers, rounds."""

RANKS = {"tiny": (2, 4), "quick": (2, 4, 4096), "full": (2, 4, 64, 512, 4096)}
RANK_ROUNDS = {"tiny": 1, "quick": 5, "full": 7}
PROCESS_ROUNDS = {"tiny": 0, "quick": 2, "full": 5}


@contextmanager
def uncollected() -> Iterator[None]:
    """Without Python's collector."""
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()


@contextmanager
def timed(names: dict[str, str], seconds: dict[str, float]) -> Iterator[None]:
    """Add the time of each call of what `names` names to `seconds`, under its key."""

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
    """Seconds of the first forward and backward, with all that is compiled."""
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
    gc.collect()  # what earlier rounds left is not collected at this one's cost
    with around(library, plan)():
        start = time.perf_counter()
        run(*given).backward()
        return time.perf_counter() - start


def our_step(inner: str, plan: str, layers: int, mesh: Any) -> tuple[float, float, dict[str, float], Statistics]:
    """Seconds of the step, of all our work in it, and of its parts, nothing collected; and the statistics."""
    ours: dict[str, float] = defaultdict(float)
    parts: dict[str, float] = defaultdict(float)
    with statistics() as s, timed({name: name for name in WHOLE}, ours), timed(PARTS, parts), uncollected():
        total = step(OURS, inner, plan, layers, mesh)
    return total, sum(ours.values()), parts, s


def breakdown(parts: dict[str, float], s: Statistics) -> list[tuple[str, float, int]]:
    """(name, seconds, rewrites) of each pass and part, the slowest first."""
    seconds = defaultdict(float, parts)
    rewrites: Counter[str] = Counter()
    for p in [p for record in s.records for p in record.passes]:
        seconds[p.name] += p.seconds
        rewrites[p.name] += p.rewrites
    return [(name, t, rewrites[name]) for name, t in sorted(seconds.items(), key=lambda item: -item[1])]


def run(effort: Effort) -> Iterator[Record]:
    """Records by layers, by ranks, and of a second process."""
    with fake_ranks(2):  # what is imported and registered on first use
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
    """On meshes (n / 2, 2) of hybrid sharding. On 2 ranks there is one replica, and so no sum over replicas; from 4 on
    graphs are alike but for the groups: the ratio to 4 ranks is what the number of ranks costs."""
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
    """Seconds of the first step in this process, by Inductor."""
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
