"""Bisection of graphs names the pass that was made faulty, the step, and leaves a small graph that runs alone."""

import os
import subprocess
from pathlib import Path

import pytest
import torch

from dtensor.comm.collectives import ops
from dtensor.compile.bisect.folder import write
from dtensor.compile.bisect.graphs import examine
from dtensor.passes import PIPELINE
from tests.compile.bisect.mutants import MUTANTS, Mutant
from tests.interpreter import python

ROOT = Path(__file__).parents[3]
NAMES = [f"{m.name}: {m.says}" for m in MUTANTS]


def surrounded(f, depth):
    """`f` with computations before and after it, as there are in a model."""

    def g(*xs):
        xs = list(xs)
        for k in range(depth):
            xs = [torch.sin(x) * (k + 2) for x in xs]
        out = f(*xs)
        outs = list(out) if isinstance(out, tuple) else [out]
        for _ in range(depth):
            outs = [x + torch.sin(x) / 2 for x in outs]
        return (*outs, sum([x.sum() for x in xs]))

    return g


def traced(bench, mutant, depth=6):
    f = mutant.program(bench.tp, bench.dp, bench.world)
    return bench.trace(surrounded(f, depth), *mutant.shapes)


def labelled(bench):
    return {bench.dp: "dp", bench.tp: "tp", bench.world: "world"}


def found(bench, mutant, gm, **options):
    before = bench.text(gm)
    finding = examine(
        gm.graph,
        bench.simulation,
        chosen=mutant.pipeline(),
        meshes=bench.meshes,
        labels=labelled(bench),
        **options,
    )
    assert bench.text(gm) == before
    return finding


@pytest.mark.parametrize("mutant", MUTANTS, ids=NAMES)
def test_names_the_pass(bench, mutant, tmp_path):
    gm = traced(bench, mutant)
    finding = found(bench, mutant, gm)
    assert finding is not None
    assert finding.name == mutant.name, str(finding)
    assert (finding.step > 0) == (mutant.name != "dead_code"), "what dead_code removes is no step"
    assert mutant.step in finding.node, str(finding)
    assert finding.small is not None, str(finding)
    assert len(finding.small.before) <= 8, str(finding)
    assert len(finding.small.before) * 3 < len(gm.graph.nodes)
    folder = write(finding, tmp_path / "found")
    assert {p.name for p in folder.iterdir()} >= {"README.md", "graph.py", "replay.py", "report.txt", "before.txt"}
    assert f"The pass '{mutant.name}' is to blame" in (folder / "report.txt").read_text()


@pytest.mark.parametrize("mutant", MUTANTS, ids=NAMES)
def test_the_right_passes_are_not_blamed(bench, mutant):
    gm = traced(bench, mutant)
    assert examine(gm.graph, bench.simulation, meshes=bench.meshes) is None


def alone(folder):
    environment = {**os.environ, "DTENSOR_LINKS": "", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [python(), "replay.py"], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )


@pytest.mark.parametrize(
    "name", ["add_before_reduce", "fuse_reduce_scatter", pytest.param("bucket", marks=pytest.mark.nightly)]
)
def test_what_is_left_runs_alone(bench, name, tmp_path):
    """It shows what was found, and that the pass that is installed does right."""
    mutant = next(m for m in MUTANTS if m.name == name)
    folder = write(found(bench, mutant, traced(bench, mutant)), tmp_path)
    done = alone(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    said = "is not valid" if name == "fuse_reduce_scatter" else "As it was found: other values of output"
    assert said in done.stdout + (folder / "README.md").read_text()
    assert done.stdout.endswith("The pass as it is here: the same values.\n")


def test_what_is_left_shows_a_pass_that_still_goes_wrong(bench, tmp_path):
    """Here the graph is one on which nothing was found before, and its pass is made faulty when it runs."""
    mutant = next(m for m in MUTANTS if m.name == "fuse_all_reduce")
    folder = write(found(bench, mutant, traced(bench, mutant)), tmp_path)
    faulty = (
        "from dtensor.passes import FuseAllReduce\n"
        "from tests.compile.bisect.mutants import MUTANTS\n"
        "[p] = [m.faulty() for m in MUTANTS if m.name == 'fuse_all_reduce']\n"
        "FuseAllReduce.__call__ = type(p).__call__\n"
    )
    (folder / "replay.py").write_text(faulty + (folder / "replay.py").read_text())
    done = alone(folder)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "The pass as it is here: other values of output 0" in done.stdout


def test_finds_the_step_among_right_ones(bench):
    """The pass goes wrong on one shape only."""
    mutant = Mutant(
        *("add_before_reduce", "adds one term to itself where there are six rows"),
        "total = ir.insert(node, node.target, (a.x, b.x), node.kwargs, like=node)",
        "six = ir.value(a.x).shape[0] == 6\n    "
        "total = ir.insert(node, node.target, (a.x, (a if six else b).x), node.kwargs, like=node)",
        *(many_sums, ((4, 4), (4, 4), (6, 4), (6, 4)), "add"),
    )
    p = mutant.faulty()
    gm = bench.trace(mutant.program(bench.tp, bench.dp, bench.world), *mutant.shapes)
    chosen = [p if q.name == p.name else q for q in PIPELINE]
    finding = examine(gm.graph, bench.simulation, chosen=chosen, meshes=bench.meshes)
    assert finding is not None
    assert (finding.step, finding.steps) == (5, 7), str(finding)
    sums = [n.name for n in gm.graph.nodes if n.target is torch.ops.aten.add.Tensor]
    assert finding.node == sums[4]


def many_sums(tp, dp, world):
    def summed(x, y):
        return torch.sin(ops.all_reduce(x, "sum", tp) + ops.all_reduce(y, "sum", tp))

    def f(x, y, z, w):
        return [
            *[summed(x * k, y * k) for k in range(2, 6)],
            summed(z, w),
            *[summed(x * k, y * k) for k in range(6, 8)],
        ]

    return f


def test_every_mutant_has_a_program_of_its_own():
    assert len({(m.name, m.says) for m in MUTANTS}) == len(MUTANTS) >= 10
    assert {m.name for m in MUTANTS} <= {p.name for p in PIPELINE}
