"""Tensors and models that go over from torch.distributed.tensor and back, without a copy; gradients flow."""

import pytest
import torch
import torch.distributed.tensor as theirs
from torch import nn
from torch.distributed.tensor import parallel as their_parallel

import dtensor
from dtensor import DTensor, Partial, PlacementError, Replicate, Shard, distribute_tensor, init_device_mesh
from dtensor.interop import convert_module, from_torch, to_torch
from dtensor.layout.layout import Layout
from dtensor.testing import MLPModule, with_ranks, with_threads

X = torch.arange(28.0).view(7, 4)

OURS = [
    [Shard(0), Shard(1)],
    [Shard(0), Shard(0)],
    [Replicate(), Shard(1)],
    [Shard(1), Replicate()],
]
THEIRS = {Shard: lambda p: theirs.Shard(p.dim), Replicate: lambda p: theirs.Replicate()}


@with_threads(4)
def test_tensors_share_memory_and_gradients_flow_both_ways(rank):
    mesh = init_device_mesh("cpu", (2, 2))
    for placements in OURS:
        same = [THEIRS[type(p)](p) for p in placements]
        t = theirs.distribute_tensor(X, mesh, same).requires_grad_()
        x = from_torch(t)
        assert x.placements == tuple(placements)
        assert x.shape == X.shape
        assert x.stride() == X.stride()
        assert x.to_local().data_ptr() == t.to_local().data_ptr()
        assert torch.equal(x.full_tensor(), X)
        (x * distribute_tensor(X, mesh, None)).sum().backward()
        assert isinstance(t.grad, theirs.DTensor)
        assert t.grad.placements == tuple(same)
        assert torch.equal(t.grad.full_tensor(), X)
        y = distribute_tensor(X, mesh, placements).requires_grad_()
        back = to_torch(y)
        assert isinstance(back, theirs.DTensor)
        assert back.placements == tuple(same)
        assert back.to_local().data_ptr() == y.to_local().data_ptr()
        (back * theirs.distribute_tensor(X, mesh, [theirs.Replicate()] * 2)).sum().backward()
        assert y.grad.placements == tuple(placements)
        assert torch.equal(y.grad.full_tensor(), X)


@with_threads(4)
def test_the_order_of_cuts_is_kept(rank):
    mesh = init_device_mesh("cpu", (2, 2))
    x = torch.ops.dtensor.redistribute(distribute_tensor(X, mesh, [Shard(0), Shard(0)]), "S(0)#1S(0)#0", False)
    y = x.detach().requires_grad_()
    t = to_torch(y)
    assert [type(p).__name__ for p in t.placements] == ["_StridedShard", "Shard"]
    assert t.placements[0].split_factor == 2
    there = t.detach().requires_grad_()
    back = from_torch(there)
    assert back._spec.layout is Layout.parse("S(0)#1S(0)#0", 2)
    assert torch.equal(back.full_tensor(), X)
    (back * distribute_tensor(X, mesh, None)).sum().backward()
    assert [type(p).__name__ for p in there.grad.placements] == ["_StridedShard", "Shard"]
    assert torch.equal(there.grad.to_local(), x.to_local())


@with_threads(2)
def test_parts_of_a_sum_and_what_is_refused(rank):
    mesh = init_device_mesh("cpu", (2,))
    t = theirs.DTensor.from_local(X, mesh, [theirs.Partial()])
    x = from_torch(t)
    assert x.placements == (Partial(),)
    assert torch.equal(x.full_tensor(), 2 * X)
    p = DTensor.from_local(X, mesh, [Partial("max")])
    assert to_torch(p).placements == (theirs.Partial("max"),)
    with pytest.raises(TypeError, match=r"from_torch takes a torch.distributed.tensor.DTensor, got Tensor"):
        from_torch(X)
    with pytest.raises(TypeError, match=r"to_torch takes a dtensor.DTensor, got Tensor"):
        to_torch(X)
    table = theirs.distribute_tensor(X, mesh, [theirs.Shard(0)])
    index = theirs.distribute_tensor(torch.tensor([0, 6]), mesh, [theirs.Replicate()])
    masked = torch.nn.functional.embedding(index, table)
    with pytest.raises(PlacementError, match=r"has placements that torch only uses between two of its operators"):
        from_torch(masked)


def parallelized(mesh):
    torch.manual_seed(0)
    plan = {"net1": their_parallel.ColwiseParallel(), "net2": their_parallel.RowwiseParallel()}
    return their_parallel.parallelize_module(MLPModule("cpu"), mesh, plan)


def plain():
    torch.manual_seed(0)
    return MLPModule("cpu")


def trained(model, run):
    """Losses of three steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    losses = []
    for step in range(3):
        loss = run(torch.sin(torch.arange(80.0) + step).view(8, 10)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@with_ranks(2)
def test_a_parallelized_model_is_converted_and_trains(rank):
    mesh = init_device_mesh("cpu", (2,))
    model = plain()
    wanted = trained(model, model)
    model = parallelized(mesh)
    pointer = model.net1.weight.to_local().data_ptr()
    assert convert_module(model) is model
    assert type(model.net1.weight) is nn.Parameter or isinstance(model.net1.weight, nn.Parameter)
    assert isinstance(model.net1.weight, DTensor)
    assert model.net1.weight.to_local().data_ptr() == pointer
    assert trained(model, model) == pytest.approx(wanted, rel=1e-5)
    model = convert_module(parallelized(mesh))
    compiled = torch.compile(model, backend="dtensor", fullgraph=True, options={"inner": "aot_eager"})
    assert trained(model, compiled) == pytest.approx(wanted, rel=1e-5)


@with_threads(2)
def test_shared_parameters_buffers_and_gradients(rank):
    mesh = init_device_mesh("cpu", (2,))
    model = nn.ModuleDict({"a": nn.Linear(4, 4, bias=False), "b": nn.Linear(4, 4, bias=False), "c": nn.Linear(2, 2)})
    shared = nn.Parameter(theirs.distribute_tensor(torch.ones(4, 4), mesh, [theirs.Shard(0)]))
    shared.grad = theirs.distribute_tensor(torch.full((4, 4), 2.0), mesh, [theirs.Shard(0)])
    model["a"].weight = model["b"].weight = shared
    model["a"].register_buffer("running", theirs.distribute_tensor(torch.ones(4), mesh, [theirs.Replicate()]))
    untouched = model["c"].weight
    convert_module(model)
    assert model["a"].weight is model["b"].weight
    assert torch.equal(model["a"].weight.grad.full_tensor(), torch.full((4, 4), 2.0))
    assert isinstance(model["a"].running, dtensor.DTensor)
    assert model["c"].weight is untouched
