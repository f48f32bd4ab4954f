"""Gradients of gradients: at the borders, through every redistribution, hooks, transforms, and where there are none."""

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import func, nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from dtensor import (
    DTensor,
    MixedTensorError,
    Partial,
    Replicate,
    Shard,
    ShardingError,
    distribute_tensor,
    init_device_mesh,
)
from dtensor.parallel import linear_cross_entropy
from dtensor.testing import with_ranks, with_threads

VALUES = torch.arange(1.0, 16.0, dtype=torch.float64).view(5, 3) / 7
WEIGHTS = torch.cos(torch.arange(15.0, dtype=torch.float64)).view(5, 3)


def penalised(loss, inputs):
    """First derivatives by the inputs, and those of their squares' sum."""
    first = torch.autograd.grad(loss, inputs, create_graph=True)
    second = torch.autograd.grad(sum(as_plain((g * g).sum()) for g in first), inputs, materialize_grads=True)
    return [as_plain(g).detach() for g in (*first, *second)]


def as_plain(x):
    return x.full_tensor() if isinstance(x, DTensor) else x


def move(x, text):
    return torch.ops.dtensor.redistribute(x, text, False)


def assert_all_close(found, expected):
    assert len(found) == len(expected)
    for one, other in zip(found, expected):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def on_one_device(program, *values):
    leaves = [v.clone().requires_grad_() for v in values]
    return penalised(program(*leaves), leaves)


@with_threads(2)
def test_a_gradient_penalty_through_full_tensor(rank):
    mesh = init_device_mesh("cpu", (2,))
    x, w = (distribute_tensor(v, mesh, [Shard(0)]).requires_grad_() for v in (VALUES, WEIGHTS))
    y = (x * w).full_tensor()
    (g,) = torch.autograd.grad((y * y).sum(), x, create_graph=True)
    g.sum().backward()
    torch.testing.assert_close(w.grad.full_tensor(), 4 * VALUES * WEIGHTS)
    torch.testing.assert_close(x.grad.full_tensor(), 2 * WEIGHTS**2)


LAYOUTS = ["S(0)S(0)", "S(0)#1S(0)#0", "S(1)#1S(1)#0", "S(0)S(1)", "S(1)R", "RS(0)", "RR", "PR", "PS(1)", "PP"]


def placed(mesh, text):
    """`VALUES` in a layout, as a leaf."""
    at = text.replace("P", "R")
    x = move(distribute_tensor(VALUES, mesh, [Replicate(), Replicate()]), at)
    if at != text:
        x = x.to_local()
        partial = [axis for axis in range(2) if text.replace("S(1)", "S")[axis] == "P"]
        x = torch.where(torch.tensor(any(mesh.get_local_rank(a) for a in partial)), x * 0, x)
        where = [Partial() if axis in partial else Shard(1) if "S" in text else Replicate() for axis in range(2)]
        x = DTensor.from_local(x, mesh, where, shape=VALUES.shape, stride=VALUES.stride())
    assert x._spec.layout.text == text
    return x.detach().requires_grad_()


@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.nightly)])
@with_threads(4)
def test_every_redistribution(rank, every):
    """From any layout to any other, local and whole; sizes do not divide, and two axes cut in both orders.

    By day a seventh of the pairs."""
    mesh = init_device_mesh("cpu", (2, 2))
    expected = on_one_device(lambda x, w: ((x * w) ** 3).sum(), VALUES, WEIGHTS)
    for src, dst in list(product(LAYOUTS, repeat=2))[::every]:
        if "P" in dst and dst != src:
            continue
        x, w = placed(mesh, src), distribute_tensor(WEIGHTS, mesh, [Shard(0), Replicate()]).requires_grad_()
        y = move(move(x, dst) * w, dst.replace("P", "R"))
        assert_all_close(penalised((y**3).sum(), (x, w)), expected)
        y = move(move(x, dst) * w, dst.replace("P", "R"))
        assert_all_close(penalised((y.full_tensor() ** 3).sum(), (x, w)), expected)
        if "#" not in dst:
            y = move(move(x, dst) * w, dst.replace("P", "R"))
            y = DTensor.from_local(y.to_local() ** 3, mesh, y.placements, shape=y.shape, stride=y.stride())
            assert_all_close(penalised(y.sum(), (x, w)), expected)


