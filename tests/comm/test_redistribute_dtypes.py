"""Redistribution in other dtypes, forwards and backwards: torch's own as the oracle, compiled against eager."""

import pytest
import torch
import torch.distributed.tensor as theirs

import dtensor
from dtensor import Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from dtensor.testing import with_ranks, with_threads

R, S0, S1 = Replicate(), Shard(0), Shard(1)
MOVES = [(S0, R), (S0, S1), (R, S0), (S0, S0), (Partial(), R), (Partial(), S1), (R, R)]
DTYPES = [(torch.bfloat16, None), (None, torch.bfloat16), (torch.float16, torch.bfloat16), (torch.float64, None)]
SAME = {
    Shard: lambda p: theirs.Shard(p.dim),
    Replicate: lambda p: theirs.Replicate(),
    Partial: lambda p: theirs.Partial(),
}


def run(module, mesh, src, dst, dtypes):
    """This rank's parts of the result, of a gradient, and of a gradient of that."""
    place = (lambda p: p) if module is dtensor else (lambda p: SAME[type(p)](p))
    made_by = torch.Generator().manual_seed(mesh.get_rank())  # threads share the default one
    local = torch.randn(4, 6, generator=made_by).requires_grad_()

    def f(local):
        x = module.DTensor.from_local(local, mesh, [place(src)], run_check=False)
        y = x.redistribute(placements=[place(dst)], forward_dtype=dtypes[0], backward_dtype=dtypes[1])
        return y.to_local()

    y = f(local)
    (grad,) = torch.autograd.grad((y * y * y).sum(), local, create_graph=True)
    (second,) = torch.autograd.grad((grad * grad).sum(), local)
    return y.detach(), grad.detach(), second


@pytest.mark.parametrize("dtypes", DTYPES)
@with_threads(2)
def test_as_torch_does(rank, dtypes):
    mesh = init_device_mesh("cpu", (2,))
    for src, dst in MOVES:
        mine, other = (run(m, mesh, src, dst, dtypes) for m in (dtensor, theirs))
        for a, b in zip(mine, other):
            assert a.dtype == b.dtype
            torch.testing.assert_close(a, b)


@with_ranks(2)
def test_compiled(rank):
    """Of lengths that two do and do not divide; also where nothing is sent."""
    mesh = init_device_mesh("cpu", (2,))

    def there(x):
        return x.redistribute(placements=[R], forward_dtype=torch.bfloat16, backward_dtype=torch.float16) * 2

    def stays(x):
        return x.redistribute(placements=[S0], backward_dtype=torch.float16) * 2

    for f in (there, stays):
        compiled = torch.compile(f, backend="dtensor", fullgraph=True, options={"inner": "aot_eager"})
        for rows in (4, 5, 3):
            found = []
            for g in (f, compiled):
                x = distribute_tensor(torch.linspace(-1, 1, rows * 6).view(rows, 6), mesh, [S0]).requires_grad_()
                y = g(x)
                (y.float() ** 3).sum().backward()
                found.append((y.to_local(), x.grad.to_local()))
            for a, b in zip(*found):
                assert a.dtype == b.dtype
                assert torch.equal(a, b)


def test_not_to_another_mesh(fake_mesh):
    x = distribute_tensor(torch.ones(4), fake_mesh(2), [S0])
    other = torch.distributed.device_mesh.DeviceMesh("cpu", [0])
    with pytest.raises(ValueError, match=r"write x.to\(dtype\).redistribute"):
        x.redistribute(other, [R], forward_dtype=torch.bfloat16)
