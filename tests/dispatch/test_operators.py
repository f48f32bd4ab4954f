"""Operators of a transformer on ranks: every placement of every operand, forward and backward, against dense torch."""

import itertools
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dtensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from dtensor.testing import ShardingConverter, with_ranks, with_threads


def t(*shape):
    generator = torch.Generator().manual_seed(sum(shape) + 31 * len(shape))
    return torch.rand(shape, generator=generator, dtype=torch.float64).sub_(0.4).requires_grad_()


def ids(high, *shape):
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(high))


def cross_entropy(**options):
    return lambda x, y: F.cross_entropy(x, y, **options)


def weighted(**options):
    return lambda x, y, w: F.cross_entropy(x, y, w, **options)


def chunked(x):
    q, k = x.chunk(2, -1)
    return q * k


TABLE = {
    "linear 2-D": (F.linear, t(5, 4), t(3, 4), t(3)),
    "linear 3-D": (F.linear, t(2, 5, 4), t(6, 4), t(6)),
    "linear without bias": (F.linear, t(2, 3, 4), t(6, 4)),
    "matmul": (torch.matmul, t(5, 4), t(4, 3)),
    "matmul batched": (torch.matmul, t(2, 3, 4), t(2, 4, 3)),
    "matmul broadcast": (torch.matmul, t(2, 1, 3, 4), t(5, 4, 2)),
    "matmul vector": (torch.matmul, t(2, 3, 4), t(4)),
    "embedding": (lambda w, i: F.embedding(i, w, padding_idx=2), t(7, 4), ids(7, 3, 5)),
    "embedding tiny": (lambda w, i: F.embedding(i, w), t(1, 4), ids(1, 3)),
    "embedding by frequency": (lambda w, i: F.embedding(i, w, scale_grad_by_freq=True), t(5, 2), ids(5, 6)),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (4,), w, b), t(3, 5, 4), t(4), t(4)),
    "rms_norm": (lambda x, w: F.rms_norm(x, (4,), w), t(3, 5, 4), t(4)),
    "gelu": (F.gelu, t(5, 3)),
    "gelu tanh": (lambda x: F.gelu(x, approximate="tanh"), t(5, 3)),
    "silu": (F.silu, t(5, 3)),
    "relu": (F.relu, t(5, 3)),
    "softmax": (lambda x: F.softmax(x, -1), t(3, 5)),
    "log_softmax": (lambda x: F.log_softmax(x, 0), t(3, 5)),
    "dropout p=0": (lambda x: F.dropout(x, 0.0), t(5, 3)),
    "dropout eval": (lambda x: F.dropout(x, 0.5, training=False), t(5, 3)),
    "add broadcast": (torch.add, t(5, 1, 4), t(3, 1)),
    "mul broadcast": (torch.mul, t(1, 4), t(3, 1)),
    "div": (lambda x, y: x / (y + 2), t(3, 4), t(4)),
    "plain scalar on the left": (lambda x: torch.tensor(2.0) / (x + 2), t(3, 4)),
    "where": (lambda x, y: torch.where(x > 0, x, y), t(3, 4), t(3, 1)),
    "mean": (lambda x: x.mean(1), t(3, 5)),
    "amax": (lambda x: x.amax(0), t(3, 5)),
    "logsumexp": (lambda x: x.logsumexp(-1), t(3, 5)),
    "var": (lambda x: x.var(0), t(3, 5)),
    "norm": (lambda x: torch.linalg.vector_norm(x, dim=1), t(3, 5)),
    "norm 3": (lambda x: torch.linalg.vector_norm(x, 3), t(3, 5)),
    "heads": (lambda x: x.view(2, 3, 4, 2).transpose(1, 2).reshape(2, 4, 6), t(2, 3, 8)),
    "flatten": (lambda x: x.flatten(0, 1) * 2, t(2, 3, 4)),
    "chunk": (chunked, t(3, 8)),
    "split": (lambda x: torch.cat([p * i for i, p in enumerate(x.split([1, 4], 1))], 1), t(3, 5)),
    "cat": (lambda x, y: torch.cat([x, y], 1), t(3, 2), t(3, 5)),
    "stack": (lambda x, y: torch.stack([x, y], 1), t(3, 2), t(3, 2)),
    "squeeze": (lambda x: x.squeeze() * 2, t(2, 1, 3)),
    "pad": (lambda x: F.pad(x, (1, 2)), t(3, 4)),
    "gather": (lambda x, i: x.gather(1, i), t(4, 5), ids(5, 4, 3)),
    "index_select": (lambda x, i: x.index_select(0, i), t(5, 3), ids(5, 4)),
    "tril": (torch.tril, t(4, 5)),
    "cumsum": (lambda x: x.cumsum(1), t(3, 5)),
    "masked_fill": (lambda x: x.masked_fill(x > 0, 0.0), t(3, 5)),
    "mse": (F.mse_loss, t(3, 5), t(3, 5)),
    "smooth_l1": (F.smooth_l1_loss, t(3, 5), t(3, 5)),
    "bce": (lambda x, y: F.binary_cross_entropy_with_logits(x, y.abs()), t(3, 5), t(3, 5).detach()),
    "softmax by hand": (lambda x: (x - x.amax(-1, True)).exp() / x.exp().sum(-1, True), t(3, 5)),
    "softplus (decomposed backward)": (lambda x: F.softplus(x) * F.hardswish(x), t(3, 5)),
    "logaddexp": (torch.logaddexp, t(3, 5), t(5)),
    "glu": (lambda x: F.glu(x, -1), t(3, 6)),
    "expand": (lambda x: x.expand(4, 3, 5) * 1, t(3, 1)),
    "outer": (torch.outer, t(3), t(5)),
    "cross_entropy": (cross_entropy(), t(5, 4), ids(4, 5)),
    "cross_entropy sum": (cross_entropy(reduction="sum"), t(5, 4), ids(4, 5)),
    "cross_entropy none": (cross_entropy(reduction="none"), t(5, 4), ids(4, 5)),
    "cross_entropy ignoring": (cross_entropy(ignore_index=2), t(6, 4), ids(4, 6)),
    "cross_entropy smoothed": (cross_entropy(label_smoothing=0.1), t(5, 4), ids(4, 5)),
    "cross_entropy weighted": (weighted(), t(5, 4), ids(4, 5), t(4).detach() + 1),
    "cross_entropy weighted smoothed": (weighted(label_smoothing=0.1), t(5, 4), ids(4, 5), t(4).detach() + 1),
    "cross_entropy of probabilities": (lambda x, y: F.cross_entropy(x, y.softmax(-1)), t(5, 4), t(5, 4)),
    "cross_entropy 3-D": (cross_entropy(), t(2, 4, 3), ids(4, 2, 3)),
}
"""Name -> (function, sample tensors)."""

