"""Gradients of gradients as users write them, through every style and through units of fully_shard: the penalty on a
gradient by the input, the Hessian times a vector, and a step of MAML. Each is compared with one device."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from dtensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh, local_map
from dtensor.parallel import (
    ColwiseParallel,
    MixedPrecisionPolicy,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    fully_shard,
    input_reshard,
    parallelize_module,
)
from dtensor.testing import with_threads

IDS = torch.tensor([[1, 4, 2], [0, 3, 1], [5, 2, 2], [1, 0, 4]])


class Net(nn.Module):
    """Tokens are embedded and go through a norm and an MLP; `shift`, (batch, tokens, features), is added to them."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(6, 4)
        self.norm = nn.LayerNorm(4)
        self.up = nn.Linear(4, 6)
        self.act = nn.Tanh()
        self.down = nn.Linear(6, 4, bias=False)

    def forward(self, ids, shift):
        x = self.table(ids) + shift
        return x + self.down(self.act(self.up(self.norm(x))))


def make():
    return copy.deepcopy(NET)


def _net():
    net = Net().double()
    for k, p in enumerate(net.parameters()):
        p.data = torch.sin(torch.arange(p.numel()) * 1.7 + k).view(p.shape).double()
    return net


NET = _net()
"""Made once: ranks that are threads share one generator."""


def shifts(rows=slice(None)):
    values = torch.sin(torch.arange(48, dtype=torch.float64)).view(4, 3, 4)
    return values[rows].clone().requires_grad_()


def plain(x):
    return x.full_tensor() if isinstance(x, DTensor) else x


def loss_of(model, ids, shift, call=None):
    out = (call or model)(ids, shift)
    return (plain(out) ** 2).mean()


def penalty(model, ids, shift):
    """A penalty on the gradient by the input; of each sample's own, so that parts of a batch may be averaged."""
    out = plain(model(ids, shift))
    (g,) = torch.autograd.grad((out**2).sum(), shift, create_graph=True)
    ((g**2).mean() + (out**2).mean()).backward()
    return [g, *(p.grad for p in model.parameters())]


def hessian_vector(model, ids, shift):
    """The Hessian of the loss by the parameters, times a vector."""
    parameters = list(model.parameters())
    first = torch.autograd.grad(loss_of(model, ids, shift), parameters, create_graph=True)
    product = sum(plain((g * g.detach().cos()).sum()) for g in first)
    return [*first, *torch.autograd.grad(product, parameters)]


def maml(model, ids, shift):
    """The gradient, by the parameters, of the loss after a step of gradient descent."""
    named = dict(model.named_parameters())
    first = torch.autograd.grad(loss_of(model, ids, shift), list(named.values()), create_graph=True)
    stepped = {name: p - 0.3 * g for (name, p), g in zip(named.items(), first)}
    after = loss_of(model, ids, shift * 2, call=lambda *a: functional_call(model, stepped, a))
    return list(torch.autograd.grad(after, list(named.values())))


USES = {"penalty": penalty, "hessian_vector": hessian_vector, "maml": maml}

TO_SEQUENCE = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1))
STYLES = {
    "colwise, rowwise": {"up": ColwiseParallel(), "down": RowwiseParallel()},
    "DTensors between": {
        "up": ColwiseParallel(use_local_output=False),
        "act": PrepareModuleInput(input_layouts=Shard(-1), desired_input_layouts=Shard(-1), use_local_output=True),
        "down": RowwiseParallel(),
    },
    "table by rows": {"table": RowwiseParallel(), "up": ColwiseParallel(output_layouts=Replicate())},
    "table by features": {
        "table": ColwiseParallel(output_layouts=Replicate()),
        "down": RowwiseParallel(input_layouts=Replicate()),
    },
    "sequence": {"norm": [TO_SEQUENCE, SequenceParallel()], "up": ColwiseParallel(), "down": RowwiseParallel()},
    "norm on a sequence": {
        "norm": [
            TO_SEQUENCE,
            SequenceParallel(),
            PrepareModuleOutput(output_layouts=Shard(1), desired_output_layouts=Replicate()),
        ],
    },
    "inputs and outputs": {
        "act": PrepareModuleInputOutput(
            input_layouts=Replicate(),
            desired_input_layouts=Shard(1),
            output_layouts=Shard(1),
            desired_output_layouts=Replicate(),
        ),
    },
}


def parallelized(mesh, plan):
    model = make()
    for name, styles in plan.items():
        for style in styles if isinstance(styles, list) else [styles]:
            parallelize_module(model, mesh, {name: style})
    return model


def expected(use):
    return use(make(), IDS, shifts())


def check(found, wanted, **tolerances):
    given = tolerances or {"rtol": 1e-8, "atol": 1e-11}
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(plain(one).detach(), other.detach(), check_dtype=False, **given)


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("plan", STYLES)
@with_threads(2)
def test_styles(rank, plan, use):
    model = parallelized(init_device_mesh("cpu", (2,)), STYLES[plan])
    check(USES[use](model, IDS, shifts()), expected(USES[use]))


@pytest.mark.parametrize("use", USES)
@with_threads(2)
def test_resharded_activations(rank, use):
    mesh = init_device_mesh("cpu", (2,))
    model = parallelized(mesh, STYLES["DTensors between"])
    for part in (model.norm, model.up, model.down):
        input_reshard(part, mesh, 1)
    check(USES[use](model, IDS, shifts()), expected(USES[use]))