@with_threads(4)
def test_the_gradient_of_a_local_tensor_keeps_the_order_of_axes(rank):
    mesh = init_device_mesh("cpu", (2, 2))
    for text in ("S(0)#1S(0)#0", "S(0)S(0)"):
        x = placed(mesh, text)
        (g,) = torch.autograd.grad((x.to_local() ** 3).sum(), x, create_graph=True)
        assert g._spec.layout.text == text
        torch.testing.assert_close(g.full_tensor(), 3 * VALUES**2)
        (h,) = torch.autograd.grad((g.to_local() ** 2).sum(), x)
        assert h._spec.layout.text == text
        torch.testing.assert_close(h.full_tensor(), 36 * VALUES**3)


@pytest.mark.parametrize("placement", [Shard(0), Replicate(), Partial(), Partial("avg")], ids=str)
@with_threads(2)
def test_from_local(rank, placement):
    """The second derivative by what each rank put in, of x³ with x what the ranks' tensors stand for."""
    mesh = init_device_mesh("cpu", (2,))
    local = (VALUES[:4, 0] + (rank if isinstance(placement, (Shard, Partial)) else 0)).requires_grad_()
    x = DTensor.from_local(local, mesh, [placement])
    (g,) = torch.autograd.grad((x**3).sum(), local, create_graph=True)
    (h,) = torch.autograd.grad((g**2).sum(), local)
    whole = x.full_tensor().detach()
    mine = whole[4 * rank : 4 * rank + 4] if isinstance(placement, Shard) else whole
    share = 0.5 if placement.is_partial("avg") else 1.0
    torch.testing.assert_close(g.detach(), 3 * mine**2 * share)
    torch.testing.assert_close(h, 36 * mine**3 * share**3)


@with_threads(2)
def test_to_local_with_grad_placements(rank):
    """Each rank works on a replicated tensor in its own way; the loss is the sum of the ranks' losses."""
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(VALUES, mesh, [Replicate()]).requires_grad_()
    y = x.to_local(grad_placements=[Partial()])
    (g,) = torch.autograd.grad((y ** (rank + 2)).sum(), x, create_graph=True)
    (h,) = torch.autograd.grad((g.redistribute(placements=[Replicate()]) ** 2).sum(), x)
    dense = VALUES.clone().requires_grad_()
    (dense_g,) = torch.autograd.grad((dense**2 + dense**3).sum(), dense, create_graph=True)
    (dense_h,) = torch.autograd.grad((dense_g**2).sum(), dense)
    torch.testing.assert_close(g.full_tensor(), dense_g)
    torch.testing.assert_close(h.full_tensor(), dense_h)


def test_what_has_no_gradient_says_so(fake_mesh):
    local = VALUES[:, 0].clone().requires_grad_()
    x = DTensor.from_local(local, fake_mesh(2), [Partial("max")])
    with pytest.raises(ShardingError, match=r"gradient of from_local with Partial\(reduce_op='max'\) is not defined"):
        x.sum().backward()


@with_threads(2)
def test_three_times(rank):
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(VALUES, mesh, [Shard(0)]).requires_grad_()
    found = (x**4).full_tensor().sum()
    for _ in range(3):
        (g,) = torch.autograd.grad(found, x, create_graph=True)
        found = g.full_tensor().sum()
    torch.testing.assert_close(g.full_tensor(), 24 * VALUES)


def test_the_class_does_not_cut_a_graph(fake_mesh):
    mesh = fake_mesh(2)
    x = torch.ones(4, requires_grad=True)
    with pytest.raises(ShardingError, match=r"shape \[4\]\) would detach .*write DTensor.from_local"):
        DTensor(x * 2, mesh, [Shard(0)], (8,), (1,))
    assert DTensor(x.detach(), mesh, [Shard(0)], (8,), (1,)).shape == (8,)


def _mlp(x, w):
    return torch.tanh(x @ w).pow(2).mean()


