"""Gradients of gradients and the compiler: right inside a compiled region, refused through a compiled function.

AOTAutograd compiles a forward and its backward, and no backward of that. What it says must not get lost where our
backend changes the backward (`complete_tangents`), or the border operators stand in Dynamo's graph.
"""

import copy

import pytest
import torch
from torch import nn

from dtensor import DTensor, Shard, distribute_tensor, init_device_mesh
from dtensor.parallel import ColwiseParallel, RowwiseParallel, fully_shard, parallelize_module
from dtensor.testing import with_ranks

VALUES = torch.arange(1.0, 11.0, dtype=torch.float64).view(5, 2) / 5
WEIGHTS = torch.cos(VALUES)
REFUSED = "does not currently support double backward"


def whole(x):
    return x.full_tensor() if isinstance(x, DTensor) else x


def leaves(mesh=None):
    if mesh is None:
        return [v.clone().requires_grad_() for v in (VALUES, WEIGHTS)]
    return [distribute_tensor(v, mesh, [Shard(0)]).requires_grad_() for v in (VALUES, WEIGHTS)]


def product(x, w):
    return x * w


def whole_product(x, w):
    return whole(x * w)


def with_an_unused_output(x, w):
    return x * w, torch.sin(x @ w.t())


def penalised(function, x, w):
    """The gradient by `w` of a penalty on the gradient by `x`."""
    y = function(x, w)
    y = whole(y[0] if isinstance(y, tuple) else y)
    (g,) = torch.autograd.grad((y * y).sum(), x, create_graph=True)
    (whole(g).sum() + (y**3).sum()).backward()
    return whole(w.grad)


def penalty(x, w):
    return penalised(whole_product, x, w)


def penalty_inside(x, w):
    y = whole(x * w)
    (g,) = torch.autograd.grad((y * y).sum(), x, create_graph=True)
    return whole(g).sum() + (y**3).sum()


@pytest.mark.parametrize("program", [product, whole_product, with_an_unused_output])
def test_refused_through_a_compiled_function(fake_mesh, program):
    mesh = fake_mesh(1)
    compiled = torch.compile(program, backend="dtensor", options={"inner": "aot_eager"})
    with pytest.raises(RuntimeError, match=REFUSED):
        penalised(compiled, *leaves(mesh))


def test_refused_through_a_compiled_module(fake_mesh):
    model = fully_shard(nn.Linear(2, 3).double(), fake_mesh(1))
    out = torch.compile(model, backend="dtensor", options={"inner": "aot_eager"})(VALUES)
    g = torch.autograd.grad((out**3).sum(), list(model.parameters()), create_graph=True)
    with pytest.raises(RuntimeError, match=REFUSED):
        sum(whole(p * p).sum() for p in g).backward()


def test_refused_where_the_graph_breaks_at_grad(fake_mesh):
    """What comes after the break runs with Dynamo at hand, which passes over our own backward."""
    mesh = fake_mesh(1)
    compiled = torch.compile(penalty_inside, backend="dtensor", options={"inner": "aot_eager"})
    with pytest.raises(RuntimeError, match=REFUSED):
        compiled(*leaves(mesh)).backward()


def test_graphs_of_dynamo_alone_are_differentiated_again(fake_mesh):
    """With inner="eager" Dynamo's graph runs under autograd: the operators in it have gradients of gradients."""
    mesh = fake_mesh(1)
    for program in (product, whole_product):
        compiled = torch.compile(program, backend="dtensor", options={"inner": "eager"})
        torch.testing.assert_close(penalised(compiled, *leaves(mesh)), penalty(*leaves()))
    model = fully_shard(nn.Linear(2, 3).double(), mesh)
    found = []
    for run in (model, torch.compile(model, backend="dtensor", options={"inner": "eager"})):
        g = torch.autograd.grad((run(VALUES) ** 3).sum(), list(model.parameters()), create_graph=True)
        found.append([whole(h) for h in torch.autograd.grad(sum(whole(p * p).sum() for p in g), model.parameters())])
    torch.testing.assert_close(found[1], found[0])


def network():
    net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    for k, p in enumerate(net.parameters()):
        p.data = torch.sin(torch.arange(p.numel()) * 1.3 + k).view(p.shape).double()
    return net


def hessian_vector(model, x, parameters):
    first = torch.autograd.grad((whole(model(x)) ** 2).mean(), parameters, create_graph=True)
    return torch.autograd.grad(sum(whole((g * g.detach().cos()).sum()) for g in first), parameters)


TRACED = {"backend": "dtensor", "options": {"inner": "aot_eager"}, "fullgraph": True}


def test_grad_in_a_compiled_region(fake_mesh):
    """Where Dynamo is told to trace torch.autograd.grad."""
    mesh = fake_mesh(1)
    x, w = leaves(mesh)
    unit, plain = fully_shard(network(), mesh), network()
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        torch.compile(penalty_inside, **TRACED)(x, w).backward()
        found = torch.compile(hessian_vector, **TRACED)(unit, VALUES, list(unit.parameters()))
    torch.testing.assert_close(whole(w.grad), penalty(*leaves()))
    for one, other in zip(found, hessian_vector(plain, VALUES, list(plain.parameters())), strict=True):
        torch.testing.assert_close(whole(one), other)


@pytest.mark.nightly
@with_ranks(2)
def test_grad_in_a_compiled_region_on_ranks(rank):
    """A penalty, and the Hessian times a vector through styles and units."""
    mesh = init_device_mesh("cpu", (2,))
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        x, w = leaves(mesh)
        torch.compile(penalty_inside, **TRACED)(x, w).backward()
        torch.testing.assert_close(whole(w.grad), penalty(*leaves()))
        values = VALUES[:4]
        plain = network()
        expected = hessian_vector(plain, values, list(plain.parameters()))
        tp = parallelize_module(copy.deepcopy(plain), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        unit = fully_shard(copy.deepcopy(plain), mesh)
        for model, part in ((tp, values), (unit, values[2 * rank : 2 * rank + 2])):
            torch.compiler.reset()
            found = torch.compile(hessian_vector, **TRACED)(model, part, list(model.parameters()))
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(whole(one), other)
