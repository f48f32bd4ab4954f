"""Views as outputs of compiled functions, and writes to views and inputs inside: as in eager mode."""

import pytest
import torch

from dtensor import DTensor, Replicate, Shard


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
