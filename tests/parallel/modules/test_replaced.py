"""Optimizers made before a model is sharded: their parameters follow, or they say what to do instead."""

import re

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from dtensor import (
    DTensor,
    Shard,
    ShardingError,
    distribute_model,
    distribute_module,
    distribute_tensor,
    init_device_mesh,
)
from dtensor.interop import convert_module
from dtensor.parallel import ColwiseParallel, RowwiseParallel, fully_shard, parallelize_module
from dtensor.testing import with_ranks

ROUNDS = 3


def split(name, module, mesh):
    """A function of a user, which replaces a parameter by hand."""
    if name == "2":
        module.register_parameter("weight", nn.Parameter(distribute_tensor(module.weight, mesh, [Shard(1)])))


DOORS = {
    "styles": lambda m, mesh: parallelize_module(m, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()}),
    "fsdp": fully_shard,
    "both": lambda m, mesh: distribute_model(fully_shard(m, mesh["dp"]), mesh["tp"], {"*.weight": {"tp": Shard(0)}}),
    "model": lambda m, mesh: distribute_model(m, mesh, {"0.weight": {"tp": Shard(0)}}, outputs={}),
    "module": lambda m, mesh: distribute_module(
        m,
        mesh,
        split,
        input_fn=lambda _, inputs, mesh: tuple(DTensor.from_local(x, mesh) for x in inputs),
        output_fn=lambda _, out, mesh: out.full_tensor(),
    ),
    "fsdp2": lambda m, mesh: convert_module(m),
}

OPTIMIZERS = {
    "SGD": lambda ps: torch.optim.SGD(ps, lr=0.1, foreach=True),
    "groups": lambda ps: torch.optim.AdamW([{"params": ps[:2]}, {"params": ps[2:], "lr": 0.01}], lr=0.02),
    "LBFGS": lambda ps: torch.optim.LBFGS(ps, lr=0.1, max_iter=2),
}


def made():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def losses(model, optimizer, step=None):
    x, found = torch.ones(2, 4), []
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)

    def closure():
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        found.append(loss.item())
        return loss

    for _ in range(ROUNDS):
        (step or optimizer.step)(closure)
        scheduler.step()
    return found


def trained(door, kind, mesh):
    model = made()
    if door == "fsdp2":
        torch_fully_shard(model, mesh=mesh)
    optimizer = OPTIMIZERS[kind](list(model.parameters()))
    return losses(DOORS[door](model, mesh) if door else model, optimizer)


@with_ranks(2)
def test_optimizers_follow(rank):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    whole = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    for kind in OPTIMIZERS:
        expected = trained(None, kind, mesh)
        assert expected[0] > expected[-1]
        for door in DOORS if kind == "groups" else ("styles", "fsdp"):
            found = trained(door, kind, whole if door == "both" else mesh)
            assert found == pytest.approx(expected, rel=1e-4), (door, kind)


@with_ranks(2)
def test_a_compiled_step_follows(rank):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    expected = trained(None, "groups", mesh)
    model = made()
    optimizer = OPTIMIZERS["groups"](list(model.parameters()))
    fully_shard(model, mesh)
    step = torch.compile(optimizer.step, backend="dtensor", options={"inner": "aot_eager"})

    def stepped(closure):
        closure()
        step()

    assert losses(model, optimizer, stepped) == pytest.approx(expected, rel=1e-4)


@with_ranks(2)
def test_what_cannot_follow(rank):
    mesh, x = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)), torch.ones(2, 4)

    def refused(before, after):
        model = made()
        optimizer = torch.optim.Adam(model.parameters())
        before(model, optimizer)
        fully_shard(model, mesh)
        after(model, optimizer)
        model(x).sum().backward()
        with pytest.raises(ShardingError, match="make the optimizer after sharding") as caught:
            optimizer.step()
        return str(caught.value)

    def step(model, optimizer):
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def nothing(model, optimizer):
        pass

    assert re.match(r"this Adam has state \(step, exp_avg, exp_avg_sq\) for a parameter", refused(step, nothing))
    assert "with the gradient of a parameter" in refused(lambda m, _: m(x).sum().backward(), nothing)
    # The old parameter is in one group, and the new one in another.
    added = refused(nothing, lambda m, o: o.add_param_group({"params": list(m.parameters())}))
    assert "and the new one too" in added
