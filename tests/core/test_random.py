"""Random numbers: every placement gives those that one device gives with the same seed.

On real processes, as ranks that are threads share one generator.
"""

import itertools

import torch
import torch.nn.functional as F
from torch import nn

import dtensor
from dtensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from dtensor.layout import Layout
from dtensor.placements import as_placements
from dtensor.sampling import sample
from dtensor.spec import Spec, contiguous_stride
from dtensor.testing import with_ranks

SHAPES = [(8, 4), (5, 3), (1, 7), (3, 1, 6)]

DRAWS = {
    "bernoulli_": lambda x: x.bernoulli_(0.3),
    "uniform_": lambda x: x.uniform_(-1, 2),
    "normal_": lambda x: x.normal_(1, 3),
    "exponential_": lambda x: x.exponential_(2.0),
    "random_": lambda x: x.random_(0, 9),
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "randint_like": lambda x: torch.randint_like(x, 9),
    "dropout": lambda x: F.dropout(x, 0.4),
    "native_dropout": lambda x: torch.native_dropout(x, 0.4, True)[0],
    "dropout 1": lambda x: F.dropout(x, 1.0),
    "bernoulli of probabilities": lambda x: torch.bernoulli(x),
    "normal of means": lambda x: torch.normal(x, 2.0),
    "rand_like transposed": lambda x: torch.rand_like(x.transpose(0, 1)),
    "xavier_uniform_": nn.init.xavier_uniform_,
    "xavier_normal_": nn.init.xavier_normal_,
    "kaiming_uniform_": nn.init.kaiming_uniform_,
    "trunc_normal_": nn.init.trunc_normal_,
    "two draws": lambda x: x.uniform_() + torch.randn_like(x),
}


def same_numbers(mesh, shape, placements):
    for name, draw in DRAWS.items():
        values = torch.linspace(0, 1, torch.Size(shape).numel()).view(shape)
        torch.manual_seed(7)
        expected = draw(values.clone())
        after = torch.rand(3)
        placed = distribute_tensor(values, mesh, placements)
        torch.manual_seed(7)
        found = draw(placed)
        where = (name, shape, placements)
        assert torch.equal(torch.rand(3), after), f"{where}: the generator is elsewhere afterwards"
        assert torch.equal(found.full_tensor(), expected), where


def same_factories(mesh, shape, placements):
    for ours, theirs in ((dtensor.rand, torch.rand), (dtensor.randn, torch.randn)):
        torch.manual_seed(3)
        expected, after = theirs(shape), torch.rand(3)
        torch.manual_seed(3)
        found = ours(shape, device_mesh=mesh, placements=placements)
        assert torch.equal(torch.rand(3), after)
        assert found.placements == tuple(placements)
        assert torch.equal(found.full_tensor(), expected), (shape, placements)


def same_blocks(mesh, placements):
    """Walking the generator in small blocks gives the numbers of one call, for tails of every length."""
    shapes = [(17,), (16,), (31,), (33,), (100,), (5, 13), (9, 3, 5), (129,)]
    for shape, block, draw in itertools.product(shapes, (16, 32, 48), (torch.rand, torch.randn)):
        for dim in range(len(shape)):
            chosen = [Shard(dim) if p == Shard(0) else p for p in placements]
            layout = Layout.of(as_placements(chosen, mesh.ndim, len(shape)), len(shape))
            spec = Spec.make(mesh, layout, shape, contiguous_stride(shape), torch.float32)
            torch.manual_seed(5)
            expected, after = draw(shape), torch.rand(2)
            torch.manual_seed(5)
            local = sample(draw, spec, block)
            assert torch.equal(torch.rand(2), after), (shape, block, draw)
            found = DTensor(local, mesh, layout, shape, spec.stride)
            assert torch.equal(found.full_tensor(), expected), (shape, block, draw, chosen)


def dropout_with_gradient(mesh, placements):
    x = torch.linspace(1, 2, 40).view(8, 5)
    leaf = x.clone().requires_grad_()
    torch.manual_seed(1)
    F.dropout(leaf, 0.5).square().sum().backward()
    placed = distribute_tensor(x, mesh, placements).requires_grad_()
    torch.manual_seed(1)
    F.dropout(placed, 0.5).square().sum().backward()
    assert torch.equal(placed.grad.full_tensor(), leaf.grad)


def attention_with_dropout(mesh, placements):
    q, k, v = (torch.linspace(0, i + 1, 2 * 4 * 3 * 8).sin().view(2, 4, 3, 8) for i in range(3))
    torch.manual_seed(1)
    expected = F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
    torch.manual_seed(1)
    found = F.scaled_dot_product_attention(*(distribute_tensor(x, mesh, placements) for x in (q, k, v)), dropout_p=0.5)
    torch.testing.assert_close(found.full_tensor(), expected)


@with_ranks(2, timeout=90)
def test_on_two_ranks(rank):
    mesh = init_device_mesh("cpu", (2,))
    for shape in SHAPES:
        for p in [Replicate(), *map(Shard, range(len(shape)))]:
            same_numbers(mesh, shape, [p])
            same_factories(mesh, shape, [p])
    for p in (Replicate(), Shard(0)):
        same_blocks(mesh, [p])
    for p in (Replicate(), Shard(0), Shard(1)):
        dropout_with_gradient(mesh, [p])
        attention_with_dropout(mesh, [p])
    parts = DTensor.from_local(torch.ones(4) * rank, mesh, [Partial()])
    torch.manual_seed(2)
    expected = torch.rand(4)
    torch.manual_seed(2)
    assert torch.equal(torch.rand_like(parts).full_tensor(), expected)
    torch.manual_seed(2)
    assert torch.equal(parts.uniform_().full_tensor(), expected)
    assert parts.placements == (Partial(),)


@with_ranks(4, timeout=90)
def test_on_two_axes(rank):
    mesh = init_device_mesh("cpu", (2, 2))
    for shape in SHAPES[:2]:
        for placements in ([Shard(0), Shard(1)], [Shard(0), Shard(0)], [Replicate(), Shard(1)]):
            same_numbers(mesh, shape, placements)
            same_factories(mesh, shape, placements)
    same_blocks(mesh, [Shard(0), Shard(0)])
    dropout_with_gradient(mesh, [Shard(0), Shard(1)])
    attention_with_dropout(mesh, [Shard(0), Shard(1)])