TABLE_2D = ("linear 2-D", "matmul", "embedding", "layer_norm", "softmax", "cross_entropy", "cross_entropy sum", "heads")
TABLE_2D += ("mean", "flatten", "rms_norm", "gelu", "cat")


ON_PROCESSES = ("amax", "softmax by hand")
"""Those that reduce-scatter a maximum, which ranks that are threads cannot."""


def scalar(out):
    """A loss that gives every element its own gradient, of the same values on DTensors."""
    return (out * out).sum() + out.sum()


def check(fn, args, placed, what):
    leaves = [x.detach().clone().requires_grad_(x.requires_grad) for x in args]
    expected = fn(*leaves)
    scalar(expected).backward()
    out = fn(*placed)
    where = f"{what}: {[x.placements for x in placed]}"
    assert out.shape == expected.shape, where
    torch.testing.assert_close(out.full_tensor(), expected, msg=lambda m: f"{where}\n{m}")
    scalar(out).backward()
    for leaf, x in zip(leaves, placed):
        if leaf.requires_grad:
            assert x.grad.shape == x.shape
            torch.testing.assert_close(x.grad.full_tensor(), leaf.grad, msg=lambda m: f"{where} gradient\n{m}")


def sweep(mesh, names, limit):
    for name in names:
        fn, *args = TABLE[name]
        partial = all(x.dtype.is_floating_point for x in args)
        converter = ShardingConverter(mesh, tuple(args), {}, uneven=True, partial=partial)
        combinations = len(list(itertools.product(*map(converter.choices, args))))
        step = max(1, combinations // limit)
        choices = itertools.islice(itertools.product(*map(converter.choices, args)), 0, None, step)
        for placements in choices:
            placed = [converter._distributed(x, p) for x, p in zip(args, placements)]
            placed = [x.detach().requires_grad_(a.requires_grad) for x, a in zip(placed, args)]
            check(fn, args, placed, name)


MOST = [6, pytest.param(40, marks=pytest.mark.nightly)]
"""Placements of the operands of one call, by day and at night."""


@pytest.mark.parametrize("most", MOST)
@pytest.mark.parametrize("part", range(4))
@with_threads(2)
def test_every_placement(rank, part, most):
    sweep(init_device_mesh("cpu", (2,)), [name for name in TABLE if name not in ON_PROCESSES][part::4], most)


@with_ranks(2)
def test_every_placement_on_processes(rank):
    torch.set_num_threads(1)
    sweep(init_device_mesh("cpu", (2,)), ON_PROCESSES, 40)


@pytest.mark.parametrize("most", [4, pytest.param(12, marks=pytest.mark.nightly)])
@with_threads(4)
def test_on_two_axes(rank, most):
    sweep(init_device_mesh("cpu", (2, 2)), TABLE_2D, most)


OPTIMISERS = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)


