"""CountCollectives against bytes worked out by hand: a ring over n ranks sends (n-1)/n of the full buffer."""

import torch
from torch.distributed.device_mesh import init_device_mesh

from dtensor.collectives import ops
from dtensor.placements import Replicate, Shard
from dtensor.tensor import DTensor
from dtensor.testing import CountCollectives, with_threads


@with_threads(4)
def test_bytes_of_each_operator(rank):
    group = init_device_mesh("cpu", (4,)).get_group().group_name
    x = torch.ones(4, 4)
    with CountCollectives() as counted:
        ops.all_gather(x, 0, 16, group)
        ops.reduce_scatter(x, "sum", 0, group)
        ops.all_reduce(x, "sum", group)
        ops.all_to_all(x, 0, 1, 16, group)
        ops.shard(x, 0, group)
    assert [(c.op, c.bytes) for c in counted.collectives] == [
        ("all_gather", 192),
        ("reduce_scatter", 48),
        ("all_reduce", 96),
        ("all_to_all", 48),
    ]
    assert {c.group for c in counted.collectives} == {group}
    assert counted.bytes == 384


@with_threads(2)
def test_redistributions_of_dtensors_are_seen(rank):
    mesh = init_device_mesh("cpu", (2,))
    x = DTensor.from_local(torch.ones(2, 4), mesh, [Shard(0)])
    with CountCollectives() as counted:
        x.redistribute(mesh, [Replicate()])
        x.relu()
    assert [(c.op, c.bytes) for c in counted.collectives] == [("all_gather", 32)]
