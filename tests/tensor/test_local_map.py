"""local_map: plain functions on local tensors, forward and backward, against one device; what it refuses."""

import pytest
import torch
from torch.distributed import _functional_collectives as funcol

from dtensor import (
    DTensor,
    MeshError,
    Partial,
    PlacementError,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
    local_map,
)
from dtensor.testing import with_ranks, with_threads

X, W = torch.sin(torch.arange(24.0)).view(6, 4), torch.cos(torch.arange(12.0)).view(4, 3)


def placed(mesh, *pairs):
    return [distribute_tensor(x, mesh, p).requires_grad_() for x, p in pairs]


def dense(function, *tensors):
    """Output and gradients on one device, of the sum of squares of the output."""
    leaves = [t.clone().requires_grad_() for t in tensors]
    out = function(*leaves)
    out.square().sum().backward()
    return [out.detach(), *[t.grad for t in leaves]]


def sharded(function, *tensors):
    out = function(*tensors)
    out.square().sum().backward()
    return [out.full_tensor().detach(), *[t.grad.full_tensor() for t in tensors]]


def rows(x, w):
    return torch.mm(x, w)


def gathered(x, w, group):
    """Rows times a weight of which each rank has some rows: the backward of the gather reduces and scatters."""
    return torch.mm(x, funcol.all_gather_tensor_autograd(w, 0, group))


ROWS = {"in_placements": ([Shard(0)], [Replicate()]), "out_placements": [Shard(0)]}
INNER = {"in_placements": ([Shard(1)], [Shard(0)]), "out_placements": [Partial()]}


@with_threads(2)
def test_forward_and_backward_are_those_of_one_device(rank):
    mesh = init_device_mesh("cpu", (2,))
    wanted = dense(torch.mm, X, W)
    by_rows = local_map(rows, **ROWS, in_grad_placements=(None, [Partial()]))
    for found, right in zip(sharded(by_rows, *placed(mesh, (X, [Shard(0)]), (W, [Replicate()]))), wanted):
        torch.testing.assert_close(found, right)
    inner = local_map(rows, **INNER)
    x, w = placed(mesh, (X, [Shard(1)]), (W, [Shard(0)]))
    assert inner(x, w).placements == (Partial(),)
    for found, right in zip(sharded(inner, x, w), wanted):
        torch.testing.assert_close(found, right)


@with_threads(4)
def test_two_axes_and_uneven_rows(rank):
    mesh = init_device_mesh("cpu", (2, 2))
    x, w = placed(mesh, (X[:5], [Shard(0), Shard(1)]), (W, [Replicate(), Shard(0)]))
    product = local_map(
        rows,
        [Shard(0), Partial()],
        ([Shard(0), Shard(1)], [Replicate(), Shard(0)]),
        (None, [Partial(), Shard(0)]),
    )
    out = product(x, w)
    assert out.shape == (5, 3)
    for found, right in zip(sharded(product, x, w), dense(torch.mm, X[:5], W)):
        torch.testing.assert_close(found, right)


@with_threads(2)
def test_a_gradient_that_cannot_be_guessed_has_to_be_declared(rank):
    mesh = init_device_mesh("cpu", (2,))
    x, w = placed(mesh, (X, [Shard(0)]), (W, [Replicate()]))
    with pytest.raises(PlacementError, match=r"argument 1 of rows is replicated.*in_grad_.* with \[Partial\(\)"):
        local_map(rows, **ROWS)(x, w)
    with torch.no_grad():
        torch.testing.assert_close(local_map(rows, **ROWS)(x, w).full_tensor(), X @ W)
    p = DTensor.from_local(X / 2, mesh, [Partial()]).requires_grad_()
    twice = {"in_placements": ([Partial()],), "out_placements": [Partial()]}
    with pytest.raises(PlacementError, match=r"argument 0 of <lambda> is partial .*\[Replicate\(\)\]"):
        local_map(lambda a: a * 2, **twice)(p)
    local_map(lambda a: a * 2, **twice, in_grad_placements=([Replicate()],))(p).sum().backward()
    assert torch.equal(p.grad.full_tensor(), torch.full_like(X, 2.0))
    doubled = local_map(lambda a: a * 2, [Replicate()], ([Replicate()],))(w)
    assert torch.equal(doubled.full_tensor(), W * 2)