def three_steps(parameters, data, make):
    optimiser = make(parameters)
    for step in range(3):
        optimiser.zero_grad()
        for p, x in zip(parameters, data):
            ((p - x * step) ** 2).sum().backward()
        optimiser.step()
    return [p.full_tensor() if isinstance(p, DTensor) else p for p in parameters]


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("kind", OPTIMISERS)
@with_threads(2)
def test_optimisers_on_mixed_parameters(rank, kind, foreach):
    mesh = init_device_mesh("cpu", (2,))
    options = {"momentum": 0.9, "nesterov": True} if kind is torch.optim.SGD else {"weight_decay": 0.1}

    def make(parameters):
        return kind(parameters, lr=0.1, foreach=foreach, **options)

    dense = [t(5, 3), t(3, 4), t(4), t(2, 2)]
    data = [x.detach() * 2 for x in dense]
    places = [[Shard(0)], [Shard(1)], [Replicate()]]
    expected = three_steps([nn.Parameter(x.detach().clone()) for x in dense], data, make)
    mixed = [nn.Parameter(distribute_tensor(x.detach(), mesh, p)) for x, p in zip(dense, places)]
    mixed.append(nn.Parameter(dense[3].detach().clone()))
    inputs = [distribute_tensor(x, mesh, p) for x, p in zip(data, places)] + [data[3]]
    found = three_steps(mixed, inputs, make)
    for a, b in zip(found, expected):
        torch.testing.assert_close(a, b)
    assert [p.placements for p in mixed[:3]] == [tuple(p) for p in places]


@pytest.mark.parametrize("foreach", [True, False, None])
@pytest.mark.parametrize("kind", [2.0, 1.0, float("inf")])
@with_threads(2)
def test_clip_grad_norm(rank, kind, foreach):
    mesh = init_device_mesh("cpu", (2,))
    dense, placed = [], []
    for shape, p in (((5, 3), Shard(0)), ((4, 4), Shard(1)), ((3,), Replicate())):
        value = t(*shape).detach()
        dense.append(nn.Parameter(value.clone()))
        placed.append(nn.Parameter(distribute_tensor(value, mesh, [p])))
        dense[-1].grad = value * 7
        placed[-1].grad = distribute_tensor(value * 7, mesh, [p])
    expected = nn.utils.clip_grad_norm_(dense, 0.5, kind, foreach=foreach)
    found = nn.utils.clip_grad_norm_(placed, 0.5, kind, foreach=foreach)
    torch.testing.assert_close(found.full_tensor(), expected)
    for a, b in zip(placed, dense):
        torch.testing.assert_close(a.grad.full_tensor(), b.grad)
        assert a.grad.placements == a.placements


