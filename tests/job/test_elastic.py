"""Rounds of a job on one store: keys of an earlier round are not read, whatever each host's count of restarts is."""

import os
import subprocess
import sys
import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from dtensor import AgreementError, init_device_mesh
from dtensor.job import elastic
from dtensor.job.elastic import agreed_round
from dtensor.job.job import job, leave
from dtensor.testing import with_ranks
from dtensor.torch_private.core import default_store

SOON = timedelta(seconds=20)


def names_of(store, world, late=()):
    """The name of a round on each of its ranks; those in `late` come when the others have been waiting."""
    found = [""] * world

    def join(rank):
        found[rank] = agreed_round(store, rank, world, SOON)

    threads = [threading.Timer(0.3 if rank in late else 0.0, join, [rank]) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON.total_seconds())
    return found


@pytest.mark.parametrize("late", [(), (0,), (1, 2)])
def test_each_round_has_a_name_of_its_own_which_its_ranks_share(late):
    """On one store, where the words and answers of every earlier round still are."""
    store, rounds = dist.HashStore(), []
    for world in (3, 3, 2, 3):
        found = names_of(store, world, late)
        assert found[0]
        assert set(found) == {found[0]}
        rounds.append(found[0])
    assert len(set(rounds)) == 4


def test_a_rank_of_an_earlier_round_that_was_answered_to_nobody():
    """It asked and was killed; its word is overwritten by that of its successor."""
    store = dist.HashStore()
    store.set("ask/1", "a word of before")
    found = names_of(store, 2, late=(1,))
    assert found[0] == found[1] != ""
    assert store.get("answer/a word of before").decode() == found[0]


@pytest.mark.parametrize(
    ("rank", "said"), [(0, r"ranks \[1, 2\] of 3 have not come .*timeout="), (1, "rank 0 has not come")]
)
def test_a_rank_that_does_not_come_is_named(rank, said):
    with pytest.raises(RuntimeError, match=said):
        agreed_round(dist.HashStore(), rank, 3, timedelta(seconds=0.1))


@with_ranks(2, fresh=True)
def test_failures_and_signs_of_an_earlier_round_are_not_read(rank):
    """The program made the process group, torchrun keeps the store, and the hosts count their restarts apart."""
    os.environ |= {elastic.KEPT_STORE: "True", "TORCHELASTIC_RESTART_COUNT": str(3 * rank)}
    store = default_store()
    if rank == 0:
        store.add("dtensor/job/failures", 1)
        store.set("dtensor/job/failure/1", "a failure of before")
        store.set("dtensor/job/alive/0", "left")
    dist.barrier()
    leave()
    init_device_mesh("cpu", (2,))
    here = job()
    here.check()
    assert here.absent(0) == ""
    dist.barrier()
    if rank == 0:
        here.failed("a failure of now")
    dist.barrier()
    if rank == 1:
        with pytest.raises(AgreementError, match="a failure of now"):
            here.check()


@with_ranks(2, fresh=True)
def test_where_the_store_is_new_each_time_its_keys_are_plain(rank):
    os.environ.pop(elastic.KEPT_STORE, None)
    init_device_mesh("cpu", (2,))
    dist.barrier()
    assert job().store is default_store()


def test_what_a_rank_starts_is_no_rank(monkeypatch):
    """It may go on when the rank has ended, such as an evaluation that is started beside a training run."""
    monkeypatch.setattr(elastic, "_launcher", os.getpid())
    assert elastic._is_rank()  # started by a process that is none
    asks = [sys.executable, "-W", "ignore", "-c", "from dtensor.job import elastic; print(elastic._is_rank())"]
    starts = [sys.executable, "-c", f"import subprocess; subprocess.run({asks!r}, check=True)"]
    environment = {**os.environ, elastic.RUN: "job"}
    assert subprocess.check_output(starts, env=environment, text=True, timeout=120).strip() == "False"
