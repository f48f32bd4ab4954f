"""`torch.cond`, `while_loop`, `scan`, `map` and nested regions on DTensors in compiled code, against one device."""

import copy

import pytest
import torch
from torch import nn
from torch._dynamo.exc import TorchDynamoException
from torch._higher_order_ops import map, scan, while_loop

from dtensor import (
    DTensor,
    OperatorError,
    Partial,
    Replicate,
    Shard,
    ShardingError,
    distribute_tensor,
    init_device_mesh,
)
from dtensor.compile import statistics
from dtensor.compile.backends.compare_ranks import overheard
from dtensor.parallel import ColwiseParallel, RowwiseParallel, fully_shard, parallelize_module
from dtensor.testing import with_ranks


def sign(x, w):
    """The second branch gives other placements than the first, and the sum that decides lies on all ranks."""
    return torch.cond(x.sum() > 0, lambda x, w: (x @ w).t() * 1, lambda x, w: ((x + 1) @ w).cos().t() * 2, (x, w))


def contracted(x, w):
    """A sum over the ranks leaves a branch as it is, partial, and a masked one stands beside it."""

    def yes(x, w):
        return x.t() @ (x @ w), x.masked_fill(mask == 0, 2.0)

    def no(x, w):
        return x.t() @ x @ w, x * 2

    mask = torch.ones(4).cumsum(0) > 2
    return torch.cond(w.sum() > 1e3, no, yes, (x, w))


def nested(x, w):
    def outer(x, w):
        return torch.cond(x.amax() > 1e3, lambda x: x * 2, lambda x: x - x.mean(0), (x @ w,))

    return torch.cond(x.amin() < 1e3, outer, lambda x, w: x @ w, (x, w))


def until(x, w):
    """Until a norm is small enough: the condition needs all ranks."""
    start = x.sum(0)
    return while_loop(lambda k, s: s.norm() > 0.5, lambda k, s: (k + 1, (s @ w) * 0.2), (torch.tensor(0), start))


def summed(x, w):
    return scan(lambda carry, row: ((carry + row) @ w, carry * row), x.sum(0), x)


def by_row(x, w):
    return map(lambda row, w: (row @ w).relu(), x, w)


@torch.compiler.nested_compile_region
def block(x, w):
    return torch.tanh(x @ w)


def regions(x, w):
    return block(block(x, w), w)


EVERY = {f.__name__: f for f in (sign, contracted, nested, until, summed, by_row, regions)}


def whole(x):
    return x.full_tensor() if isinstance(x, DTensor) else x


def check(name, mesh, placements, inner, *, sizes=(6,), dynamic=False):
    torch.compiler.reset()
    torch.manual_seed(0)
    fn = EVERY[name]
    ours = torch.compile(fn, backend="dtensor", fullgraph=True, dynamic=dynamic, options={"inner": inner})
    for n in sizes:
        for factor in (1, -1):
            given = [factor * torch.randn(n, 4, dtype=torch.float64), torch.randn(4, 4, dtype=torch.float64)]
            placed = [distribute_tensor(t, mesh, p) for t, p in zip(given, placements)]
            for t in (*given, *placed):
                t.requires_grad_()
            found, expected = ours(*placed), torch.compile(fn, backend="aot_eager", fullgraph=True)(*given)
            found, expected = (x if isinstance(x, tuple) else (x,) for x in (found, expected))
            assert len(found) == len(expected)
            for a, b in zip(found, expected):
                torch.testing.assert_close(whole(a), b)
            for results in (found, expected):
                sum(x.square().sum() for x in results if x.requires_grad).backward()
            for a, b in zip(placed, given):
                torch.testing.assert_close(a.grad.full_tensor(), b.grad)


BY_DAY = ("sign", "by_row")


@pytest.mark.parametrize("name", [n if n in BY_DAY else pytest.param(n, marks=pytest.mark.nightly) for n in EVERY])
@with_ranks(2)
def test_against_one_device(rank, name):
    check(name, init_device_mesh("cpu", (2,)), ([Shard(0)], [Shard(1)]), "aot_eager")


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["summed", "sign"])
@with_ranks(2)
def test_uneven_shards_of_any_length(rank, name):
    check(name, init_device_mesh("cpu", (2,)), ([Shard(0)], [Replicate()]), "aot_eager", sizes=(5, 4), dynamic=True)


@pytest.mark.nightly
@pytest.mark.parametrize("name", EVERY)
@with_ranks(4)
def test_by_inductor_on_two_axes(rank, name):
    check(name, init_device_mesh("cpu", (2, 2)), ([Shard(0), Shard(0)], [Shard(1), Replicate()]), "inductor")