@with_threads(2)
def test_hooks_and_retained_gradients(rank):
    mesh = init_device_mesh("cpu", (2,))

    def run(x, w, seen):
        y = (x * w).full_tensor() if isinstance(x, DTensor) else x * w
        y.retain_grad()
        x.register_hook(lambda g: seen.append(("x", as_plain(g).detach().clone())) or g * 2)
        w.register_post_accumulate_grad_hook(lambda p: seen.append(("w", as_plain(p.grad).detach().clone())))
        (y**3).sum().backward(create_graph=True)
        assert x.grad.requires_grad
        assert w.grad.requires_grad
        kept = y.grad
        assert kept.requires_grad
        loss = as_plain((x.grad * w.grad).sum()) + (kept**2).sum()
        x.grad = w.grad = None
        loss.backward()
        return [as_plain(t).detach() for t in (kept, x.grad, w.grad)]

    dense_seen, seen = [], []
    expected = run(VALUES.clone().requires_grad_(), WEIGHTS.clone().requires_grad_(), dense_seen)
    found = run(*(distribute_tensor(v, mesh, [Shard(0)]).requires_grad_() for v in (VALUES, WEIGHTS)), seen)
    assert_all_close(found, expected)
    assert sorted(n for n, _ in seen) == sorted(n for n, _ in dense_seen)
    for name in "xw":
        assert_all_close([g for n, g in seen if n == name], [g for n, g in dense_seen if n == name])


def _programs():
    g = torch.Generator().manual_seed(5)

    def normal(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=g)

    tokens = torch.randint(7, (4, 3), generator=g)
    classes = torch.randint(7, (5,), generator=g)
    x, table, rows = normal(4, 6, 5), normal(7, 5), normal(5, 5)
    return {
        "embedding": ((table,), lambda t, i: F.embedding(i, t).pow(3).sum(), tokens),
        "embedding with a padded row": ((table,), lambda t, i: F.embedding(i, t, padding_idx=2).pow(3).sum(), tokens),
        "linear_cross_entropy": (
            (rows, table, table[:, 0]),
            lambda x, w, b, c: linear_cross_entropy(x, w, c, b, chunk=2),
            classes,
        ),
        "linear_cross_entropy, smoothed, some ignored": (
            (rows, table),
            lambda x, w, c: linear_cross_entropy(x, w, c, label_smoothing=0.1, ignore_index=3, chunk=2),
            classes,
        ),
        "linear_cross_entropy of class weights": (
            (rows, table),
            lambda x, w, c: linear_cross_entropy(x, w, c, class_weight=w[:, 0].detach().abs(), reduction="sum"),
            classes,
        ),
        "cross_entropy": ((rows, table), lambda x, w, c: F.cross_entropy(x @ w.t(), c), classes),
        "group_norm": ((x, x[0, :, 0], x[0, :, 1]), lambda x, w, b: F.group_norm(x, 3, w, b).pow(3).sum()),
        "instance_norm": ((x, x[0, :, 0]), lambda x, w: F.instance_norm(x, weight=w).pow(3).sum()),
        "rms_norm": ((x, x[0, 0]), lambda x, w: F.rms_norm(x, (5,), w).pow(3).sum()),
        "layer_norm": ((x, x[0, 0], x[0, 1]), lambda x, w, b: F.layer_norm(x, (5,), w, b).pow(3).sum()),
        "batch_norm": ((x, x[0, :, 0]), lambda x, w: F.batch_norm(x, None, None, w, training=True).pow(3).sum()),
        "attention": ((x[None], x[None] * 2), lambda q, k: F.scaled_dot_product_attention(q, k, q + k).pow(2).sum()),
        "checkpoint": (
            (rows, table),
            lambda x, w: checkpoint(lambda x, w: torch.tanh(x @ w.t()), x, w, use_reentrant=False).pow(2).sum(),
        ),
    }


@pytest.fixture
def on_the_math_path():
    """The fused kernels have no second derivative. A setting of the process: ranks that are threads cannot make it."""
    with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
        yield


PROGRAMS = _programs()


def test_linear_cross_entropy_on_plain_tensors():
    """What the ranks are compared with is itself right."""
    (rows, table, bias), _, classes = PROGRAMS["linear_cross_entropy"]
    found = on_one_device(lambda x, w, b: linear_cross_entropy(x, w, classes, b, chunk=2), rows, table, bias)
    expected = on_one_device(lambda x, w, b: F.cross_entropy(F.linear(x, w, b), classes), rows, table, bias)
    assert_all_close(found, expected)


