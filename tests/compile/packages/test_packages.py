"""Packages: made in one process for ranks that are not there, loaded by these, which then compile nothing."""

import time

import pytest
import torch
from torch._dynamo.utils import counters

import dtensor
import dtensor.compile
from dtensor import PackageError, init_device_mesh
from dtensor.testing import run_ranks

from . import programs


def compiled_here():
    """Numbers of graphs: captured by Dynamo, traced by AOTAutograd, and looked for in its cache by Inductor."""
    inductor = sum([counters["inductor"][name] for name in ("fxgraph_cache_hit", "fxgraph_cache_miss")])
    return counters["stats"]["unique_graphs"], counters["aot_autograd"]["total"], inductor


def loaded(rank, path, run, sizes, *args):
    """Losses of a rank that loads a package, what it took from it, and what it compiled."""
    torch._dynamo.reset()
    counters.clear()
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    package = dtensor.compile.load(path, strict=True) if path else None
    try:
        losses = run(mesh, *args)
    finally:
        if package is not None:
            package.unload()
    return losses, package and (package.taken, package.missed), compiled_here()


def eager(rank, run, sizes):
    """What a rank computes that compiles nothing."""
    with torch.compiler.set_stance("force_eager"):
        return run(init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes)))


@pytest.fixture(scope="module")
def small_package(safe_folder):
    """The package of `programs.small` for two ranks."""
    path = safe_folder / "small.package"
    made = dtensor.compile.package(programs.small, {"tp": 2}, (programs.batch(),), path)
    assert made.left_out == []
    return path


def test_ranks_that_load_compile_nothing(small_package, own_caches):
    given = ({"tp": 2}, programs.batch())
    with_package = run_ranks(loaded, 2, small_package, programs.small, *given)
    without = run_ranks(loaded, 2, None, programs.small, *given)
    for (losses, package, compiled), (expected, *_) in zip(with_package, without):
        assert losses == expected
        assert len(package[0]) == 1
        assert package[1] == []
        assert compiled == (0, 0, 0)
    assert [own[0] for *_, own in without] == [1, 1]


@pytest.mark.nightly
def test_graph_breaks_and_recompilations(safe_folder, own_caches):
    path = safe_folder / "broken.package"

    made = dtensor.compile.package(two_sizes, {"tp": 2}, (), path)
    assert len(made.entries) == 6  # of the model's call, what comes before the break and after it, each for two sizes
    expected = run_ranks(eager, 2, two_sizes, {"tp": 2})
    for (losses, package, compiled), own in zip(run_ranks(loaded, 2, path, two_sizes, {"tp": 2}), expected):
        assert len(package[0]) == 6
        assert compiled == (0, 0, 0)
        assert losses == pytest.approx(own)


def two_sizes(mesh):
    """Train with two sizes of batches, of a model with a graph break."""
    x = programs.batch()
    torch.manual_seed(0)
    model = programs.Broken()
    dtensor.parallel.parallelize_module(
        model, mesh, {"up": dtensor.parallel.ColwiseParallel(), "down": dtensor.parallel.RowwiseParallel()}
    )
    run = torch.compile(model, dynamic=False)
    return [run(part).sum().item() for part in (x, x[:4], x)]


@pytest.mark.nightly
@pytest.mark.parametrize("plan", programs.MESHES)
def test_every_plan(plan, safe_folder, own_caches):
    sizes, path = programs.MESHES[plan], safe_folder / f"{plan}.package"
    dtensor.compile.package(programs.transformer, sizes, (plan, programs.tokens()), path)
    found = run_ranks(loaded, 4, path, programs.transformer, sizes, plan, programs.tokens())
    expected = run_ranks(loaded, 4, None, programs.transformer, sizes, plan, programs.tokens())
    assert [losses for losses, *_ in found] == [losses for losses, *_ in expected]
    assert [compiled for *_, compiled in found] == [(0, 0, 0)] * 4


def test_nothing_to_package(safe_folder):
    with (
        pytest.raises(PackageError, match="compiled nothing"),
        dtensor.compile.packaging(safe_folder / "x"),
    ):
        pass
    assert not (safe_folder / "x").exists()


def test_what_cannot_be_kept_is_named(safe_folder):
    def made(mesh, x):
        return torch.compile(programs.Small(), backend="aot_eager")(x)

    with pytest.raises(PackageError, match="AOTAutograd kept nothing of a graph: another backend"):
        dtensor.compile.package(made, {"tp": 2}, (programs.batch(),), safe_folder / "x")


def timed(rank, path):
    """Seconds of the phases on a rank that loads a package, and those of the wall clock."""
    torch._dynamo.reset()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    package = dtensor.compile.load(path, strict=True)
    began = time.perf_counter()
    with dtensor.compile.statistics(fresh=False) as found:
        programs.small(mesh, programs.batch())
    wall = time.perf_counter() - began
    package.unload()
    return found.seconds, wall


def test_what_is_loaded_is_neither_traced_nor_compiled(small_package):
    for seconds, wall in run_ranks(timed, 2, small_package):
        assert set(seconds) == {"tracing", "loading"}  # "tracing" until the package is asked
        assert 0 <= seconds["tracing"] < 0.1 * seconds["loading"]
        assert 0 < seconds["loading"] < wall
