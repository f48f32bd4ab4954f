"""One rank compiles for all of a job; nobody waits for a rank that does not come."""

import os
import re
import signal
import time
import types
from contextlib import ExitStack

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass

import dtensor
import dtensor.compile
from dtensor import init_device_mesh
from dtensor.compile.packages import sharing
from dtensor.testing import RankError, run_ranks

from . import programs


def shared(rank, run, *args, before=lambda rank: None):
    """Losses of a rank that shares, what it took and gave, and how many graphs it compiled."""
    torch._dynamo.reset()
    counters.clear()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    sharing.sharing.shared = made = sharing.Shared()
    before(rank)
    losses = run(mesh, *args)
    return (
        losses,
        made,
        counters["aot_autograd"]["autograd_cache_miss"] + counters["aot_autograd"]["autograd_cache_bypass"],
    )


def test_one_rank_compiles(own_caches):
    found = run_ranks(shared, 2, programs.small, programs.batch())
    other, leader = sorted(found, key=lambda x: x[2])
    assert leader[0] == other[0]
    assert len(leader[1].given) == len(other[1].taken) == 1
    assert leader[1].taken == other[1].given == other[1].alone == leader[1].alone == []
    assert (leader[2], other[2]) == (1, 0)
    assert other[1].waited > leader[1].waited == 0


def uneven(mesh):
    """Each rank holds another number of rows, so that one cannot use what the other compiled."""
    x = dtensor.distribute_tensor(torch.ones(5, 4), mesh, [dtensor.Shard(0)])
    return torch.compile(lambda x: (x * 2).sum().full_tensor())(x).item()


@pytest.mark.nightly
def test_nobody_waits_for_a_rank_with_other_shards(own_caches):
    found = run_ranks(shared, 2, uneven)
    assert [losses for losses, *_ in found] == [40.0, 40.0]
    assert [compiled for *_, compiled in found] == [1, 1]
    assert [(made.waited, len(made.given)) for _, made, _ in found] == [(0, 1), (0, 1)]


def switched_off(rank):
    """Each rank compiles for itself."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(sharing.SHARE, "0")
        return shared(rank, programs.small, programs.batch())


def test_sharing_can_be_switched_off(own_caches):
    found = run_ranks(switched_off, 2)
    assert found[0][0] == found[1][0]
    assert [(made, compiled) for _, made, compiled in found] == [(sharing.Shared(), 1)] * 2


def failing(mesh):
    """A graph that cannot be compiled."""

    with inductor_config.patch(post_grad_custom_post_pass=Broken()):
        try:
            torch.compile(lambda x: x + 1)(torch.ones(2))
        except Exception as error:
            return "no compiler" in str(error)
    return False


class Broken(CustomGraphPass):
    def __call__(self, graph):
        raise RuntimeError("no compiler")

    def uuid(self):
        return "broken"


def test_a_graph_that_cannot_be_compiled(own_caches):
    found = run_ranks(failing_in_turn, 2)
    assert [losses for losses, *_ in found] == [True, True]
    (said,) = [made.alone[0][1] for _, made, _ in found if made.alone]
    assert re.fullmatch("rank [01] cannot give it: AOTAutograd kept nothing of it", said)


def failing_in_turn(rank):
    return shared(rank, failing)


def slow(rank):
    """The rank that compiles first takes long."""
    own = sharing._publish

    def publish(*args):
        time.sleep(5)
        own(*args)

    sharing._publish = publish
    os.environ[sharing.LIMIT] = "2"


def limited(rank, *args):
    own, before = sharing._publish, os.environ.get(sharing.LIMIT)
    try:
        return shared(rank, *args, before=slow)
    finally:
        sharing._publish = own
        os.environ.pop(sharing.LIMIT) if before is None else os.environ.__setitem__(sharing.LIMIT, before)


@pytest.mark.nightly
def test_there_is_a_limit(own_caches):
    found = run_ranks(limited, 2, programs.small, programs.batch())
    assert found[0][0] == found[1][0]
    assert [compiled for *_, compiled in found] == [1, 1]
    assert "did not finish it in 2 s" in next(made for _, made, _ in found if made.alone).alone[0][1]


def hanging(rank):
    """The rank that compiles hangs, as where it waits for another rank."""
    return with_part(rank, lambda: time.sleep(8))


def with_part(rank, part):
    """Share, where the rank that compiles does something else meanwhile, and may do nothing for 3 seconds."""
    stall, libraries = sharing.STALL, sharing.libraries

    def longer(*args):
        part()
        return libraries(*args)

    sharing.STALL, sharing.libraries = 3.0, longer
    try:
        return shared(rank, programs.small, programs.batch())
    finally:
        sharing.STALL, sharing.libraries = stall, libraries


def test_nobody_waits_for_a_rank_that_hangs(own_caches):
    found = run_ranks(hanging, 2)
    assert [compiled for *_, compiled in found] == [1, 1]
    alone = next(made for _, made, _ in found if made.alone)
    assert "has made no progress for 3 s" in alone.alone[0][1]


def slow_but_working(rank):
    """The rank that compiles works for longer than one may hang."""

    def work():
        end = time.thread_time() + 5
        while time.thread_time() < end:
            pass

    return with_part(rank, work)


@pytest.mark.nightly
def test_a_rank_that_works_is_waited_for(own_caches):
    found = run_ranks(slow_but_working, 2)
    assert sorted([compiled for *_, compiled in found]) == [0, 1]
    assert [made.alone for _, made, _ in found] == [[], []]


def test_a_store_that_does_not_answer():
    """As at the end of a job, where the rank that holds it is gone."""

    class Gone:
        def add(self, *_):
            raise RuntimeError("Connection reset by peer")

    found = sharing.Shared()
    with ExitStack() as stack:
        frame = sharing.Compiled(found, types.SimpleNamespace(store=Gone(), rank=0), stack)
        assert list(frame.answers("key")) == []
    assert found.alone == [("a frame", "the job's store does not answer: Connection reset by peer")]


def dying(rank, *args):
    def die(*_):
        os.kill(os.getpid(), signal.SIGKILL)

    sharing._publish = die
    return shared(rank, *args)


@pytest.mark.nightly
def test_a_rank_that_dies_while_it_compiles_is_noticed(own_caches):
    began = time.monotonic()
    with pytest.raises(RankError, match=r"SIGKILL|exit code -9|signal 9"):
        run_ranks(dying, 2, programs.small, programs.batch(), timeout=200)
    assert time.monotonic() - began < 150


def test_the_limit_is_a_number(monkeypatch):
    monkeypatch.setenv(sharing.LIMIT, "soon")
    with pytest.raises(ValueError, match="DTENSOR_SHARE_TIMEOUT is 'soon'; write a number of seconds"):
        sharing._limit()