def refused(fn, what, *given):
    """The error is one of this library, or one of Dynamo that tells what it says."""
    with pytest.raises((TorchDynamoException, ShardingError), match=what):
        torch.compile(fn, backend="dtensor", fullgraph=True, options={"inner": "aot_eager"})(*given)


def test_what_cannot_be_says_what_to_write(fake_mesh):
    mesh = fake_mesh(2)
    x = distribute_tensor(torch.randn(4, 4), mesh, [Shard(0)])

    def shapes(x):
        return torch.cond(x.sum() > 0, lambda x: x * 1, lambda x: x[:2] * 1, (x,))

    def mixed(x):
        return while_loop(lambda i, s: i < 3, lambda i, s: (i + 1, s + x), (torch.tensor(0), torch.zeros(4, 4)))

    refused(shapes, "both must have the same shape", x)
    refused(mixed, "distribute_tensor", x)
    with pytest.raises(OperatorError, match="local_map"):
        torch.ops.higher_order.out_dtype(torch.ops.aten.mm.default, torch.float32, x, x)


def test_a_carried_value_is_not_partial(fake_mesh):
    """Otherwise each run of the body would sum it over the ranks, and take it apart again."""
    mesh = fake_mesh(2)
    x = DTensor.from_local(torch.randn(4, 4), mesh, [Partial()])
    loop = torch.compile(
        lambda x: while_loop(lambda i, s: i < 3, lambda i, s: (i + 1, s.cos()), (torch.tensor(0), x))[1],
        backend="dtensor",
        fullgraph=True,
        options={"inner": "aot_eager"},
    )
    assert loop(x).placements == (Replicate(),)


@pytest.mark.parametrize("inner", ["aot_eager", pytest.param("inductor", marks=pytest.mark.nightly)])
def test_passes_and_the_agreement_work_in_branches(fake_mesh, inner):
    """A gather that is cut again is none, one that is needed is told to the others. Records have the whole alone."""
    x = distribute_tensor(torch.randn(4, 4), fake_mesh(2), [Shard(0)])

    def there_and_back(x):
        return x.redistribute(placements=[Replicate()]).redistribute(placements=[Shard(0)]) * 2

    def gathered(x):
        return x.redistribute(placements=[Replicate()]).cumsum(0).redistribute(placements=[Shard(0)])

    def fn(x):
        return torch.cond(x.sum() > 0, there_and_back, gathered, (x,))

    with overheard() as heard, statistics() as s:
        torch.compile(fn, backend="dtensor", fullgraph=True, options={"inner": inner})(x)
    assert [[what.split()[0] for _, what in sent] for sent in heard if sent] == [["all_gather"], ["all_reduce"]]
    assert [r.direction for r in s.records if r.direction != "joint"] == ["inference"]


class Branching(nn.Module):
    """A block in a branch, and a loop: what a style in them uses beside tensors is its mesh."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 10), nn.Linear(10, 6)

    def block(self, x):
        return self.norm(x + self.down(torch.relu(self.up(x))))

    def forward(self, x):
        x = torch.cond(x.square().mean() > 0.9, self.block, torch.sin, (x,))
        start = (torch.tensor(0), x)
        return while_loop(lambda i, _: i < 2, lambda i, x: (i + 1, x * 0.5 + x.mean(-1, keepdim=True)), start)[1]


@pytest.mark.parametrize(
    ("how", "sizes"),
    [
        ("styles", (6, 6)),  # of other sizes is a loop in the test above
        pytest.param("styles", (6, 5), marks=pytest.mark.nightly),
        pytest.param("fully_shard", (6, 5), marks=pytest.mark.nightly),
    ],
)
@with_ranks(2)
def test_a_model_with_branches_and_batches_of_any_size(rank, how, sizes):
    torch.manual_seed(0)
    mesh, reference = init_device_mesh("cpu", (2,)), Branching().double()
    model = copy.deepcopy(reference)
    if how == "styles":
        parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    else:
        fully_shard(model, mesh)
    compiled = torch.compile(model, backend="dtensor", fullgraph=True, options={"inner": "aot_eager"})
    for n, factor in zip(sizes, (2, 0.1)):
        x = (factor * torch.randn(n, 6, dtype=torch.float64)).requires_grad_()
        for m, run in ((reference, reference), (model, compiled)):
            m.zero_grad()
            run(x).square().mean().backward()
        for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
            if q.grad is None:
                assert p.grad is None or not whole(p.grad).any(), name
            else:
                torch.testing.assert_close(whole(p.grad), q.grad)
