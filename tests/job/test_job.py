"""What ranks know of each other: a failure is raised once by each, and one that all have is no news."""

import tempfile

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.exc import RestartAnalysis, TensorifyScalarRestartAnalysis

from bench.counting import counting_ranks
from dtensor import AgreementError, Replicate, Shard, distribute_tensor, init_device_mesh
from dtensor.job.collective_order import alike, mark
from dtensor.job.groups import all_calls, calls_on
from dtensor.job.job import explain, failure_told, job, leave
from dtensor.testing import fake_ranks, with_ranks


@with_ranks(3)
def test_a_failure_is_raised_once_by_each(rank):
    here = job()
    if rank == 1:
        with pytest.raises(KeyError), failure_told("computed"):
            raise KeyError("a key")
    dist.barrier()
    if rank != 1:
        with pytest.raises(AgreementError, match="rank 1 failed while it computed: KeyError: 'a key'"):
            here.check()
    here.check()


def test_ranks_that_do_not_exist_do_not_hide_an_error():
    """Nobody can be told of it."""
    with counting_ranks(2):
        assert job() is not None
        with pytest.raises(KeyError, match="a key"), failure_told("computed"):
            raise KeyError("a key")


@with_ranks(2)
def test_what_dynamo_starts_over_for_is_no_failure(rank):
    here = job()
    if rank == 1:
        with pytest.raises(RestartAnalysis), failure_told("compiled", unless=RestartAnalysis):
            raise TensorifyScalarRestartAnalysis
    dist.barrier()
    here.check()


@with_ranks(2)
def test_a_failure_of_all_is_news_to_none(rank):
    here = job()
    for text in ("one", "two"):
        here.failed(f"{text} of rank {rank}")
    dist.barrier()
    here.check()
    dist.barrier()
    if rank == 0:
        here.failed("three")
    dist.barrier()
    if rank == 1:
        with pytest.raises(AgreementError, match="three"):
            here.check()


@with_ranks(2)
def test_who_has_left(rank):
    here = job()
    dist.barrier()
    assert here.absent(1 - rank) == ""
    dist.barrier()
    if rank == 1:
        leave()
    dist.barrier()
    if rank == 0:
        assert here.absent(1) == "rank 1 has left the program"


@with_ranks(2)
def test_an_error_of_a_collective_is_explained_by_the_failure_behind_it(rank):
    here, error = job(), RuntimeError("Connection closed by peer")
    explain(error)
    dist.barrier()
    if rank == 1:
        here.failed("rank 1 gave up")
    dist.barrier()
    if rank == 0:
        with pytest.raises(AgreementError, match="rank 1 gave up") as raised:
            explain(error)
        assert raised.value.__cause__ is error


@with_ranks(1)
def test_a_reason_is_looked_for_where_a_connection_was_closed(rank):
    """Not behind an error of the program, nor behind one that is the reason."""
    asked = []
    job().find_out = lambda: asked.append(True)
    try:
        for error in (RuntimeError("shapes do not match"), AgreementError("Connection of rank 1")):
            explain(error)
        assert asked == []
        explain(RuntimeError("[pair.cc:553] Connection closed by peer"))
        assert asked == [True]
    finally:
        del job().find_out


@with_ranks(1, fresh=True)
def test_a_rank_that_went_on_after_a_failure_is_told_of_it_where_a_connection_is_closed(rank):
    job().failed("rank 0 gave up")
    with pytest.raises(AgreementError, match=r"rank 0 gave up\n.*start all ranks anew"):
        job().find_out()


@with_ranks(2, fresh=True)
def test_marks_end_with_their_group(rank):
    """Which graph ran last is no matter of groups that are made later, under the same names."""
    calls_on(dist.group.WORLD).mark = rank
    # Of a name of its own: a file that was left by another process would be taken for this one's.
    folder = [tempfile.mkdtemp(prefix="dtensor-")]
    dist.broadcast_object_list(folder)
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{folder[0]}/group", rank=rank, world_size=2)
    x = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (2,)), [Shard(0)])
    assert x.redistribute(placements=[Replicate()]).to_local().tolist() == [1.0] * 4


def test_what_ran_on_groups_that_were_destroyed_is_forgotten():
    """They are kept by whatever holds a mesh, and others have their names."""
    kept = []
    for _ in range(2):
        with fake_ranks(2):
            kept.append(dist.group.WORLD)
            calls_on(kept[-1]).count += 1
            assert [calls.count for calls in all_calls()] == [1]
    assert [group.group_name for group in kept] == ["0", "0"]
    assert all_calls() == []


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("all_reduce sum of float32[4, 8]", "all_reduce sum of float32[?, 8]", True),
        ("all_gather of float32[4]", "all_gather of float32[8]", True),
        ("all_gather of float32[4]", "all_gather of float32[4, 2]", False),
        ("all_reduce sum of float32[4]", "all_reduce max of float32[4]", False),
        ("collective_permute from (1, 0) of float32[2]", "collective_permute from (0, 1) of float32[2]", False),
    ],
)
def test_marks(one, other, same):
    a, b = [(one, "a.py:1")], [(other, "b.py:2")]
    assert (mark(a) == mark(b)) is same
    assert same or not alike(a, b)
