"""The runners: values come back, failures name their rank, a hang shows its stacks, decorators keep
parameters."""

import os
import random
import sys
import threading
import time
import warnings
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from torch.distributed.device_mesh import init_device_mesh
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from dtensor import Shard, distribute_tensor
from dtensor.comm.collectives import ops
from dtensor.mesh.caches import _caches as caches
from dtensor.testing import RankError, kept_ranks, run_ranks, run_threads, with_ranks, with_threads
from dtensor.testing.processes import start_method
from dtensor.torch_private.core import MODE_FLAGS


@dataclass
class Answer:
    rank: int
    total: torch.Tensor


def total(rank, x):
    y = x * (rank + 1)
    dist.all_reduce(y)
    return Answer(rank, y)


def failing(rank):
    if rank == 1:
        raise ValueError("this rank is broken")
    dist.barrier()


def dying(rank):
    if rank == 1:
        os._exit(7)
    dist.barrier()


def hanging(rank):
    if rank == 0:
        return
    time.sleep(100)


def unpicklable(rank):
    return lambda: rank


def functional_collectives(rank):
    """Each of the five operators on the threaded group."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    group = mesh.get_group("b").group_name
    x = torch.arange(4.0) + 10 * (rank % 2)
    return [
        ops.all_gather(x, 0, 8, group),
        ops.reduce_scatter(x, "sum", 0, group),
        ops.all_reduce(x, "max", group),
        ops.all_to_all(x.view(2, 2), 0, 1, 4, group),
        ops.shard(x, 0, group),
    ]


def test_values_come_back_in_order_of_ranks():
    answers = run_ranks(total, 2, torch.tensor([1.0, 2.0]))
    assert [a.rank for a in answers] == [0, 1]
    assert all(torch.equal(a.total, torch.tensor([3.0, 6.0])) for a in answers)


def said(rank, *names):
    return [os.environ.get(name) for name in names], inductor_config.triton.unique_kernel_names


@pytest.mark.nightly
def test_variables_are_those_of_the_parent(monkeypatch):
    """Those set after the first ranks started, too; and what torch reads when it is imported is read anew."""
    values = {"A_VARIABLE": "1", "DTENSOR_LINKS": "/nowhere", "TORCHINDUCTOR_UNIQUE_KERNEL_NAMES": "0"}
    assert run_ranks(said, 1, "A_VARIABLE") == [([None], True)]
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    assert run_ranks(said, 1, *values) == [([*values.values()], False)]
    monkeypatch.delenv("DTENSOR_LINKS")
    assert run_ranks(said, 1, "DTENSOR_LINKS")[0][0] == [None]


def process(rank):
    return os.getpid()


def changing(rank):
    """Leave as much behind as a job can, and give what was there."""
    found = (
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.rand(3).tolist(),
        random.random(),
        os.environ.get("A_VARIABLE"),
        os.getcwd(),
        inductor_config.size_asserts,
        len(sys.path),
        [f[0] for f in warnings.filters],
        torch.get_num_threads(),
        dict(counters["stats"]),
        [c for c in map(len, caches) if c],
    )
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    os.environ["A_VARIABLE"] = "1"
    os.chdir("/")
    inductor_config.size_asserts = not inductor_config.size_asserts
    sys.path.append("/nowhere")
    warnings.simplefilter("error")
    torch.set_num_threads(2)
    x = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (1,)), [Shard(0)])
    assert torch.compile(lambda x: x * 2, backend="aot_eager")(x).to_local().tolist() == [2.0] * 4
    return os.getpid(), found


def with_a_thread(rank):
    threading.Thread(target=time.sleep, args=(100,), daemon=True, name="a sleeper").start()
    return os.getpid()


def test_kept_processes_are_used_again_and_are_as_new():
    with kept_ranks():
        (one,), (two,), (new,) = (run_ranks(changing, 1, fresh=fresh) for fresh in (False, False, True))
    assert one[0] == two[0] != new[0]
    assert one[1][:3] == two[1][:3] == new[1][:3]
    assert one[1][4:] == two[1][4:] == new[1][4:]
    assert one[1][3] == two[1][3]


def test_any_number_of_ranks_takes_what_is_there():
    with kept_ranks():
        (one,) = run_ranks(process, 1)
        three = run_ranks(process, 3)
        assert one in three
        assert set(run_ranks(process, 2)) < set(three)


@pytest.mark.nightly
def test_a_process_is_not_used_again_after_a_failure_nor_with_threads():
    with kept_ranks():
        before = run_ranks(process, 2)
        with pytest.raises(RankError, match="this rank is broken"):
            run_ranks(failing, 2)
        after = run_ranks(process, 2)
        assert not set(before) & set(after)
        (busy,) = run_ranks(with_a_thread, 1)
        assert busy in after
        assert busy not in run_ranks(process, 2)


def test_outside_of_the_context_nothing_is_kept():
    with kept_ranks():
        (kept,) = run_ranks(process, 1)
    with pytest.raises(ProcessLookupError):
        os.kill(kept, 0)


def test_a_failure_names_its_rank():
    with pytest.raises(RankError, match=r"rank 1 of 2 failed:(.|\n)*in failing(.|\n)*this rank is broken") as info:
        run_ranks(failing, 2)
    assert info.value.rank == 1


def test_a_rank_that_dies_is_reported_with_its_exit_code():
    with pytest.raises(RankError, match="rank 1 of 2 failed:\nits process ended with exit code 7"):
        run_ranks(dying, 2)


def test_a_hang_shows_the_stacks(capfd):
    run_ranks(process, 2)  # now their processes are there, and a short time is long enough to start
    with pytest.raises(TimeoutError, match=r"rank 0 is done\nrank 1 is in:(.|\n)*in hanging"):
        run_ranks(hanging, 2, timeout=3)
    assert "in hanging" in capfd.readouterr().err


def test_a_value_that_cannot_be_pickled_is_a_failure():
    with pytest.raises(RankError, match=r"rank 0 of 1 failed(.|\n)*pickle"):
        run_ranks(unpicklable, 1)


@pytest.mark.parametrize("fn", [lambda rank: rank, object()])
def test_a_function_without_a_name_is_refused(fn):
    with pytest.raises(ValueError, match="top level of a module"):
        run_ranks(fn, 1)


@pytest.mark.parametrize("run", [run_ranks, run_threads])
def test_no_ranks_are_refused(run):
    with pytest.raises(ValueError, match="at least 1; got 0"):
        run(total, 0)


@pytest.mark.parametrize("offset", [5])
@with_ranks(2)
def test_decorated_for_processes(rank, offset):
    assert dist.get_world_size() == 2
    assert dist.get_rank() == rank
    assert offset == 5


@pytest.mark.parametrize("offset", [0, 3])
@with_threads(4)
def test_decorated_for_threads(rank, offset):
    x = torch.tensor([rank + offset])
    dist.all_reduce(x)
    assert x.item() == 6 + 4 * offset


def test_a_decorated_test_takes_rank_first():
    with pytest.raises(TypeError, match="takes `rank` first"):
        with_threads(2)(test_values_come_back_in_order_of_ranks)


def test_threads_return_values_and_leave_nothing_behind():
    answers = run_threads(total, 3, torch.tensor([1.0]))
    assert [a.total.item() for a in answers] == [6.0] * 3
    assert not dist.is_initialized()


def test_a_failing_thread_ends_the_others():
    start = time.monotonic()
    with pytest.raises(RankError, match=r"rank 1 of 2 .* failed:(.|\n)*this rank is broken"):
        run_threads(failing, 2)
    assert time.monotonic() - start < 10


def test_a_thread_that_waits_for_ever_shows_the_stacks(capfd):
    with pytest.raises(TimeoutError, match=r"not done after 1 s in rank 1(.|\n)*in waiting"):
        run_threads(waiting, 2, timeout=1)
    assert "in waiting" in capfd.readouterr().err


def waiting(rank):
    if rank == 1:
        dist.barrier()


def test_threads_carry_out_the_redistribution_operators():
    gathered, scattered, reduced, swapped, shard = run_threads(functional_collectives, 4)[3]
    assert gathered.tolist() == [0, 1, 2, 3, 10, 11, 12, 13]
    assert scattered.tolist() == [2 + 12, 3 + 13]
    assert reduced.tolist() == [10, 11, 12, 13]
    assert swapped.tolist() == [[1], [3], [11], [13]]
    assert shard.tolist() == [12, 13]


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def overlapping(rank, turns):
    """Each rank leaves its mode while the other is in one, or about to be."""
    if rank == 1:
        turns[0].wait(10)
    with Mode():
        turns[rank].set()
        turns[1 + rank].wait(10)
    turns[2 + rank].set()
    return turns[3].wait(10)


def test_modes_of_threads_are_over_when_the_threads_are():
    """Torch counts them in variables of the process, which two threads restore in the wrong order."""
    before = [getattr(_python_dispatch, name) for name in MODE_FLAGS]
    assert run_threads(overlapping, 2, [threading.Event() for _ in range(4)]) == [True, True]
    assert [getattr(_python_dispatch, name) for name in MODE_FLAGS] == before


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere ranks are spawned")
def test_ranks_are_forked_after_accelerate_has_been_imported(monkeypatch):
    """It sets a variable that torch reads later; one that is read at import makes them import torch anew."""
    assert start_method("gloo") == "forkserver"
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "0")
    assert start_method("gloo") == "forkserver"
    monkeypatch.setenv("TORCH_LOGS", "+dynamo")
    assert start_method("gloo") == "spawn"
