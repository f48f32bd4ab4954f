"""Placements by dimension: which axes shard it, in which order, eager and compiled."""

import pytest
import torch

import dtensor
from dtensor import MeshError, PlacementError, Replicate, Shard, by_dim, distribute_tensor, init_device_mesh
from dtensor.testing import with_ranks, with_threads


@with_threads(4)
def test_axes_cut_a_dimension_in_the_order_of_their_names(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "y"))
    assert by_dim(mesh) == by_dim(mesh, None, ()) == (Replicate(), Replicate())
    assert by_dim(mesh, None, "y") == (Replicate(), Shard(1))
    assert by_dim(mesh, "y", "x") == (Shard(1), Shard(0))
    assert by_dim(mesh, ("x", "y")) == (Shard(0), Shard(0))
    assert by_dim(mesh, ("y", "x")) == by_dim(mesh, ["y", "x"], None) == (Shard(0, cut=1), Shard(0, cut=0))
    whole = torch.arange(10.0).view(5, 2)
    parts = whole.split([2, 1, 1, 1])  # the first axis cuts five rows into three and two, the other one those
    x, y = divmod(rank, 2)
    for names, i in ((("x", "y"), 2 * x + y), (("y", "x"), 2 * y + x)):
        d = distribute_tensor(whole, mesh, by_dim(mesh, names))
        assert d.to_local().equal(parts[i])
        assert d.redistribute(placements=by_dim(mesh, ("x", "y"))).full_tensor().equal(whole)
        assert (
            dtensor.zeros(5, 2, device_mesh=mesh, placements=by_dim(mesh, names)).to_local().shape == d.to_local().shape
        )


@with_threads(2)
def test_what_cannot_be_is_said(rank):
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("x", "y"))
    for dims, text in (
        (("x", "z"), "dimension 1 is to be sharded over 'z', but the axes are"),
        ((0,), "sharded over 0; write one name or several of"),
        (("x", "x"), "'x' is named twice, but an axis shards one dimension, once"),
        ((("y", "y"),), "'y' is named twice"),
    ):
        with pytest.raises(PlacementError, match=text):
            by_dim(mesh, *dims)
    with pytest.raises(MeshError, match="has no names of axes; make it with init_device_mesh"):
        by_dim(init_device_mesh("cpu", (2,)), "x")


@with_ranks(2)
def test_compiled(rank):
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("x", "y"))
    placements = by_dim(mesh, None, ("y", "x"))

    def program(d):
        return (d * 2).redistribute(placements=placements), (d + 1).redistribute(placements=by_dim(mesh, "y"))

    d = distribute_tensor(torch.arange(12.0).view(3, 4), mesh, by_dim(mesh, ("y", "x")))
    compiled = torch.compile(program, backend="dtensor", fullgraph=True, options={"inner": "aot_eager"})
    for eager, made in zip(program(d), compiled(d)):
        assert made.placements == eager.placements
        assert made.to_local().equal(eager.to_local())
