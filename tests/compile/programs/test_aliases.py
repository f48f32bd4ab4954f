"""Views as outputs of compiled functions, and writes to views and inputs inside: as in eager mode."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dtensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from dtensor.parallel import fully_shard
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


PLAIN = {
    "disjoint": lambda h, x: (h[:1], h[1:]),
    "overlapping": lambda h, x: (h[:3], h[1:].t()),
    "with their base": lambda h, x: (h, h[1:]),
    "of several kinds": lambda h, x: (h.view(-1), h[0], x[1:], h.t().exp(), h[:, 2:]),
    "of two results": lambda h, x: (h[:2], (h * 2)[:, 1:], h[1:], (x + h)[::2]),
}


class Returns(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.linear, self.name = nn.Linear(8, 8), name

    def forward(self, x):
        return PLAIN[self.name](self.linear(x), x)


def trained(model, x, write):
    leaf = x.clone().requires_grad_()
    outputs = model(leaf * 1)
    if write:
        outputs[0].mul_(2)  # and so all that share its memory
    sum([(o * (k + 1)).sin().sum() for k, o in enumerate(outputs)]).backward()
    grads = [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in model.parameters()]
    return [*[o.detach() for o in outputs], leaf.grad, *grads]


@pytest.mark.nightly
@with_ranks(2)
def test_plain_results_beside_sharded_parameters(rank):
    """Views of one tensor as results, written to afterwards: as on one device."""
    mesh, x = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)), torch.linspace(-1, 1, 32).view(4, 8)
    for name in PLAIN:
        for write in (False, True):
            torch._dynamo.reset()
            models = []
            for _ in range(2):
                torch.manual_seed(0)
                models.append(Returns(name))
            run = torch.compile(fully_shard(models[0], mesh), backend="dtensor", options={"inner": "aot_eager"})
            torch.testing.assert_close(trained(run, x, write), trained(models[1], x, write))
