"""Fake worlds, and benches on which tests trace and rewrite graphs: four ranks as dp=2, tp=2, and a cube of eight."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import combinations
from unittest.mock import patch

import pytest
import torch
from torch import fx
from torch.distributed.device_mesh import init_device_mesh

from dtensor.comm.start_collectives import FUNCTIONAL, OVER_GLOO
from dtensor.mesh.mesh import facts, prepare
from dtensor.mesh.provenance import OPERATOR
from dtensor.passes import MeshGroups, Simulation, mesh_groups, text, verify
from dtensor.passes.graph import groups
from dtensor.passes.graph.copying import copy_graph
from dtensor.prices.links import Link, Network
from dtensor.testing import fake_ranks
from dtensor.torch_private.core import make_fx


@dataclass
class Bench:
    """Group names, and what the tests do with graphs."""

    dp: str
    tp: str
    world: str
    simulation: Simulation
    meshes: tuple[MeshGroups, ...]
    labels: dict[str, str] = field(default_factory=dict)

    def trace(
        self, f: Callable, *shapes, symbolic: bool = False, dtype=torch.float32, by_hand: bool = False
    ) -> fx.GraphModule:
        """The graph of `f` on tensors of `shapes` (a tensor stands for itself), as if traced from DTensors, whose
        numbers are the same on all ranks; with `by_hand` nothing tells so."""
        args = [s if isinstance(s, torch.Tensor) else torch.zeros(s, dtype=dtype) for s in shapes]
        gm = make_fx(f, tracing_mode="symbolic" if symbolic else "fake")(*args)
        for node in gm.graph.nodes:
            if node.op == "call_function" and not by_hand:
                node.meta[OPERATOR] = True
        return gm

    def text(self, gm: fx.GraphModule | fx.Graph) -> str:
        return text(gm, {self.dp: "dp", self.tp: "tp", self.world: "world", **self.labels})

    def apply(self, p, gm: fx.GraphModule) -> int:
        """Run the pass on `gm`; check the graph, what it computes, and that a second run finds nothing."""
        before = copy_graph(gm.graph)
        rewrites = p(gm.graph)
        verify(gm, p.name)
        self.simulation.check(before, gm.graph, exact=p.exactness == "bitwise")
        assert p(gm.graph) == 0, f"{p.name} is not idempotent"
        gm.recompile()
        return rewrites

    def keeps(self, p, gm: fx.GraphModule) -> bool:
        """Whether the pass finds nothing to do in `gm`."""
        before = self.text(gm)
        return p(gm.graph) == 0 and self.text(gm) == before

    def over(self, label: str) -> str:
        """Name of the group that prints as `label`."""
        return next(name for name, found in self.labels.items() if found == label)

    def exchanging(self, yes: bool = True):
        """Context in which collectives start as over gloo, where parts are exchanged to be reduced, or as elsewhere."""
        return patch("dtensor.comm.collectives.starts", lambda group, device: OVER_GLOO if yes else FUNCTIONAL)

    def links(self, *links: Link):
        """Context in which the passes take the axes of the mesh to have these links."""
        (mesh,) = self.meshes
        return groups.known([MeshGroups(mesh.names, Network.of(mesh.network.sizes, links, mesh.network.merged))])


def known_groups(mesh) -> MeshGroups:
    found = facts(mesh)
    return MeshGroups(tuple(found.groups.items()), found.network)


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    with fake_ranks(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        prepare(mesh)
        meshes, names = (known_groups(mesh),), facts(mesh).groups
        partitions = mesh_groups(mesh, names)
        with groups.known(meshes):
            yield Bench(names[0,], names[1,], names[0, 1], Simulation(4, partitions, seed=7), meshes)


@pytest.fixture(scope="module")
def cube() -> Iterator[Bench]:
    """Eight ranks with axes a, b, c of two; there is a group over each set of them, called by its letters."""
    with fake_ranks(8):
        mesh = init_device_mesh("cpu", (2, 2, 2))
        prepare(mesh)
        meshes, names = (known_groups(mesh),), facts(mesh).groups
        sets = [axes for k in (1, 2, 3) for axes in combinations(range(3), k)]
        labels = {names[axes]: "".join(["abc"[a] for a in axes]) for axes in sets}
        simulation = Simulation(8, mesh_groups(mesh, names), seed=7)
        with groups.known(meshes):
            yield Bench(names[0,], names[1,], names[0, 1, 2], simulation, meshes, labels)
