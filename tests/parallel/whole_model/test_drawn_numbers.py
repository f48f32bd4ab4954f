"""Plain random numbers in the forward of a model that `distribute_model` sharded: stochastic depth, dropout of
positions. They are one device's where all ranks have one seed, and where they do not, the ranks raise."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from dtensor import AgreementError, Shard, distribute_model, init_device_mesh
from dtensor.testing import with_ranks

PLAN = {"a.weight": {"tp": Shard(0)}, "b.weight": {"tp": Shard(1)}}


class Dropped(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        kept = torch.rand(x.shape[0], 1) < 0.5
        positions = F.dropout(torch.arange(8.0) / 8 + x.detach()[0], 0.5)
        return self.b(self.a(x) * kept / 0.5) + positions @ self.b.weight


def seeded(run, x, seed):
    torch.manual_seed(seed)
    return run(x)


@with_ranks(2)
def test_those_of_one_device(rank):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    plain, x = Dropped(), torch.randn(6, 8)
    model = distribute_model(copy.deepcopy(plain), mesh, PLAN, outputs={})
    compiled = torch.compile(model, backend="dtensor", fullgraph=True, options={"inner": "aot_eager"})
    for run in (model, compiled):
        for seed in (1, 2):
            torch.testing.assert_close(seeded(run, x, seed), seeded(plain, x, seed))
            plain.zero_grad(), model.zero_grad()
            seeded(run, x, seed).square().sum().backward(), seeded(plain, x, seed).square().sum().backward()
            for p, q in zip(model.parameters(), plain.parameters()):
                torch.testing.assert_close(p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad, q.grad)


@pytest.mark.parametrize("options", [{"inner": "aot_eager"}, pytest.param({}, marks=pytest.mark.nightly)])
@with_ranks(2, fresh=True)
def test_of_seeds_that_differ(rank, options):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    x, model = torch.randn(6, 8), distribute_model(Dropped(), mesh, PLAN, outputs={})
    run = torch.compile(model, backend="dtensor", options=options)
    with pytest.raises(AgreementError, match=r"of the state of the generator.*torch.manual_seed\(0\)"):
        [seeded(run, x, rank) for _ in range(3)]


@with_ranks(2)
def test_a_part_that_is_dropped_out_is_no_global_value(rank):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))

    class Part(Dropped):
        def forward(self, x):
            return self.b(x) + F.dropout(self.a.weight.to_local()[0], 0.5) @ self.b.weight

    model = distribute_model(Part(), mesh, PLAN, outputs={})
    with pytest.raises(Exception, match=r"that holds this rank's part of a DTensor|random numbers"):
        torch.compile(model, backend="dtensor", options={"inner": "aot_eager"})(torch.ones(6, 8))
