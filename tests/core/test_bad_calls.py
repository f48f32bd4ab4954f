"""Calls that cannot be meant: one error each, which names what was given and what to write instead."""

import re

import numpy as np
import pytest
import torch

import dtensor
from dtensor import (
    DTensor,
    MeshError,
    Partial,
    PlacementError,
    Replicate,
    Shard,
    ShardingError,
    distribute_tensor,
    init_device_mesh,
)
from dtensor.testing import with_threads

ROWS = torch.arange(8.0).view(4, 2)
CALLS = {
    "memory for numpy": (lambda x, mesh: x.numpy(), ShardingError, "several ranks; call it on x.to_local()"),
    "an array": (lambda x, mesh: np.asarray(x), ShardingError, "numpy needs the memory of one tensor"),
    "a list": (lambda x, mesh: x.tolist(), ShardingError, "or on x.full_tensor()"),
    "shared memory": (lambda x, mesh: x.share_memory_(), ShardingError, "share_memory_ needs"),
    "pinned memory": (lambda x, mesh: x.pin_memory(), ShardingError, "pin_memory needs"),
    "dlpack": (lambda x, mesh: torch.from_dlpack(x), ShardingError, "__dlpack__ needs"),
    "a list for a tensor": (
        lambda x, mesh: distribute_tensor([1, 2], mesh, [Shard(0)]),
        TypeError,
        "takes a tensor, got list; write torch.tensor(x)",
    ),
    "a name for a mesh": (
        lambda x, mesh: distribute_tensor(ROWS, "cpu", [Shard(0)]),
        MeshError,
        "makes, got 'cpu'; write for example init_device_mesh(\"cpu\", (2,))",
    ),
    "a name for the mesh of parts": (
        lambda x, mesh: DTensor.from_local(ROWS, "cpu", [Shard(0)]),
        MeshError,
        "got 'cpu'",
    ),
    "a name for a factory's mesh": (lambda x, mesh: dtensor.zeros(4, device_mesh="cpu"), MeshError, "got 'cpu'"),
    "a sparse tensor": (
        lambda x, mesh: distribute_tensor(ROWS.to_sparse(), mesh, [Shard(0)]),
        ValueError,
        "got layout=torch.sparse_coo; write x.to_dense()",
    ),
    "an axis without ranks": (lambda x, mesh: init_device_mesh("cpu", (0,)), ValueError, "at least one rank; got (0,)"),
    "no rule": (
        lambda x, mesh: dtensor.register_sharding(torch.ops.aten.sin.default, None),
        TypeError,
        "a dtensor.Rule; got None",
    ),
    "a text for gradients": (
        lambda x, mesh: x.to_local(grad_placements=["a"]),
        PlacementError,
        "a placement is Shard(dim), Replicate() or Partial(); got 'a'",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_one_error(fake_mesh, name):
    mesh = fake_mesh(2)
    call, kind, words = CALLS[name]
    with pytest.raises(kind, match=re.escape(words)):
        call(distribute_tensor(ROWS, mesh, [Shard(0)]), mesh)


@pytest.mark.parametrize("op", ["sum", "product", "max", "avg"])
@with_threads(4)
def test_a_whole_value_may_be_given_as_partial(rank, op):
    mesh = init_device_mesh("cpu", (2, 2))
    for placements in ([Partial(op), Replicate()], [Partial(op), Partial(op)], [Partial(op), Shard(0)]):
        x = distribute_tensor(ROWS, mesh, placements)
        assert x.placements == tuple(placements)
        assert torch.equal(x.full_tensor(), ROWS)