@with_threads(2)
def test_whole_values(rank):
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
    assert x.sum().item() == 6.0
    assert x.max().item() == 3.0
    assert DTensor.from_local(torch.tensor(2.0), mesh, [Partial()]).item() == 4.0
    assert torch.equal(x, distribute_tensor(torch.arange(4.0), mesh, [Replicate()]))
    assert not torch.equal(x, x + 1)
    assert x.nonzero().full_tensor().tolist() == [[1], [2], [3]]
    assert bool((x.sum() == 6).all())


@torch.library.custom_op("dtensor_test::highest", mutates_args=())
def highest(x: torch.Tensor, count: int) -> torch.Tensor:
    """An operator that has no rule."""
    return x.sort(descending=True).values[:count].clone()


highest.register_fake(lambda x, count: x.new_empty(count))


def test_operator_without_a_rule_warns_once():
    @with_threads(1)
    def run(rank):
        mesh = init_device_mesh("cpu", (1,))
        x = distribute_tensor(torch.tensor([3.0, 1.0, 2.0, 1.0]), mesh, [Shard(0)])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                found = highest(x, 3)
        assert found.full_tensor().tolist() == [3.0, 2.0, 1.0]
        assert [str(w.message) for w in caught] == [
            "dtensor_test.highest.default has no sharding rule: its arguments are gathered and it runs on every "
            "rank; give it one "
            "with dtensor.register_sharding"
        ]

    run()


@with_threads(2)
def test_operator_without_a_rule_is_right(rank):
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(torch.tensor([3.0, 1.0, 2.0, 1.0]), mesh, [Shard(0)])
    assert highest(x, 2).full_tensor().tolist() == [3.0, 2.0]
    assert torch.multinomial(x, 1).shape == (1,)  # known to be whole: no warning


@with_threads(2)
def test_linear_operators_keep_partial_in_place(rank):
    mesh = init_device_mesh("cpu", (2,))
    x = DTensor.from_local(torch.ones(4) * (rank + 1), mesh, [Partial()])
    x.mul_(2).masked_fill_(distribute_tensor(torch.tensor([True, False, True, False]), mesh), 0)
    assert x.placements == (Partial(),)
    assert x.full_tensor().tolist() == [0.0, 6.0, 0.0, 6.0]


@with_threads(2)
def test_a_plain_scalar_divided_by_parts(rank):
    """1 / (a + b) is not 1 / a + 1 / b, whatever side of the operator the DTensor stands on."""
    mesh = init_device_mesh("cpu", (2,))
    x = DTensor.from_local(torch.ones(4) * (rank + 1), mesh, [Partial()])
    assert (torch.tensor(6.0) / x).full_tensor().tolist() == [2.0] * 4
    assert (x / torch.tensor(2.0)).placements == (Partial(),)


@pytest.mark.parametrize("ord", [2, 1, 3, 0, float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.complex64], ids=str)
@with_threads(2)
def test_norms_of_other_dtypes(rank, dtype, ord):
    """Squares of float16 overflow where torch's norm, which accumulates in float32, does not."""
    x = torch.tensor([300.0, -400.0, 0.0, 300.0, 350.0]).to(dtype)
    x = x * (1 - 1j) if dtype.is_complex else x
    mesh = init_device_mesh("cpu", (2,))
    for place in (Replicate(), Shard(0), Partial()):
        found = torch.linalg.vector_norm(distribute_tensor(x, mesh, [place]), ord)
        expected = torch.linalg.vector_norm(x, ord)
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found.full_tensor(), expected)
