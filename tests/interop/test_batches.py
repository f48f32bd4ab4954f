"""Which ranks read which part of a batch, and what is computed over the parts."""

from copy import deepcopy

import pytest
import torch
from torch import nn

from dtensor import MeshError, PlacementError, Replicate, Shard, distribute_model, init_device_mesh
from dtensor.interop import batch_parts
from dtensor.parallel import ColwiseParallel, RowwiseParallel, fully_shard, parallelize_module
from dtensor.testing import with_threads

MLP = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))


def mlp():
    """The same in all ranks: threads draw from one generator, so none may seed it for itself."""
    return deepcopy(MLP)


STYLES = {"0": ColwiseParallel(), "2": RowwiseParallel()}
COLUMNS = {"0.*": {"tp": Shard(0)}}


def summary(model):
    parts = batch_parts(model)
    return parts.count, parts.index, parts.shared


@with_threads(4)
def test_data_axes_divide_a_batch(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dp, tp = mesh["dp"], mesh["tp"]
    part = {"dp": Shard(0)}
    assert summary(mlp()) == (1, 0, 1)
    assert summary(parallelize_module(mlp(), tp, STYLES)) == (1, 0, 1)
    assert summary(fully_shard(mlp(), dp)) == (2, rank // 2, 1)
    assert summary(fully_shard(mlp(), mesh)) == (4, rank, 1)
    assert summary(fully_shard(parallelize_module(mlp(), tp, STYLES), dp)) == (2, rank // 2, 1)
    assert summary(distribute_model(mlp(), mesh, COLUMNS, outputs={})) == (1, 0, 1)
    assert summary(distribute_model(mlp(), mesh, COLUMNS, inputs=part, outputs=part)) == (2, rank // 2, 2)
    assert summary(distribute_model(mlp(), mesh, COLUMNS, inputs={"input": part}, outputs=part)) == (2, rank // 2, 2)
    view = distribute_model(mlp(), tp, {}, inputs={"tp": Shard(0)}, outputs={"tp": Shard(0)})
    assert summary(fully_shard(view, dp)) == (4, 2 * (rank % 2) + rank // 2, 2)


@with_threads(4)
def test_parts_are_gathered_and_reduced(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parts = batch_parts(fully_shard(parallelize_module(mlp(), mesh["tp"], STYLES), mesh["dp"]))
    mine = torch.tensor([[rank // 2, 7]])
    assert parts.gather(mine).tolist() == [[0, 7], [1, 7]]
    assert parts.gather(torch.tensor(rank // 2)).tolist() == [0, 1]
    assert parts.reduce(mine, "sum").tolist() == [[1, 14]]
    assert parts.reduce(torch.tensor(rank // 2).float(), "mean").item() == 0.5
    whole = batch_parts(fully_shard(mlp(), mesh))
    assert whole.gather(torch.tensor([whole.index])).tolist() == [0, 1, 2, 3]


@with_threads(2)
def test_a_whole_parameter_has_the_gradient_of_the_mean_over_parts(rank):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    part, x = {"dp": Shard(0)}, torch.arange(16.0).view(2, 8)
    plain = mlp()
    x.matmul(plain[0].weight.t()).square().sum(1).mean().backward()
    view = distribute_model(mlp(), mesh, {}, inputs=part, outputs=part)
    for model in (fully_shard(mlp(), mesh), view):
        weight = batch_parts(model).whole(model[0].weight)
        x[rank : rank + 1].matmul(weight.t()).square().sum(1).mean().backward()
        torch.testing.assert_close(model[0].weight.grad.full_tensor(), plain[0].weight.grad)
    assert batch_parts(view).whole(x) is x


@with_threads(2)
def test_what_does_not_follow_is_said(rank):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    with pytest.raises(PlacementError, match=r"returns DTensors.*outputs=\{\}"):
        batch_parts(distribute_model(mlp(), mesh, {}))
    with pytest.raises(PlacementError, match=r'outputs=\{"dp": Shard\(0\)\}'):
        batch_parts(distribute_model(mlp(), mesh, {}, inputs={"dp": Shard(0)}, outputs={}))
    with pytest.raises(PlacementError, match=r"outputs=\{\}\)$"):
        batch_parts(distribute_model(mlp(), mesh, {}, outputs={"dp": Shard(0)}))
    two = init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b"))
    model = mlp()
    fully_shard(model[0], two["a"])
    fully_shard(model, two["b"])
    with pytest.raises(MeshError, match="call fully_shard with one mesh"):
        batch_parts(model)


@with_threads(2)
def test_a_replicated_model_has_one_part(rank):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model = distribute_model(mlp(), mesh, {}, inputs={"dp": Replicate()}, outputs={})
    assert summary(model) == (1, 0, 1)
