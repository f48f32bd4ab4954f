"""CountCollectives against bytes worked out by hand: a ring over n ranks sends (n-1)/n of the full buffer."""

import torch
import torch.distributed.tensor as theirs
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode

import dtensor
from dtensor.comm.collectives import ops
from dtensor.layout.placements import Replicate, Shard
from dtensor.mesh.mesh import group_name
from dtensor.tensor.tensor import DTensor
from dtensor.testing import CountCollectives, DebugMode, with_threads


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


@with_threads(2)
def test_counts_of_torchs_debug_mode(rank):
    """For the same moves of its own DTensor, in which it chooses the same collectives."""
    mesh = init_device_mesh("cpu", (2,))
    moves = [("Shard", 0, "Replicate"), ("Partial", "sum", "Replicate"), ("Partial", "sum", "Shard")]

    def moved(module):
        for kind, given, to in moves:
            x = module.DTensor.from_local(torch.ones(2, 4), mesh, [getattr(module, kind)(given)], run_check=False)
            x.redistribute(mesh, [module.Shard(1) if to == "Shard" else module.Replicate()]).to_local().sum()

    with CommDebugMode() as other:
        moved(theirs)
    with CountCollectives() as counted:
        moved(dtensor)
    assert counted.get_comm_counts() == dict(other.get_comm_counts())
    assert counted.get_total_counts() == other.get_total_counts() == len(moves)
    with CountCollectives() as counted:
        dtensor.ones(2, 4, device_mesh=mesh, placements=[Shard(0)]).redistribute(mesh, [Shard(1)])
    assert counted.get_comm_counts() == {torch.ops.c10d_functional.all_to_all_single: 1}


def test_torchs_debug_mode_shows_placements(fake_mesh):
    mesh = fake_mesh(2)
    x = DTensor.from_local(torch.ones(2, 6), mesh, [Shard(0)])
    y = DTensor.from_local(torch.ones(3, 4), mesh, [Shard(0)])
    with DebugMode(record_ids=True) as shown:
        torch.mm(x, y).sum()
    with DebugMode(store_original_args=True) as kept:
        x.relu()
    group = group_name(mesh, 0)
    assert shown.debug_string().split("\n") == [
        "  aten::mm(dt$0: f32[4, 6]| S(0), dt$1: f32[6, 4]| S(0))",
        f"    dtensor::all_to_all(t$2: f32[2, 6], 0, 1, 4, {group})  ->  t$3: f32[4, 3]",
        "    aten::mm(t$3: f32[4, 3], t$4: f32[3, 4])  ->  t$5: f32[4, 4]",
        "  aten::sum(dt$6: f32[4, 4]| P)",
        "    aten::sum(t$5: f32[4, 4])  ->  t$7: f32[]",
    ]
    assert kept.operators[0].args[0] is x
