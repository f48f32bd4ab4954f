"""Facts of meshes, and the process groups made for several axes."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.device_mesh import init_device_mesh as unprepared

import dtensor
from dtensor import DTensor, MeshError, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from dtensor.job.elastic import RENDEZVOUS, SIZES
from dtensor.job.groups import group_ranks
from dtensor.mesh.mesh import facts, group_between
from dtensor.prices.links import INTER, INTRA, Link
from dtensor.testing import CountCollectives, with_threads
from dtensor.torch_private.core import resolve_process_group


@with_threads(8)
def test_a_prepared_mesh_has_groups_over_all_sets_of_axes(rank):
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
    found = facts(mesh)
    assert found.network.merged == {(0, 1), (0, 2), (1, 2), (0, 1, 2)}
    rest = {(0, 1): [2], (0, 2): [1], (1, 2): [0], (0, 1, 2): []}
    at = found.coordinate or ()
    for axes, others in rest.items():
        here = [
            r for r, c in enumerate(torch.cartesian_prod(*[torch.arange(2)] * 3)) if all(c[o] == at[o] for o in others)
        ]
        assert group_ranks(found.groups[axes]) == tuple(here)
    assert facts(mesh["pp", "tp"]).groups[(0, 1)] == found.groups[(0, 2)]
    assert facts(mesh["tp"]).network.merged == frozenset()


@with_threads(4)
def test_an_unprepared_mesh_takes_one_axis_at_a_time(rank):
    mesh = unprepared("cpu", (2, 2))
    x = distribute_tensor(torch.arange(8.0), mesh, [Shard(0), Shard(0)])
    with CountCollectives() as before:
        assert torch.equal(x.full_tensor(), torch.arange(8.0))
    assert [c.op for c in before.collectives] == ["all_gather", "all_gather"]
    dtensor.prepare(mesh)
    with CountCollectives() as after:
        assert torch.equal(x.full_tensor(), torch.arange(8.0))
    assert [c.op for c in after.collectives] == ["all_gather"]
    assert after.bytes == before.bytes == 24


@with_threads(4)
def test_groups_over_all_ranks_are_the_default_one_and_are_not_made_twice(rank):
    mesh = init_device_mesh("cpu", (2, 2))
    name = facts(mesh).groups[(0, 1)]
    assert resolve_process_group(name) is dist.group.WORLD
    dtensor.prepare(mesh)
    assert facts(mesh).groups[(0, 1)] == name
    copied = copy.deepcopy(mesh)
    assert facts(copied).groups[(0, 1)] == name


@with_threads(4)
def test_names_of_groups_are_not_pickled(rank):
    mesh = init_device_mesh("cpu", (2, 2))
    assert facts(pickle.loads(pickle.dumps(mesh))).network.merged == frozenset()


@with_threads(3)
def test_ranks_outside_the_mesh(rank):
    mesh = DeviceMesh("cpu", torch.tensor([[0, 2]]))
    dtensor.prepare(mesh)
    x = distribute_tensor(torch.arange(6.0), mesh, [Replicate(), Shard(0)]).requires_grad_()
    y = x.redistribute(placements=[Replicate(), Replicate()])
    (y * y).sum().backward()
    assert y.shape == (6,)
    assert y.to_local().tolist() == ([] if rank == 1 else [0.0, 1.0, 2.0, 3.0, 4.0, 5.0])
    assert x.grad.placements == (Replicate(), Shard(0))
    assert x.grad.to_local().tolist() == [[0.0, 2.0, 4.0], [], [6.0, 8.0, 10.0]][rank]


@with_threads(4)
def test_ranks_that_descend_along_an_axis_need_a_group_of_their_own(rank):
    mesh = DeviceMesh("cpu", torch.tensor([[3, 2], [1, 0]]))
    with pytest.raises(MeshError, match=r"along axis 0 of .* the ranks do not ascend.*write dtensor.prepare\(mesh\)"):
        distribute_tensor(torch.arange(4.0), mesh, [Shard(0), Shard(0)])
    dtensor.prepare(mesh)
    x = distribute_tensor(torch.arange(4.0), mesh, [Shard(0), Shard(0)])
    assert x.to_local().tolist() == [3.0 - rank]
    assert x.full_tensor().tolist() == [0.0, 1.0, 2.0, 3.0]
    row = x.redistribute(placements=[Shard(0), Replicate()])
    assert row.to_local().tolist() == [[2.0, 3.0], [2.0, 3.0], [0.0, 1.0], [0.0, 1.0]][rank]


@with_threads(4)
def test_links_follow_hosts_or_are_given(rank):
    mesh = unprepared("cpu", (2, 2))
    assert facts(mesh).network.links == (INTRA, INTRA)
    slow = Link(bandwidth=1e8)
    dtensor.prepare(mesh, links=[slow, INTRA])
    assert facts(mesh).network.links == (slow, INTRA)
    assert facts(mesh).network.link((0, 1)).bandwidth == 1e8
    with pytest.raises(ValueError, match="has 2 axes but 1 links were given"):
        dtensor.prepare(mesh, links=[slow])
    with pytest.raises(ValueError, match="prepare takes one mesh"):
        dtensor.prepare()


def test_axes_between_hosts_are_slower(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    _check_hosts()


@with_threads(4)
def _check_hosts(rank):
    assert facts(unprepared("cpu", (2, 2))).network.links == (INTER, INTRA)


@with_threads(3)
def test_meshes_without_a_common_group(rank):
    one, other = DeviceMesh("cpu", torch.tensor([0])), DeviceMesh("cpu", torch.tensor([1]))
    x = DTensor.from_local(torch.ones(2), one, [Shard(0)])
    if rank < 2:
        with pytest.raises(MeshError, match=r"no process group over the ranks \[0, 1\].*dtensor.prepare\(mesh, other"):
            x.redistribute(other, [Shard(0)])
    dtensor.prepare(one, other)
    assert (group_between(one, other) is None) == (rank == 2)
    y = x.redistribute(other, [Replicate()])
    assert y.to_local().tolist() == ([1.0, 1.0] if rank == 1 else [])


def test_what_was_decided_before_is_decided_anew(fake_mesh):
    """Decisions hold plans, so groups and links that come later reach operators that have run already."""
    fake_mesh(4, 4)
    mesh = unprepared("cpu", (4, 4))
    x = distribute_tensor(torch.eye(16), mesh, [Shard(0), Shard(0)])

    def sent():
        with CountCollectives() as seen:
            torch.linalg.det(x)
        return [c.op for c in seen.collectives]

    assert sent() == ["all_gather", "all_gather"]
    dtensor.prepare(mesh)
    assert sent() == ["all_gather"]


def test_candidates_are_priced_with_the_links_of_the_mesh(fake_mesh):
    mesh = fake_mesh(2, 2)
    dtensor.prepare(mesh, links=[Link(bandwidth=1e6), Link(bandwidth=1e12)])
    x, y = (distribute_tensor(torch.ones(64, 64), mesh, [p, p]) for p in (Shard(0), Shard(1)))
    slow, quick = dtensor.explain(torch.add, x, y).operators[0].options
    for one, other in zip(slow, quick):
        assert one.inputs == other.inputs
        assert (one.seconds or 0) > 100 * (other.seconds or 0)


@pytest.fixture
def launched_by(monkeypatch):
    """`launched_by(NAME="4")`: the process group, if there is one, is gone afterwards."""
    for name in (*RENDEZVOUS, *SIZES):
        monkeypatch.delenv(name, raising=False)
    yield lambda **variables: [monkeypatch.setenv(name, value) for name, value in variables.items()]
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize(("shape", "filled"), [((1,), (1,)), ((-1,), (1,)), ((1, -1), (1, 1))])
def test_a_process_started_alone_is_a_mesh_of_one(launched_by, shape, filled):
    mesh = init_device_mesh("cpu", shape)
    assert mesh.shape == filled
    assert dist.get_world_size() == 1
    x = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)] + [Partial()] * (len(shape) - 1))
    assert x.sum().item() == 6
    dist.barrier()


def test_a_process_started_alone_is_told_how_to_be_several(launched_by):
    with pytest.raises(MeshError, match=r"torchrun --nproc-per-node 8 .*\n?.*dtensor.simulate\(8\)"):
        init_device_mesh("cpu", (2, 4))
    with pytest.raises(MeshError, match=r"\(-1, 2\) has 2 ranks"):
        init_device_mesh("cpu", (-1, 2))
    assert not dist.is_initialized()


def test_a_launcher_that_torch_does_not_know_starts_no_jobs_of_one(launched_by):
    launched_by(SLURM_NTASKS="4")
    with pytest.raises(ValueError, match="RANK expected"):
        init_device_mesh("cpu", (-1,))


@with_threads(4)
def test_minus_one_is_as_many_ranks_as_there_are(rank):
    assert init_device_mesh("cpu", (-1,)).shape == (4,)
    assert init_device_mesh("cpu", (2, -1)).shape == (2, 2)
    with pytest.raises(ValueError, match="a multiple of 3 ranks, but there are 4; start 6"):
        init_device_mesh("cpu", (3, -1))
    with pytest.raises(ValueError, match="mesh_shape must be"):
        init_device_mesh("cpu", (-1, -1))