@pytest.mark.usefixtures("on_the_math_path")
@pytest.mark.parametrize("name", PROGRAMS)
@with_threads(2)
def test_operators_with_derivatives_of_their_own(rank, name):
    values, program, *rest = PROGRAMS[name]
    expected = on_one_device(lambda *leaves: program(*leaves, *rest), *values)
    mesh = init_device_mesh("cpu", (2,))
    for shift in range(3):
        where = [(Shard(0), Replicate(), Shard(v.dim() - 1))[(shift + k) % 3] for k, v in enumerate(values)]
        leaves = [distribute_tensor(v, mesh, [p]).requires_grad_() for v, p in zip(values, where)]
        constant = [distribute_tensor(r, mesh, [Shard(0) if shift else Replicate()]) for r in rest]
        found = penalised(as_plain(program(*leaves, *constant)), leaves)
        assert_all_close(found, expected)


def _forward_mode():
    v = VALUES[:4, :2]
    return {
        "redistribute": (
            lambda x: x.redistribute(placements=[Replicate()]),
            ShardingError,
            "does not support redistribute",
        ),
        "to_local": (lambda x: x.to_local(), ShardingError, "does not support to_local"),
        "full_tensor": (lambda x: x.full_tensor(), ShardingError, "forward-mode.*write torch.autograd.functional.jvp"),
        "a product with a constant": (
            lambda x: x * distribute_tensor(v, x.device_mesh, [Shard(0)]),
            MixedTensorError,
            "has no tangent, and forward-mode.* beside DTensors; write torch.autograd.functional.jvp",
        ),
        "linear_cross_entropy": (
            lambda x: linear_cross_entropy(x, x, torch.zeros(4, dtype=torch.int64)),
            ShardingError,
            "does not support linear_cross_entropy",
        ),
    }


@pytest.mark.filterwarnings("ignore:.*has no sharding rule")  # what torch asks of a tensor and its tangent
@pytest.mark.parametrize("name", _forward_mode())
def test_forward_mode_loses_no_tangent(fake_mesh, name):
    program, error, text = _forward_mode()[name]
    mesh = fake_mesh(2)
    x, t = (distribute_tensor(v[:4, :2], mesh, [Shard(0)]) for v in (VALUES, WEIGHTS))
    with forward_ad.dual_level():
        with pytest.raises(error, match=text):
            program(forward_ad.make_dual(x, t))
        with pytest.raises(ShardingError, match="does not support from_local"):
            DTensor.from_local(forward_ad.make_dual(x.to_local(), t.to_local()), x.device_mesh, [Shard(0)])


@pytest.mark.filterwarnings("ignore:.*has no sharding rule")
def test_forward_mode_where_operators_have_it(fake_mesh):
    mesh = fake_mesh(2)
    x, t = (distribute_tensor(v[:4, :2], mesh, [Shard(0)]) for v in (VALUES, WEIGHTS))
    with forward_ad.dual_level():
        out = forward_ad.unpack_dual(forward_ad.make_dual(x, t) ** 3).tangent
    torch.testing.assert_close(out.to_local(), (3 * VALUES**2 * WEIGHTS)[:2, :2])


FUNCTIONAL = {
    "grad of grad": lambda f, x, v: func.grad(lambda x: func.grad(f)(x).pow(2).sum())(x),
    "vjp": lambda f, x, v: func.vjp(func.grad(f), x)[1](v)[0],
    "jacrev": lambda f, x, v: func.jacrev(func.grad(f))(x),
    "hvp": lambda f, x, v: torch.autograd.functional.hvp(f, x, v)[1],
    "vhp": lambda f, x, v: torch.autograd.functional.vhp(f, x, v)[1],
    "jvp": lambda f, x, v: torch.autograd.functional.jvp(lambda x: torch.sin(x) * x, x, v)[1],
    "hessian": lambda f, x, v: torch.autograd.functional.hessian(f, x),
    "vmap": lambda f, x, v: func.vmap(func.grad(lambda x, v: (x**3 * v).sum()))(x, v),
}


@with_ranks(2)
def test_functional_transforms(rank):
    """On processes, as levels of transforms are of the whole process."""
    mesh = init_device_mesh("cpu", (2,))

    def program(x):
        return (torch.tanh(x @ x.t()) ** 2).sum()

    for transform in FUNCTIONAL.values():
        expected = transform(program, VALUES, WEIGHTS)
        for placement in (Shard(0), Shard(1), Replicate()):
            x, v = (distribute_tensor(t, mesh, [placement]) for t in (VALUES, WEIGHTS))
            torch.testing.assert_close(transform(program, x, v).full_tensor(), expected)
