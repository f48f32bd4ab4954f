"""Bisection on eight ranks of three axes."""

import torch

from dtensor.comm.collectives import ops
from dtensor.compile.bisect.graphs import examine
from tests.compile.bisect.mutants import MUTANTS, gather_twice


def test_eight_ranks(cube):
    mutant = next(m for m in MUTANTS if m.name == "merge_axes")
    f = gather_twice(cube.over("b"), cube.over("a"), cube.world)
    gm = cube.trace(lambda x: torch.sin(f(x)), (4, 4))
    assert examine(gm.graph, cube.simulation, meshes=cube.meshes) is None
    few = [mutant.faulty()]
    finding = examine(gm.graph, cube.simulation, chosen=few, meshes=cube.meshes, labels=cube.labels)
    assert finding is None, "the group of both axes does not cover the mesh, so nothing is merged"
    g = cube.over("bc"), cube.over("a")
    gm = cube.trace(lambda x: ops.all_gather(ops.all_gather(x, 0, 8, g[1]), 0, 32, g[0]), (4, 4))
    finding = examine(gm.graph, cube.simulation, chosen=few, meshes=cube.meshes, labels=cube.labels)
    assert finding is not None
    assert finding.name == mutant.name
    assert "all_gather(%x_1, 0, 32, abc)" in str(finding)
