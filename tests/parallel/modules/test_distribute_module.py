"""`distribute_tensor` and `distribute_module`: values, parameters, hooks, and what they refuse."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

from dtensor import (
    DTensor,
    MeshError,
    PlacementError,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
    init_device_mesh,
)
from dtensor.testing import with_threads
from dtensor.testing.models import Tied


@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(-1)])
@with_threads(3)
def test_values_and_parameters(rank, placement):
    mesh = init_device_mesh("cpu", (3,))
    dense = torch.arange(20.0).view(5, 4)
    x = distribute_tensor(dense, mesh, [placement])
    assert torch.equal(x.full_tensor(), dense)
    assert x.is_leaf
    assert not x.requires_grad
    p = distribute_tensor(nn.Parameter(dense), mesh, [placement])
    assert isinstance(p, nn.Parameter)
    assert p.requires_grad
    frozen = distribute_tensor(nn.Parameter(dense, requires_grad=False), mesh, [placement])
    assert isinstance(frozen, nn.Parameter)
    assert not frozen.requires_grad
    assert distribute_tensor(torch.ones(2, requires_grad=True), mesh).requires_grad
    again = distribute_tensor(x, mesh, [placement])
    assert again is x
    strided = distribute_tensor(dense.t(), mesh, [Shard(0)])
    assert torch.equal(strided.full_tensor(), dense.t())


@with_threads(4)
def test_source_of_the_data(rank):
    mesh = init_device_mesh("cpu", (2, 2))
    mine = torch.full((4,), float(rank))
    assert distribute_tensor(mine, mesh).full_tensor().tolist() == [0.0] * 4
    assert distribute_tensor(mine, mesh, src_data_rank=1).full_tensor().tolist() == [3.0] * 4
    own = distribute_tensor(mine, mesh, [Shard(0), Shard(0)], src_data_rank=None)
    assert own.to_local().tolist() == [float(rank)]
    assert mine.tolist() == [float(rank)] * 4


@with_threads(2)
def test_what_distribute_tensor_refuses(rank):
    mesh = init_device_mesh("cpu", (2,))
    with pytest.raises(ValueError, match=r"takes a leaf tensor.*distribute_tensor\(x.detach\(\)"):
        distribute_tensor(torch.ones(2, requires_grad=True) * 2, mesh)
    with pytest.raises(PlacementError, match="the mesh has 1 axis but 2 placements were given"):
        distribute_tensor(torch.ones(2), mesh, [Shard(0), Replicate()])
    with pytest.raises(PlacementError, match="one placement per mesh axis; got Shard"):
        distribute_tensor(torch.ones(2), mesh, Shard(0))
    x = distribute_tensor(torch.ones(2), mesh, [Shard(0)])
    with pytest.raises(PlacementError, match=r"already distributed as \[Shard\(dim=0\)\]; write x.redistribute"):
        distribute_tensor(x, mesh, [Replicate()])
    with pytest.raises(MeshError, match="already lives on"):
        distribute_tensor(x, init_device_mesh("cpu", (2, 1)), [Shard(0), Replicate()])


def test_xla_needs_its_package():
    mesh = SimpleNamespace(device_type="xla", ndim=1)
    with pytest.raises(ImportError, match="needs torch_xla; write: pip install torch_xla"):
        distribute_tensor(torch.ones(2), mesh, [Shard(0)])
    with pytest.raises(ImportError, match="needs torch_xla; write: pip install torch_xla"):
        distribute_module(nn.Linear(2, 2), mesh)


def test_on_xla_its_package_shards(monkeypatch):
    """A stand-in for the package, which gives back what it was given."""
    spmd = SimpleNamespace(xla_distribute_tensor=lambda *a: a, xla_distribute_module=lambda *a: a)
    monkeypatch.setitem(sys.modules, "torch_xla", ModuleType("torch_xla"))
    monkeypatch.setitem(sys.modules, "torch_xla.distributed", SimpleNamespace(spmd=spmd))
    mesh, x, module = SimpleNamespace(device_type="xla", ndim=1), torch.ones(2), nn.Linear(2, 2)
    assert distribute_tensor(x, mesh, [Shard(0)]) == (x, mesh, [Shard(0)])
    assert distribute_module(module, mesh, input_fn=print) == (module, mesh, None, print, None)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.second = nn.Linear(6, 2)
        self.register_buffer("scale", torch.tensor([2.0, 3.0]))
        self.register_buffer("absent", None)

    def forward(self, x):
        return self.second(self.first(x).relu()) * self.scale


def columns(name, module, mesh):
    if name == "first":
        for key, p in module.named_parameters(recurse=False):
            module.register_parameter(key, nn.Parameter(distribute_tensor(p, mesh, [Shard(0)])))


def fixed() -> Net:
    model = Net()
    for i, p in enumerate(model.parameters()):
        p.data = torch.linspace(-1, i + 1, p.numel()).view(p.shape)
    return model


@with_threads(2)
def test_parameters_buffers_and_hooks(rank):
    mesh = init_device_mesh("cpu", (2,))
    x = torch.arange(12.0).view(3, 4)
    expected = fixed()(x)
    seen = []

    def take(module, inputs, device_mesh):
        seen.append((type(module).__name__, device_mesh is mesh))
        return tuple(DTensor.from_local(t, device_mesh) for t in inputs)

    def give(module, outputs, device_mesh):
        seen.append((type(module).__name__, device_mesh is mesh))
        return outputs.full_tensor()

    model = fixed()
    assert distribute_module(model, mesh, columns, take, give) is model
    assert model.first.weight.placements == (Shard(0),)
    assert model.second.weight.placements == (Replicate(),)
    assert all(isinstance(p, nn.Parameter) and isinstance(p, DTensor) for p in model.parameters())
    assert isinstance(model.scale, DTensor)
    assert model.absent is None
    out = model(x)
    assert type(out) is torch.Tensor
    torch.testing.assert_close(out, expected)
    assert seen == [("Net", True)] * 2


@with_threads(2)
def test_without_a_partition_all_is_replicated(rank):
    mesh = init_device_mesh("cpu", (2,))
    model = distribute_module(fixed(), mesh)
    assert {p.placements for p in model.parameters()} == {(Replicate(),)}
    with pytest.raises(RuntimeError, match="already called on this module; call it once"):
        distribute_module(model, mesh)


@with_threads(1)
def test_hooks_of_two_arguments_warn(rank):
    mesh = init_device_mesh("cpu", (1,))
    x = torch.arange(12.0).view(3, 4)
    with pytest.warns(
        FutureWarning, match=r"input_fn with two arguments is deprecated; write input_fn\(module, inputs"
    ):
        model = distribute_module(fixed(), mesh, None, lambda inputs, m: (DTensor.from_local(inputs[0], m),))
    torch.testing.assert_close(model(x).full_tensor(), fixed()(x))
    with pytest.warns(FutureWarning, match="output_fn with two arguments"):
        model = distribute_module(fixed(), mesh, None, None, lambda outputs, m: outputs.full_tensor())
    torch.testing.assert_close(model(DTensor.from_local(x, mesh)), fixed()(x))
    with pytest.raises(TypeError, match=r"input_fn takes \(module, inputs, device_mesh\), the one given takes 1"):
        distribute_module(fixed(), mesh, None, lambda inputs: inputs)


@with_threads(2)
def test_a_parameter_that_modules_share_stays_one(rank):
    mesh = init_device_mesh("cpu", (2,))

    def cut(placements):
        def partition(name, module, mesh):
            if name in placements:
                whole = distribute_tensor(module.weight.detach(), mesh, [placements[name]])
                module.register_parameter("weight", nn.Parameter(whole))

        return partition

    for placements in ({"table": Shard(0)}, {"head": Shard(0)}, {"table": Shard(0), "head": Shard(0)}):
        model = distribute_module(Tied(), mesh, cut(placements))
        assert model.head.weight is model.table.weight
        assert model.table.weight.placements == (Shard(0),)
    with pytest.raises(PlacementError, match=r"shared by several modules.*\[Shard\(dim=0\)\].*\[Shard\(dim=1\)\]"):
        distribute_module(Tied(), mesh, cut({"table": Shard(0), "head": Shard(1)}))
