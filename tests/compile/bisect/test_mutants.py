"""Bisection of graphs names the pass that was made faulty, the step, and leaves a small graph that runs alone."""

import os
import subprocess
import sys

import pytest
import torch

from dtensor.compile.bisect.folder import write
from dtensor.compile.bisect.graphs import examine
from dtensor.passes import PIPELINE
from tests.compile.bisect.mutants import MUTANTS
from tests.passes.conftest import bench  # noqa: F401

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
    assert finding.step == (0 if mutant.name in ("dead_code",) else finding.step)
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
    environment = {**os.environ, "DTENSOR_LINKS": ""}
    return subprocess.run(
        [sys.executable, "replay.py"], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )


def test_every_mutant_has_a_program_of_its_own():
    assert len({(m.name, m.says) for m in MUTANTS}) == len(MUTANTS) >= 10
    assert {m.name for m in MUTANTS} == {p.name for p in PIPELINE} - {"raise", "regather"}


def test_show(bench, tmp_path):
    import time
    for m in MUTANTS:
        gm = traced(bench, m)
        t = time.time()
        f = found(bench, m, gm)
        print(f"\n=== {m.name}: {m.says} {time.time()-t:.2f}s tries {f and f.small and f.small.tries}")
        print(f)
