"""The factories: values, shapes, dtypes, the current mesh, and what they refuse."""

import pytest
import torch

import dtensor
from dtensor import MeshError, Partial, PlacementError, Replicate, Shard, init_device_mesh
from dtensor.testing import with_threads


@pytest.mark.parametrize("name", ["zeros", "ones"])
@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1), Shard(-1)])
@with_threads(2)
def test_constants(rank, name, placement):
    mesh = init_device_mesh("cpu", (2,))
    x = getattr(dtensor, name)(5, 3, device_mesh=mesh, placements=[placement])
    assert torch.equal(x.full_tensor(), getattr(torch, name)(5, 3))
    assert (x.shape, x.stride(), x.dtype) == ((5, 3), (3, 1), torch.float32)
    rows = {Replicate(): (5, 3), Shard(0): (3 - rank, 3)}.get(placement, (5, 2 - rank))
    assert x.to_local().shape == rows


@with_threads(2)
def test_sizes_dtypes_and_gradients(rank):
    mesh = init_device_mesh("cpu", (2,))
    for x in (dtensor.ones((2, 3), device_mesh=mesh), dtensor.ones([2, 3], device_mesh=mesh)):
        assert x.shape == (2, 3)
        assert x.placements == (Replicate(),)
    assert dtensor.ones(torch.Size([2, 3]), device_mesh=mesh).shape == (2, 3)
    assert dtensor.zeros(device_mesh=mesh).shape == ()
    assert dtensor.zeros(0, 3, device_mesh=mesh, placements=[Shard(0)]).to_local().shape == (0, 3)
    assert dtensor.zeros(2, dtype=torch.int64, device_mesh=mesh).dtype == torch.int64
    made = dtensor.empty(4, 2, requires_grad=True, device_mesh=mesh, placements=[Shard(0)])
    assert made.is_leaf
    assert made.requires_grad
    assert made.to_local().shape == (2, 2)


@with_threads(2)
def test_full(rank):
    mesh = init_device_mesh("cpu", (2,))
    x = dtensor.full((3, 2), 2.5, device_mesh=mesh, placements=[Shard(0)])
    assert torch.equal(x.full_tensor(), torch.full((3, 2), 2.5))
    assert dtensor.full((3,), 2, device_mesh=mesh).dtype == torch.int64
    assert dtensor.full((3,), True, device_mesh=mesh).dtype == torch.bool
    assert dtensor.full((3,), 2, dtype=torch.float16, device_mesh=mesh).dtype == torch.float16


@pytest.mark.parametrize("placement", [Replicate(), Shard(0)])
@pytest.mark.parametrize("name", ["linspace", "logspace"])
@with_threads(2)
def test_evenly_spaced_numbers(rank, name, placement):
    mesh = init_device_mesh("cpu", (2,))
    ours, theirs = getattr(dtensor, name), getattr(torch, name)
    x = ours(-1, 2.5, 7, device_mesh=mesh, placements=[placement], requires_grad=True)
    assert torch.equal(x.detach().full_tensor(), theirs(-1, 2.5, 7))
    assert x.to_local().shape == ((7,) if placement == Replicate() else (4 - rank,))
    assert x.is_leaf
    assert x.requires_grad
    end = dtensor.full((), 3.0, device_mesh=mesh)
    y = ours(0, end, 4, dtype=torch.float64, device_mesh=mesh, placements=[placement])
    assert torch.equal(y.full_tensor(), theirs(0, 3, 4, dtype=torch.float64))
    with pytest.raises(PlacementError, match=r"a factory takes Shard\(dim\) or Replicate\(\)"):
        ours(0, 1, 4, device_mesh=mesh, placements=[Partial()])


@with_threads(2)
def test_powers_of_a_base(rank):
    mesh = init_device_mesh("cpu", (2,))
    x = dtensor.logspace(0, 4, 5, 2.0, device_mesh=mesh, placements=[Shard(0)])
    assert x.full_tensor().tolist() == [1, 2, 4, 8, 16]


@with_threads(1)
def test_random_factories_give_torchs_numbers(rank):
    mesh = init_device_mesh("cpu", (1,))
    for ours, theirs in ((dtensor.rand, torch.rand), (dtensor.randn, torch.randn)):
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            torch.manual_seed(0)
            expected = theirs(5, 3, dtype=dtype)
            torch.manual_seed(0)
            found = ours(5, 3, dtype=dtype, device_mesh=mesh, placements=[Shard(0)], requires_grad=True)
            assert found.requires_grad
            assert torch.equal(found.detach().full_tensor(), expected)


@with_threads(4)
def test_two_axes(rank):
    mesh = init_device_mesh("cpu", (2, 2))
    x = dtensor.ones(6, 5, device_mesh=mesh, placements=[Shard(0), Shard(0)])
    assert x.to_local().shape == (2 - rank % 2, 5)
    assert torch.equal(x.full_tensor(), torch.ones(6, 5))


@with_threads(2)
def test_the_current_mesh(rank):
    mesh = init_device_mesh("cpu", (2,))
    with mesh:
        x = dtensor.ones(4, placements=[Shard(0)])
    assert x.device_mesh == mesh
    with pytest.raises(MeshError, match="no device mesh was given and none is current; pass device_mesh"):
        dtensor.ones(4)


@pytest.mark.parametrize("name", ["zeros", "ones", "empty", "rand", "randn"])
@with_threads(2)
def test_what_is_refused(rank, name):
    mesh, make = init_device_mesh("cpu", (2,)), getattr(dtensor, name)
    with pytest.raises(PlacementError, match=r"a factory takes Shard\(dim\) or Replicate\(\), got \[Partial"):
        make(4, device_mesh=mesh, placements=[Partial()])
    with pytest.raises(ValueError, match=r"make torch\.strided tensors, got layout=torch\.sparse_coo"):
        make(4, layout=torch.sparse_coo, device_mesh=mesh)
    with pytest.raises(PlacementError, match="the mesh has 1 axis but 2 placements were given"):
        make(4, device_mesh=mesh, placements=[Shard(0), Shard(0)])
    with pytest.raises(PlacementError, match=r"Shard\(1\) does not fit a tensor of 1 dimensions"):
        make(4, device_mesh=mesh, placements=[Shard(1)])
