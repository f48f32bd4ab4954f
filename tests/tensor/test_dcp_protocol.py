"""torch.distributed.checkpoint through the DTensor protocol, on real processes, from one layout to another."""

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dtensor import DTensor, Partial, PlacementError, Replicate, Shard, distribute_tensor, init_device_mesh, zeros
from dtensor.mesh.tensor_spec import chunk
from dtensor.testing import with_ranks, with_threads


@with_ranks(4)
def test_save_and_load_in_another_layout(rank, tmp_path):
    flat, grid = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    full = {"w": torch.arange(35.0).view(7, 5), "b": torch.arange(6), "s": torch.tensor(3.0)}
    placed = {"w": [Shard(0)], "b": [Shard(0)], "s": [Replicate()]}
    state = {k: distribute_tensor(v, flat, placed[k]) for k, v in full.items()}
    dcp.save(state, checkpoint_id=tmp_path)
    target = {"w": [Shard(1), Shard(0)], "b": [Shard(0), Shard(0)], "s": [Replicate(), Replicate()]}
    loaded = {k: zeros(tuple(v.shape), dtype=v.dtype, device_mesh=grid, placements=target[k]) for k, v in full.items()}
    dcp.load(loaded, checkpoint_id=tmp_path)
    for name, value in full.items():
        assert loaded[name].placements == tuple(target[name])
        assert torch.equal(loaded[name].full_tensor(), value)


@with_threads(4)
def test_chunks_tile_the_tensor(rank):
    mesh = init_device_mesh("cpu", (2, 2))
    x = distribute_tensor(torch.arange(14).view(7, 2), mesh, [Shard(0), Shard(0)])
    sizes, offsets = chunk(x._spec)
    part = x.full_tensor()[offsets[0] : offsets[0] + sizes[0]]
    assert torch.equal(part, x.to_local())
    other = torch.ops.dtensor.redistribute(x, "S(0)#1S(0)#0", False)
    sizes, offsets = chunk(other._spec)
    assert torch.equal(x.full_tensor()[offsets[0] : offsets[0] + sizes[0]], other.to_local())


@with_threads(2)
def test_partial_values_cannot_be_saved(rank):
    x = DTensor.from_local(torch.ones(2), init_device_mesh("cpu", (2,)), [Partial()])
    with pytest.raises(PlacementError, match=r"layout P holds no final values to save; write x.redistribute"):
        x.__create_write_items__("x", x)
