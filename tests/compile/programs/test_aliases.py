"""Views as outputs of compiled functions, and writes to views and inputs inside: as in eager mode."""

import pytest
import torch
import torch.nn.functional as F

from dtensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from dtensor.testing import with_ranks


@pytest.fixture
def mesh(fake_mesh):
    return fake_mesh(2)


def written(x):
    part = x[1:]
    part.add_(1)
    return x * 2


def written_first(x):
    x.mul_(3)
    return x[1:]


FUNCTIONS = {
    "slice": lambda x: x[2:],
    "chunks": lambda x: x.chunk(2),
    "two": lambda x: (x[2:], x.t()),
    "of a result": lambda x: (lambda y: (y[1:], y[:3]))(x * 2),
    "written": written,
    "written first": written_first,
}


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("placement", [Replicate(), Shard(1)], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_views(mesh, name, placement, requires_grad):
    expected_input = torch.arange(12.0).view(6, 2).requires_grad_(requires_grad) * 1
    local = torch.arange(12.0).view(6, 2).requires_grad_(requires_grad) * 1
    x = DTensor.from_local(local.clone(), mesh, [placement])
    compiled = torch.compile(FUNCTIONS[name], backend="aot_eager", fullgraph=True)
    outputs, expected = compiled(x), FUNCTIONS[name](expected_input)
    outputs, expected = ([o] if isinstance(o, torch.Tensor) else list(o) for o in (outputs, expected))
    assert [o.placements for o in outputs[:1]] == [(placement,)]
    for found, wanted in zip(outputs, expected, strict=True):
        assert torch.equal(found.to_local(), wanted)
        assert found.requires_grad == wanted.requires_grad
    assert torch.equal(x.to_local(), expected_input)


def through_parts(x):
    if not isinstance(x, DTensor):
        return x
    return DTensor.from_local(x.to_local(), x.device_mesh, x.placements, shape=x.shape, stride=x.stride())


@pytest.mark.parametrize("backend", ["dtensor", "aot_eager"])
@with_ranks(2)
def test_results_whose_parts_are_views_of_one_memory(rank, backend):
    """AOTAutograd counted the memory among the results, and traced none: a gradient was taken for a result."""
    mesh = init_device_mesh("cpu", (2,))

    def attention(x, y):
        out = F.scaled_dot_product_attention(x, y, y.sin())
        return out, through_parts(out)

    x = torch.linspace(-1, 1, 49, dtype=torch.float64).sin().view(1, 7, 7)
    plain = [v.clone().requires_grad_() for v in (x, x.cos())]
    given = [distribute_tensor(v.detach(), mesh, [Shard(2)]).requires_grad_() for v in plain]
    options = {"options": {"inner": "aot_eager"}} if backend == "dtensor" else {}
    found, expected = torch.compile(attention, backend=backend, fullgraph=True, **options)(*given), attention(*plain)
    for ours, dense in zip(found, expected):
        torch.testing.assert_close(ours.full_tensor(), dense)
    sum(v.square().sum() for v in expected).backward()
    sum(v.square().sum() for v in found).backward()
    for ours, dense in zip(given, plain):
        torch.testing.assert_close(ours.grad.full_tensor(), dense.grad)
