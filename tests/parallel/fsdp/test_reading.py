"""Parameters of `fully_shard` that are read outside of a forward: in losses and other modules, eager and compiled."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vjp
from torch.nn import functional as F

from dtensor import DTensor, Replicate, ShardingError, init_device_mesh
from dtensor.parallel import ColwiseParallel, RowwiseParallel, fully_shard, parallelize_module
from dtensor.testing import with_ranks


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head, self.beside = nn.Linear(6, 6), nn.Linear(6, 4, bias=False), Beside()

    def forward(self, x):
        return torch.tanh(self.body(x))


class Beside(nn.Module):
    """A module that is given another one's parameter."""

    def forward(self, h, w):
        return h @ w.t()


def whole(w):
    return w.full_tensor() if isinstance(w, DTensor) else w


def head(model):
    """The parameter itself, which named_parameters has in compiled code too."""
    return dict(model.named_parameters())["head.weight"]


def scalar(x):
    return x.full_tensor() if isinstance(x, DTensor) else x


def unsharded(model, x, y):
    if sharded := hasattr(model, "unshard"):
        model.unshard()
    loss = F.cross_entropy(F.linear(model(x), model.head.weight), y)
    if sharded:
        model.reshard()
    return loss


def chunked(model, x, y):
    h, w = model(x), whole(head(model))
    return sum(F.cross_entropy(part @ w.t(), to) for part, to in zip(h.chunk(2), y.chunk(2))) / 2


def distilled(model, x, y):
    with torch.no_grad():
        teacher = (x @ whole(head(model)).t()).softmax(-1)
    return F.cross_entropy(model(x) @ whole(head(model)).t(), teacher)


def called(model, x, y):
    own = {name: p * 1 for name, p in model.named_parameters()}
    return F.cross_entropy(functional_call(model, own, (x,)) @ whole(head(model)).t(), y)


PLACES: dict[str, Any] = {
    "whole": lambda m, x, y: F.cross_entropy(m(x) @ whole(head(m)).t(), y),
    "unshard": unsharded,
    "chunked": chunked,
    "tied": lambda m, x, y: F.cross_entropy((m(x) @ whole(dict(m.named_parameters())["body.weight"]).t())[:, :4], y),
    "penalty": lambda m, x, y: m(x).square().mean() + 0.1 * sum(scalar(p.square().sum()) for p in m.parameters()),
    "plain penalty": lambda m, x, y: m(x).square().mean() + sum(whole(p).pow(3).sum() for p in m.parameters()),
    "distilled": distilled,
    "called": called,
    "other module": lambda m, x, y: F.cross_entropy(m.beside(m(x), whole(head(m))), y),
    "transposed": lambda m, x, y: F.cross_entropy(m(x) @ whole(head(m).t()), y),
    "computed": lambda m, x, y: m(x).square().mean() + (whole(head(m)[1:3].exp() * 2) * x[0]).sum(),
    "own penalty": lambda m, x, y: m(x).mean() + x[0, 0] * sum(scalar(p.square().sum()) for p in m.parameters()),
    "attribute": lambda m, x, y: F.cross_entropy(m(x) @ whole(m.head.weight).t(), y),
    "attribute transposed": lambda m, x, y: F.cross_entropy(m(x) @ whole(m.head.weight.t()), y),
    "part": lambda m, x, y: m(x).square().mean() + (whole(head(m))[1:3] * x[0]).sum(),
}


def gradients(model, place, x, y, compiled):
    def loss(x, y):
        return PLACES[place](model, x, y)

    run = torch.compile(loss, backend="dtensor", options={"inner": "aot_eager"}) if compiled else loss
    run(x, y).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def expected(model, place, x, y, n):
    """The mean of the gradients that each rank's loss has on one device."""
    found: dict[str, Any] = {}
    for part, to in zip(x.chunk(n), y.chunk(n)):
        for name, g in gradients(copy.deepcopy(model), place, part, to, False).items():
            found[name] = found.get(name, 0) + g / n
    return found


BY_DAY = ("unshard", "called", "plain penalty", "computed", "attribute transposed")
"""In compiled code: through the module, a function, all parameters, a part of one, and an attribute."""


@with_ranks(2)
@pytest.mark.parametrize(
    ("places", "compiled"),
    [
        pytest.param(tuple(PLACES), False, id="eager"),
        pytest.param(BY_DAY, True, id="compiled"),
        pytest.param(tuple(PLACES), True, id="all-compiled", marks=pytest.mark.nightly),
    ],
)
def test_every_place(rank, places, compiled):
    torch.manual_seed(0)
    mesh, model = init_device_mesh("cpu", (2,)), LM()
    x, y = torch.randn(8, 6), torch.randint(0, 4, (8,))
    for place in places:
        if compiled:
            torch._dynamo.reset()
        wanted = expected(model, place, x, y, 2)
        ours = fully_shard(copy.deepcopy(model), mesh)
        found = gradients(ours, place, x.chunk(2)[rank], y.chunk(2)[rank], compiled)
        assert found.keys() == wanted.keys()
        for name, g in found.items():
            assert torch.allclose(g.full_tensor(), wanted[name], atol=1e-6), (place, name)
        assert isinstance(ours.head.weight, DTensor)


@with_ranks(4)
def test_beside_other_axes_and_where_replicated(rank):
    torch.manual_seed(0)
    model = LM()
    x, y = torch.randn(8, 6), torch.randint(0, 4, (8,))
    data = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for mesh, n, part in ((data, 4, rank), (both["dp"], 2, rank // 2)):
        for place in ("whole", "transposed", "attribute"):
            wanted = expected(model, place, x, y, n)
            ours = copy.deepcopy(model)
            if mesh is not data:
                parallelize_module(ours, both["tp"], {"body": ColwiseParallel(output_layouts=Replicate())})
            found = gradients(fully_shard(ours, mesh), place, x.chunk(n)[part], y.chunk(n)[part], False)
            for name, g in found.items():
                torch.testing.assert_close(g.full_tensor(), wanted[name], msg=f"{place} {name}")


@with_ranks(2)
def test_global_activations_are_not_averaged(rank):
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(4, 4), init_device_mesh("cpu", (2,)), activations="global")
    (model.weight.full_tensor() * (rank + 1)).sum().backward()
    assert model.weight.grad.to_local().eq(rank + 1).all()


@with_ranks(2)
def test_function_transforms_name_another_way(rank):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    plain, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), torch.ones(2, 4)
    models = {
        "fully sharded module": fully_shard(copy.deepcopy(plain), mesh),
        "from_local": parallelize_module(
            copy.deepcopy(plain), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()}, check_inputs=False
        ),
    }
    for what, model in models.items():
        held = {name: p.detach() for name, p in model.named_parameters()}

        def loss(p, x, model=model):
            return functional_call(model, p, (x,)).square().mean()

        for transform in (grad, vjp_of):
            with pytest.raises(ShardingError, match=f"{what}; write torch.autograd.grad"):
                transform(loss)(held, x)
        given = {name: p.requires_grad_() for name, p in held.items()}
        torch.autograd.grad(loss(given, x), list(given.values()))


def vjp_of(loss):
    return lambda p, x: vjp(loss, p, x)