@with_threads(2)
def test_inputs_are_checked_or_redistributed(rank):
    mesh, other = init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (2, 1))
    x = distribute_tensor(X, mesh, [Replicate()])
    half = {"out_placements": [Shard(0)], "in_placements": ([Shard(0)],)}
    with pytest.raises(PlacementError, match=r"argument 0 of neg has placements .*redistribute_inputs=True"):
        local_map(torch.neg, **half)(x)
    made = local_map(torch.neg, **half, redistribute_inputs=True)(x)
    assert made.placements == (Shard(0),)
    assert torch.equal(made.full_tensor(), -X)
    taken = local_map(torch.neg, [Replicate()])(x)
    assert torch.equal(taken.to_local(), -X)
    with pytest.raises(MeshError, match=r"write x.redistribute"):
        local_map(torch.add, [Replicate()])(x, distribute_tensor(X, other, [Replicate()] * 2))
    with pytest.raises(MeshError, match=r"neg was given a DTensor on"):
        local_map(torch.neg, [Replicate()], device_mesh=other)(x)


@with_threads(2)
def test_what_is_no_dtensor_passes(rank):
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(X, mesh, [Shard(0)])

    @local_map(out_placements=([Shard(0)], None, None), in_placements=([Shard(0)], [Replicate()], None))
    def scaled(a, plain, factor, shift=0.0):
        return {"scaled": a * plain * factor + shift, "rest": (a.shape[0], plain)}

    made = scaled(x, torch.full((4,), 3.0), 2, shift=1.0)
    assert torch.equal(made["scaled"].full_tensor(), X * 6 + 1)
    assert made["rest"][0] == 3
    assert type(made["rest"][1]) is torch.Tensor
    assert scaled(X, 1, 2)["rest"] == (6, 1), "without DTensors it is the function itself"
    nested = local_map(lambda pair: pair[0] + pair[1], [Shard(0)], ([Shard(0)], [Shard(0)]))
    assert torch.equal(nested((x, x)).full_tensor(), 2 * X)


@with_threads(2)
def test_wrong_declarations(rank):
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(X, mesh, [Shard(0)])
    x5, s, r = distribute_tensor(X[:5], mesh, [Shard(0)]), [Shard(0)], [Replicate()]
    wrong = [
        (local_map(torch.neg, s, (None,)), (x,), PlacementError, r"in_placements\[0\] is None.*\[Shard\(dim=0\)\]"),
        (local_map(torch.neg, s, (s, s)), (x,), PlacementError, r"placements for 2 arguments, neg was given 1"),
        (local_map(torch.neg, s, s), (x,), PlacementError, r"in_placements holds placements for each argument"),
        (local_map(torch.neg, (s, s), (s,)), (x,), PlacementError, r"for 2 outputs, neg returned 1; write a tuple"),
        (local_map(torch.mul, s, (s, r)), (x, 2), PlacementError, r"argument 1 of mul is not a tensor but 2; write"),
        (local_map(lambda a: 3, s, (s,)), (x,), PlacementError, r"not a tensor but 3; write None"),
        (local_map(lambda a: x, s, (s,)), (x,), TypeError, r"output 0 of <lambda> is a DTensor"),
        (local_map(lambda a: a[:1], s, (s,)), (x5,), PlacementError, r"length 1 in dimension 0"),
    ]
    for function, args, kind, message in wrong:
        with pytest.raises(kind, match=message):
            function(*args)
    with pytest.raises(TypeError, match=r"by the keyword 'out'.*pass it by position"):
        local_map(torch.neg, s, (s,))(x, out=x)
    with pytest.raises(PlacementError, match=r"out_placements is a list of placements"):
        local_map(torch.neg, Shard(0))


@with_ranks(2)
def test_compiled_is_eager(rank):
    mesh = init_device_mesh("cpu", (2,))
    by_rows = local_map(rows, **ROWS, in_grad_placements=(None, [Partial()]))
    inner = local_map(rows, **INNER)
    group = mesh.get_group()
    talking = local_map(gathered, [Shard(0)], ([Shard(0)], [Shard(0)], None))
    cases = [
        (lambda x, w: by_rows(x * 2, w).relu(), [Shard(0)], [Replicate()], X),
        (lambda x, w: by_rows(x * 2, w).relu(), [Shard(0)], [Replicate()], X[:5]),
        (lambda x, w: inner(x * 2, w).relu(), [Shard(1)], [Shard(0)], X),
        (lambda x, w: talking(x * 2, w, group).relu(), [Shard(0)], [Shard(0)], X),
    ]
    for function, px, pw, value in cases:
        wanted = dense(lambda x, w: torch.mm(x * 2, w).relu(), value, W)
        eager = sharded(function, *placed(mesh, (value, px), (W, pw)))
        torch.compiler.reset()
        compiled = torch.compile(function, backend="dtensor", fullgraph=True, options={"inner": "aot_eager"})
        found = sharded(compiled, *placed(mesh, (value, px), (W, pw)))
        for e, c, right in zip(eager, found, wanted):
            torch.testing.assert_close(e, right)
            torch.testing.assert_close(c, e)
