"""A fake world of four ranks as a mesh dp=2, tp=2, and a bench on which the tests trace and rewrite graphs."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import fx
from torch.distributed.device_mesh import init_device_mesh

from dtensor._torch import make_fx
from dtensor.passes import Simulation, mesh_groups, text, verify
from dtensor.passes.pipeline import copy_graph
from dtensor.testing import fake_ranks

WORLD = 4


@dataclass
class Bench:
    """Group names, and what the tests do with graphs."""

    dp: str
    tp: str
    world: str
    simulation: Simulation

    def trace(self, f: Callable, *shapes, symbolic: bool = False, dtype=torch.float32) -> fx.GraphModule:
        """The graph of `f` on tensors of `shapes` (a tensor stands for itself)."""
        args = [s if isinstance(s, torch.Tensor) else torch.zeros(s, dtype=dtype) for s in shapes]
        return make_fx(f, tracing_mode="symbolic" if symbolic else "fake")(*args)

    def text(self, gm: fx.GraphModule | fx.Graph) -> str:
        return text(gm, {self.dp: "dp", self.tp: "tp", self.world: "world"})

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


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    with fake_ranks(WORLD):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        dp, tp = mesh.get_group(0).group_name, mesh.get_group(1).group_name
        world = init_device_mesh("cpu", (WORLD,)).get_group().group_name
        groups = {**mesh_groups(mesh), world: (tuple(range(WORLD)),)}
        yield Bench(dp, tp, world, Simulation(WORLD, groups, seed=7))