@pytest.mark.parametrize("use", ["penalty", "hessian_vector"])
@with_threads(2)
def test_checkpointed(rank, use):
    model = parallelized(init_device_mesh("cpu", (2,)), STYLES["colwise, rowwise"])
    inner = model.forward
    model.forward = lambda *args: checkpoint(inner, *args, use_reentrant=False)
    check(USES[use](model, IDS, shifts()), expected(USES[use]))


UNITS = {
    "one axis": ((4,), {}),
    "kept": ((4,), {"reshard_after_forward": False}),
    "dimension 1": ((4,), {"shard_placement_fn": lambda p: Shard(p.dim() - 1)}),
    "hybrid": ((2, 2), {}),
    "replicas": ((4, 1), {}),
}


def part(mesh):
    """The rows of the batch that are this rank's."""
    each = 4 // mesh.size()
    first = mesh.get_local_rank(0) * each * (mesh.size(1) if mesh.ndim == 2 else 1)
    first += mesh.get_local_rank(1) * each if mesh.ndim == 2 else 0
    return slice(first, first + each)


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("kind", UNITS)
@with_threads(4)
def test_units_of_fully_shard(rank, kind, use):
    """Each rank differentiates the loss of its own samples."""
    shape, options = UNITS[kind]
    mesh = init_device_mesh("cpu", shape)
    model = make()
    fully_shard(model.up, mesh, **options)
    fully_shard(model, mesh, **options)
    rows = part(mesh)
    found, wanted = USES[use](model, IDS[rows], shifts(rows)), expected(USES[use])
    if use == "penalty":
        torch.testing.assert_close(found.pop(0), wanted.pop(0)[rows])
    check(found, wanted)


@pytest.mark.parametrize("use", ["hessian_vector", "maml"])
@with_threads(2)
def test_fully_sharded_with_global_activations(rank, use):
    mesh = init_device_mesh("cpu", (2,))
    model = fully_shard(make(), mesh, activations="global")
    ids, shift = (distribute_tensor(v.detach(), mesh, [Shard(0)]) for v in (IDS, shifts()))
    check(USES[use](model, ids, shift), expected(USES[use]))


@pytest.mark.parametrize("use", USES)
@with_threads(4)
def test_fully_sharded_and_tensor_parallel(rank, use):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = parallelized(mesh["tp"], STYLES["colwise, rowwise"])
    fully_shard(model, mesh["dp"])
    rows = part(mesh["dp"])
    found, wanted = USES[use](model, IDS[rows], shifts(rows)), expected(USES[use])
    if use == "penalty":
        torch.testing.assert_close(found.pop(0), wanted.pop(0)[rows])
    check(found, wanted)


@with_threads(2)
def test_mixed_precision(rank):
    """Computed in float32 and reduced in float64, the Hessian times a vector is right to the digits of float32."""
    mesh = init_device_mesh("cpu", (2,))
    model = make()
    policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float64)
    fully_shard(model, mesh, mp_policy=policy)
    rows = part(mesh)
    found = hessian_vector(model, IDS[rows], shifts(rows))
    assert {g.dtype for g in found} == {torch.float64}
    check(found, expected(hessian_vector), rtol=1e-4, atol=1e-6)


@with_threads(2)
def test_accumulated_gradients_keep_their_graph(rank):
    """What is reduced at the end of a cycle of backwards with create_graph can be differentiated, as on one device."""
    mesh = init_device_mesh("cpu", (2,))

    def twice(model, first, second, sync):
        for ids, shift, last in ((*first, False), (*second, True)):
            sync(last)
            loss_of(model, ids, shift).backward(create_graph=True)
        grads = [p.grad for p in model.parameters()]
        for p in model.parameters():
            p.grad = None
        return [*grads, *torch.autograd.grad(sum(plain((g**2).sum()) for g in grads), list(model.parameters()))]

    wanted = twice(make(), (IDS, shifts()), (IDS, shifts() * 2), lambda on: None)
    model = fully_shard(make(), mesh)
    rows = part(mesh)
    found = twice(model, (IDS[rows], shifts(rows)), (IDS[rows], shifts(rows) * 2), model.set_requires_gradient_sync)
    assert all(g.requires_grad for g in found[: len(found) // 2])
    check(found, wanted)


@with_threads(2)
def test_local_map(rank):
    mesh = init_device_mesh("cpu", (2,))
    rows = local_map(torch.mm, [Shard(0)], ([Shard(0)], [Replicate()]), (None, [Partial()]))
    values = shifts().detach()[:, 0], shifts().detach()[0, :, :].t().contiguous()

    def run(mm, x, w):
        first = torch.autograd.grad((mm(x, w) ** 3).sum(), (x, w), create_graph=True)
        return [*first, *torch.autograd.grad(sum((plain(g) ** 2).sum() for g in first), (x, w))]

    x, w = (distribute_tensor(v, mesh, [p]).requires_grad_() for v, p in zip(values, (Shard(0), Replicate())))
    check(run(rows, x, w), run(torch.mm, *(v.clone().requires_grad_() for v in values)))


def test_copies_of_a_model_are_differentiated_apart(fake_mesh):
    model = fully_shard(make(), fake_mesh(2))
    other = copy.deepcopy(model)
    g = torch.autograd.grad(F.mse_loss(other(IDS, shifts()), shifts()), list(other.parameters()), create_graph=True)
    assert all(p.requires_grad for p in g)
    assert not any(
        torch.autograd.grad(sum(plain((p**2).sum()) for p in g), list(model.parameters()), allow_unused=True)
    )
