"""`input_reshard`: what is saved for the backward is each rank's part, and gradients are those without it."""

import copy
import gc

import pytest
import torch
from torch import nn

from dtensor import Replicate, Shard, distribute_tensor, init_device_mesh
from dtensor.parallel import ColwiseParallel, RowwiseParallel, input_reshard, parallelize_module
from dtensor.testing import CountCollectives, MLPModule, with_threads

PLAN = {"net1": ColwiseParallel(), "net2": RowwiseParallel()}
X = torch.sin(torch.arange(90.0)).view(9, 10)
MLP = MLPModule("cpu")  # one for all threads, which share a random generator


@pytest.fixture(autouse=True)
def few_objects():
    """Of half a million living objects `saved` looks at those that a test has made."""
    gc.freeze()


def mlp():
    return copy.deepcopy(MLP)


def saved(mesh):
    """Shapes of the parts that wait for a backward on this rank."""
    found = [x for x in gc.get_objects() if type(x).__name__ == "_Saved" and x.spec.mesh == mesh]
    for x in found:
        assert x.local.untyped_storage().nbytes() == x.local.numel() * x.local.element_size()
    return [tuple(x.local.shape) for x in found]


def expected(model, x):
    x = x.clone().requires_grad_()
    y = model(x)
    y.square().sum().backward()
    return y.detach(), x.grad, [p.grad for p in model.parameters()]


@with_threads(2)
def test_a_part_is_saved_and_the_gradients_stay(rank):
    mesh = init_device_mesh("cpu", (2,))
    y, grad, grads = expected(mlp(), X)
    for dim, part in ((0, (5 - rank, 10)), (1, (9, 5)), (-1, (9, 5))):
        model = input_reshard(parallelize_module(mlp(), mesh, PLAN), mesh, dim)
        for _ in range(2):
            model.zero_grad()
            x = X.clone().requires_grad_()
            with CountCollectives() as counted:
                out = model(x)
                assert saved(mesh) == [part]
                torch.testing.assert_close(out, y)
                out.square().sum().backward()
            assert sorted(c.op for c in counted.collectives) == ["all_gather", "all_reduce", "all_reduce"]
            del out
            assert saved(mesh) == []
            torch.testing.assert_close(x.grad, grad)
            for p, g in zip(model.parameters(), grads):
                torch.testing.assert_close(p.grad.full_tensor(), g)


class Block(nn.Module):
    """A norm, whose input and statistics are saved too, and a multiplication of two tensors that are not replicated."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(10)
        self.mlp = mlp()

    def forward(self, x, mask=None):
        x = x if mask is None else x * mask
        return x + self.mlp(self.norm(x))


@with_threads(4)
def test_plain_inputs_and_dtensors_of_a_larger_mesh(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    mask = torch.cos(torch.arange(90.0)).view(9, 10)
    alone = Block()
    x = X.clone().requires_grad_()
    alone(x, mask).square().sum().backward()
    y, grad = alone(X, mask).detach(), x.grad

    model = parallelize_module(Block(), mesh["tp"], {f"mlp.{name}": style for name, style in PLAN.items()})
    tp = mesh["tp"]
    input_reshard(model, tp, 1)
    x = X.clone().requires_grad_()
    out = model(x, mask=mask)
    assert saved(tp).count((9, 5)) >= 2  # the mask, and what the norm gives to the mlp
    torch.testing.assert_close(out, y)
    out.square().sum().backward()
    torch.testing.assert_close(x.grad, grad)

    w = nn.Linear(10, 10)
    nn.init.eye_(w.weight)
    nn.init.zeros_(w.bias)
    w.weight = nn.Parameter(distribute_tensor(w.weight, mesh, [Replicate(), Replicate()]))
    w.bias = nn.Parameter(distribute_tensor(w.bias, mesh, [Replicate(), Replicate()]))
    input_reshard(w, mesh["tp"], 0)
    given = distribute_tensor(X, mesh, [Shard(0), Replicate()])
    (w(given) ** 2).sum().backward()
    torch.testing.assert_close(w.weight.grad.full_tensor(), 2 * X.T @ X)
    both = distribute_tensor(X, mesh, [Shard(0), Shard(1)])  # not replicated: stays as it is
    assert torch.equal(w(both).full_tensor(), X)


@with_threads(2)
def test_what_differs_between_ranks_is_left_alone(rank):
    mesh = init_device_mesh("cpu", (2,))

    class Own(nn.Module):
        def forward(self, x, y):
            mine = x[2 * rank : 2 * rank + 2]
            y.add_(rank)
            return ((x + rank) ** 2).sum() + (mine * mine.detach()).sum() + (x * y).sum()

    x, y = torch.arange(4.0).requires_grad_(), torch.ones(4)
    out = input_reshard(Own(), mesh, 0)(x, y)
    own = torch.tensor([0.0, 1, 0, 0] if rank == 0 else [0.0, 0, 2, 3])
    out.backward()
    assert torch.equal(x.grad, 2.0 * (torch.arange(4) + rank) + own + 1 + rank)


@with_threads(2)
def test_an_error_inside_ends_the_region(rank):
    mesh = init_device_mesh("cpu", (2,))

    class Fails(nn.Module):
        def forward(self, x):
            raise RuntimeError("no")

    x = torch.ones(4, requires_grad=True)
    with pytest.raises(RuntimeError, match="no"):
        input_reshard(Fails(), mesh, 0)(x)
    y = (distribute_tensor(torch.ones(4), mesh, None).requires_grad_() ** 2).sum()
    assert saved(mesh) == []
    y.backward()


def test_arguments(fake_mesh):
    mesh = fake_mesh(2, 2, names=("dp", "tp"))
    model = nn.Linear(2, 2)
    assert input_reshard(model, mesh["tp"]) is model
    assert not model._forward_pre_hooks
    with pytest.raises(ValueError, match=r"over a mesh of one axis, this one has 2; write mesh\['tp'\]"):
        input_reshard(model, mesh, 0)
    copied = copy.deepcopy(input_reshard(model, mesh["tp"], 0))
    assert len(copied._forward_pre_hooks) == 1


def test_a_compiled_graph_saves_what_the_partitioner_says(fake_mesh):
    mesh = fake_mesh(2)
    model = input_reshard(parallelize_module(mlp(), mesh, PLAN), mesh, 0)
    x = X.clone().requires_grad_()
    out = torch.compile(model, backend="aot_eager", fullgraph=True)(x)
    assert saved(mesh) == []
    out.square().sum().backward()
    assert x.grad.shape == x.shape
