"""ShardingConverter: the number of combinations worked out by hand, and the values of all of them."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from dtensor.layout.placements import Partial, Replicate, Shard
from dtensor.tensor.tensor import DTensor
from dtensor.testing import ShardingConverter, with_threads


def mesh_of(*sizes):
    return init_device_mesh("cpu", sizes, mesh_dim_names=("a", "b")[: len(sizes)])


@with_threads(2)
def test_choices_on_one_axis(rank):
    mesh = mesh_of(2)
    even, uneven, partial, replicate = (
        ShardingConverter(mesh, (), {}, **options).choices
        for options in ({}, {"uneven": True}, {"partial": True}, {"replicate_only": True})
    )
    x = torch.zeros(4, 3, 1)
    assert even(x) == [(Replicate(),), (Shard(0),)]
    assert uneven(x) == [(Replicate(),), (Shard(0),), (Shard(1),), (Shard(2),)]
    assert partial(x) == [(Replicate(),), (Shard(0),), (Partial(),)]
    assert replicate(x) == [(Replicate(),)]
    assert even(x.bool()) == [(Replicate(),)]
    assert even(torch.tensor(1.0)) == [(Replicate(),)]


@with_threads(4)
def test_choices_on_two_axes(rank):
    choices = ShardingConverter(mesh_of(2, 2), (), {}).choices(torch.zeros(4, 2))
    assert len(choices) == 8
    assert (Shard(0), Shard(0)) in choices
    assert (Shard(1), Shard(1)) not in choices


@with_threads(2)
def test_every_combination_has_the_values_given(rank):
    x, y, flag = torch.arange(12.0).view(4, 3), torch.ones(2, 2), torch.tensor([True, False])
    converter = ShardingConverter(mesh_of(2), ([x, 7], y), {"flag": flag}, partial=True)
    seen = set()
    for (inner, b), kwargs in converter:
        a, number = inner
        assert number == 7
        assert torch.equal(a.full_tensor(), x)
        assert torch.equal(b.full_tensor(), y)
        assert torch.equal(kwargs["flag"].full_tensor(), flag)
        seen.add((a.placements, b.placements))
    # x: R, S(0), P; y: R, S(0), S(1), P; flag: R. Three tensors each time.
    assert len(seen) == 12
    assert converter.hit == 36
    assert converter.successful()


@with_threads(2)
def test_parameters_stay_parameters_and_keep_requires_grad(rank):
    weight, x = nn.Parameter(torch.ones(2)), torch.ones(2, requires_grad=True)
    for (w, a), _ in ShardingConverter(mesh_of(2), (weight, x), {}):
        assert isinstance(w, nn.Parameter)
        assert isinstance(w.data, DTensor)
        assert a.requires_grad


@with_threads(2)
def test_what_cannot_be_converted_is_passed_on_and_counted(rank):
    sparse = torch.eye(2).to_sparse()
    converter = ShardingConverter(mesh_of(2), (sparse, torch.ones(2)), {})
    assert all(args[0] is sparse for args, _ in converter)
    assert (converter.hit, converter.miss) == (2, 2)
    assert not converter.successful()
