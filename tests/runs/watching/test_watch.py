"""`dtensor.watch`: what differs between ranks is found and named on all of them, and nothing else is."""

import copy
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import distribute_tensor as torch_distribute_tensor

import dtensor
from dtensor import MeshError, ReplicaError, Shard, distribute_tensor, init_device_mesh
from dtensor.parallel import ColwiseParallel, RowwiseParallel, fully_shard, parallelize_module
from dtensor.testing import ModelArgs, Transformer, with_ranks, with_threads

LOCK = threading.Lock()
"""Threads share the default generator: what draws from it is done one at a time."""


def made(seed: int = 0) -> Any:
    with LOCK:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))


def adam(model, lr=0.01):
    return torch.optim.AdamW(model.parameters(), lr=lr)


def batch(rank, step=0):
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + rank))


def train(model, optimizer, steps, rank=0):
    for step in range(steps):
        optimizer.zero_grad()
        model(batch(rank, step)).square().sum().backward()
        optimizer.step()


def flip(x, at, bit):
    """Flip one bit of an element of a plain float32 tensor."""
    words = x.detach().view(torch.int32).view(-1)
    words[at] ^= (1 << bit) if bit < 31 else -(1 << 31)


def said(error, call):
    """The message of the error, which is the same on all ranks."""
    with pytest.raises(error) as found:
        call()
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, str(found.value))
    assert set(everywhere) == {str(found.value)}
    return str(found.value)


@with_threads(4)
def test_a_flipped_bit_is_found_within_every_steps(rank):
    model = made()
    optimizer = adam(model)
    watched = dtensor.watch(model, optimizer, every=3)
    train(model, optimizer, 4)
    if rank == 2:
        flip(model[0].weight, 7, 30)
    with pytest.raises(ReplicaError, match=r"after step 6, 0.weight .* differs between rank 2 and ranks 0, 1, 3:"):
        train(model, optimizer, 3)
    assert watched.steps == 6


@pytest.mark.parametrize(("bit", "part"), [(31, "the sign"), (23, "of the exponent"), (0, "of the mantissa")])
@with_threads(4)
def test_a_flipped_bit_names_rank_element_and_bit(rank, bit, part):
    model = made()
    watched = dtensor.watch(model)
    if rank == 3:
        flip(model[2].weight, 8 * 2 + 5, bit)
    text = said(ReplicaError, watched.check)
    assert "2.weight (parameter, float32 [5, 8]) differs between rank 3 and ranks 0, 1, 2: 1 of 40 elements" in text
    assert "at [2, 5], which is" in text
    assert f"only bit {bit} differs ({part})" in text
    assert "the memory or the processor of rank 3" in text


@with_threads(2)
def test_of_two_ranks_both_are_named(rank):
    model = made()
    watched = dtensor.watch(model)
    if rank == 1:
        with torch.no_grad():
            model[2].bias[4] = 0.0
            model[2].bias[1] = 2.5
    values: list[Any] = [None, None]
    dist.all_gather_object(values, model[2].bias[1].item())
    text = said(ReplicaError, watched.check)
    assert "differs between rank 0 and rank 1, neither a majority: 2 of 5 elements, most at [1], which is " in text
    assert f"{values[0]} on rank 0 and 2.5 on rank 1" in text


@with_threads(2)
def test_a_forgotten_sum_of_gradients_is_found(rank):
    model = made()
    optimizer = adam(model)
    dtensor.watch(model, optimizer, every=2)
    train(model, optimizer, 1, rank)
    optimizer.zero_grad()
    text = said(ReplicaError, lambda: train(model, optimizer, 1, rank))
    assert "after step 2, 0.weight" in text
    assert "48 of 48 elements" in text
    assert "gradients are not summed: write fully_shard(model, mesh)" in text


@with_threads(2)
def test_other_seeds_are_found_before_the_first_step(rank):
    text = said(ReplicaError, lambda: dtensor.watch(made(seed=rank)))
    assert text.startswith("before the first step, 0.weight")
    assert "Nothing has been trained yet" in text


@with_threads(2)
def test_optimizer_state_and_options_are_compared(rank):
    model = made()
    optimizer = adam(model)
    watched = dtensor.watch(model, [optimizer])
    train(model, optimizer, 1)
    watched.check()
    optimizer.param_groups[0]["lr"] += 0.5 * rank
    assert "param_groups[0] of the optimizer differs" in (text := said(ReplicaError, watched.check))
    assert "lr is 0.01 on rank 0 and 0.51 on rank 1" in text
    optimizer.param_groups[0]["lr"] = 0.01
    optimizer.state[model[2].weight]["exp_avg"][1, 3] += rank
    assert "exp_avg of 2.weight (optimizer state, float32 [5, 8]) differs" in (
        text := said(ReplicaError, watched.check)
    )
    assert "at [1, 3]" in text
    optimizer.state[model[2].weight]["exp_avg"][1, 3] -= rank
    optimizer.state[model[2].weight]["step"] += rank
    assert "step of 2.weight" in said(ReplicaError, watched.check)
    optimizer.state[model[2].weight]["step"] -= rank
    optimizer.state[model[0].bias]["gradient"] = torch.full((8,), float(rank))  # a key that is a role, too
    assert "gradient of 0.bias (optimizer state, float32 [8])" in said(ReplicaError, watched.check)


@with_threads(2)
def test_what_only_an_optimizer_holds_is_compared(rank):
    model, extra = made(), nn.Parameter(torch.ones(3))
    first, second = adam(model), torch.optim.SGD([extra], lr=0.1, momentum=0.9)
    watched = dtensor.watch(model, first, second)
    with torch.no_grad():
        extra[2] += rank
    assert "optimizer 1, param_groups[0]['params'][0] (parameter" in said(ReplicaError, watched.check)


def hybrid(rank) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    return fully_shard(made(), mesh)


@with_threads(4)
def test_a_replica_of_hybrid_sharding_that_differs(rank):
    model = hybrid(rank)
    optimizer = adam(model)
    with dtensor.watch(model, optimizer, every=2):
        train(model, optimizer, 3, rank)
        if rank == 3:
            model[2].weight.detach().to_local()[1, 4] += 1
        text = said(ReplicaError, lambda: train(model, optimizer, 1, rank))
    # Of five rows, rank 3 has the last two.
    assert "2.weight (parameter, float32 [5, 8] RS(0)) differs between rank 1 and rank 3" in text
    assert "along mesh axis 'replica': 1 of 16 elements of its part, that at [4, 4]" in text


@with_threads(2)
def test_shards_have_nothing_to_be_compared_with(rank):
    model = fully_shard(made(), init_device_mesh("cpu", (2,)))
    watched = dtensor.watch(model, adam(model))
    with torch.no_grad():
        for p in model.parameters():
            p.to_local().add_(rank + 1)
    watched.check()


@with_threads(4)
def test_the_axis_along_which_replicas_differ_is_named(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for bad, sides, axes in (
        ((1, 3), "ranks 0, 2 and ranks 1, 3, neither a majority, along mesh axis 'tp'", "tp"),
        ((2, 3), "ranks 0, 1 and ranks 2, 3, neither a majority, along mesh axis 'dp'", "dp"),
        ((2,), "rank 2 and ranks 0, 1, 3, along mesh axes 'dp' and 'tp'", "both"),
    ):
        model = nn.Linear(2, 2, bias=False)
        model.weight = nn.Parameter(distribute_tensor(torch.ones(2, 2), mesh, [dtensor.Replicate()] * 2))
        watched = dtensor.watch(model)
        if rank in bad:
            model.weight.detach().to_local()[0, 1] = 2.0
        assert f"differs between {sides}: 1 of 4 elements" in said(ReplicaError, watched.check), axes


def tensor_parallel(rank) -> Any:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    return parallelize_module(made(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def both(rank) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model: Any = parallelize_module(made(), mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return fully_shard(model, mesh["dp"])


def sharded(rank) -> Any:
    return fully_shard(made(), init_device_mesh("cpu", (4,)))


@pytest.mark.parametrize("make", [tensor_parallel, sharded, hybrid, both])
@with_threads(4)
def test_training_that_is_right_is_left_alone(rank, make):
    model = make(rank)
    optimizer = adam(model)
    own = {tensor_parallel: 0, sharded: rank, hybrid: rank, both: rank // 2}[make]
    with dtensor.watch(model, optimizer, every=1) as watched:
        train(model, optimizer, 30, own)
    assert watched.steps == 30


@with_threads(4)
def test_a_transformer_is_left_alone(rank):
    mesh = init_device_mesh("cpu", (4,))
    with LOCK:
        torch.manual_seed(0)
        model = Transformer(ModelArgs(dropout_p=0.0))
    model = Transformer.parallelize(model, mesh, True)
    optimizer = adam(model)
    with dtensor.watch(model, optimizer, every=1):
        for step in range(3):
            tokens = torch.randint(8, (2, 16), generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            model(tokens).square().mean().backward()
            optimizer.step()


@with_threads(4)
def test_both_plans_compare_along_each_axis(rank):
    model: Any = both(rank)
    watched = dtensor.watch(model)
    assert model[2].bias.placements == (Shard(0), dtensor.Replicate())
    if rank == 1:
        model[2].bias.detach().to_local()[0] += 1
    assert "2.bias (parameter, float32 [5] S(0)R) differs between rank 0 and rank 1" in (
        text := said(ReplicaError, watched.check)
    )
    assert "along mesh axis 'tp'" in text


@with_threads(4)
def test_a_mesh_says_where_slices_are_replicated(rank):
    """Tensor parallelism on a slice, and data parallelism by hand: only the mesh shows that."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model: Any = parallelize_module(made(), mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    alone, along = dtensor.watch(model), dtensor.watch(model, mesh=mesh)
    if rank == 3:
        model[0].weight.detach().to_local()[2, 1] += 1
    alone.check()
    text = said(ReplicaError, along.check)
    assert "0.weight (parameter, float32 [8, 6] S(0)) differs between rank 1 and rank 3" in text
    assert "at [6, 1]" in text


@with_threads(4)
def test_stages_of_a_pipeline_give_their_mesh(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    model = nn.Linear(3, 4 + rank // 2)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(rank // 2)
    assert "(mesh=), such as that of a pipeline stage" in said(ReplicaError, lambda: dtensor.watch(model))
    watched = dtensor.watch(model, mesh=mesh["dp"])
    if rank // 2:
        with torch.no_grad():
            model.bias[0] = rank
        with pytest.raises(ReplicaError, match=r"bias .* between rank 2 and rank 3"):
            watched.check()
    else:
        watched.check()


@with_threads(2)
def test_different_sets_of_tensors_are_an_error_on_all_ranks(rank):
    text = said(ReplicaError, lambda: dtensor.watch(nn.Linear(3, 3, bias=rank == 0)))
    assert "rank 0 holds parameter bias: float32 [3], where rank 1 holds nothing more" in text
    text = said(ReplicaError, lambda: dtensor.watch(nn.Linear(3, 3 + rank)))
    assert "rank 0 holds parameter weight: float32 [3, 3], where rank 1 holds parameter weight: float32 [4, 3]" in text
    text = said(ReplicaError, lambda: dtensor.watch(made(), [], [adam(made())][rank:]))
    assert "options param_groups[0]" in text


@with_threads(2)
def test_different_numbers_of_steps_are_an_error_on_all_ranks(rank):
    watched = dtensor.watch(made())
    watched.steps = 5 + rank
    assert "(rank 0: 5, rank 1: 6)" in said(ReplicaError, watched.check)


def test_a_warning_instead():
    model = made()
    watched = dtensor.watch(model, on_difference="warn")
    with torch.no_grad():
        model[0].bias[0] = float("inf")
    with pytest.warns(UserWarning, match=r"parameter 0.bias is not finite on rank 0: 1 infinite of 8 elements"):
        watched.check()


@with_threads(2)
def test_names_that_are_skipped_may_differ(rank):
    model = made()
    optimizer = adam(model)
    watched = dtensor.watch(model, optimizer, skip=["0.*"])
    train(model, optimizer, 1)
    with torch.no_grad():
        model[0].weight += rank
    optimizer.state[model[0].weight]["exp_avg"] += rank
    watched.check()
    with torch.no_grad():
        model[2].weight += rank
    assert "2.weight" in said(ReplicaError, watched.check)


@with_threads(2)
def test_buffers_are_compared_but_statistics_of_batches(rank):
    model: Any = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 2))
    model.register_buffer("table", torch.arange(4.0))
    with torch.no_grad():
        model[1].weight.fill_(1.0), model[1].bias.fill_(0.0)
    watched = dtensor.watch(model)
    model(batch(rank))
    assert not model[0].running_mean.eq(0).any()
    watched.check()
    model.table[1] += rank
    assert "table (buffer, float32 [4]) differs" in said(ReplicaError, watched.check)


@with_threads(2)
def test_tensors_of_torchs_dtensor(rank):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model = nn.Linear(3, 2, bias=False)
    model.weight = nn.Parameter(torch_distribute_tensor(torch.ones(2, 3), mesh, [TorchReplicate()]))
    watched = dtensor.watch(model)
    model.weight.detach().to_local()[1, 2] += rank
    assert "weight (parameter, float32 [2, 3] R) differs" in (text := said(ReplicaError, watched.check))
    assert "along mesh axis 'dp': 1 of 6 elements, that at [1, 2]" in text


@with_threads(2)
def test_nans_are_named_with_their_ranks(rank):
    model = fully_shard(made(), init_device_mesh("cpu", (2,)))
    optimizer = adam(model)
    dtensor.watch(model, optimizer, every=1)
    train(model, optimizer, 2, rank)
    model(batch(rank)).square().sum().backward()
    if rank == 1:
        model[0].weight.grad.to_local()[1, 2] = float("nan")
        model[0].weight.grad.to_local()[2, 2] = float("inf")
    text = said(FloatingPointError, optimizer.step)
    assert "after step 3, gradient of 0.weight is not finite on rank 1: 1 NaN and 1 infinite of 24 elements" in text
    assert "on rank 1, the first at [5, 2]; 3 more tensors hold some" in text
    assert "nan=True" in text


@with_threads(2)
def test_a_nan_on_one_replica_is_a_difference_and_a_nan(rank):
    model = made()
    watched = dtensor.watch(model)
    if rank == 1:
        with torch.no_grad():
            model[0].bias[3] = float("nan")
    text = said(ReplicaError, watched.check)
    assert "0.bias (parameter, float32 [8]) differs" in text
    assert "at [3]" in text
    assert "Moreover, before the first step, parameter 0.bias is not finite on rank 1: 1 NaN of 8 elements" in text


@with_threads(2)
def test_a_comparison_is_one_small_collective(rank):
    model = made()
    optimizer = adam(model)
    watched = dtensor.watch(model, optimizer)
    train(model, optimizer, 1)
    sent, scope = [], watched._scope
    gather = scope.gather

    def counted(x):
        sent.append(x.numel())
        return gather(x)

    vars(scope).update(gather=counted, objects=None, broadcast=None)
    watched.check()
    assert len(sent) == 1
    assert sent[0] * 8 < 1024


@with_threads(2)
def test_close_removes_what_watch_has_hooked(rank):
    model = made()
    optimizer = adam(model)
    watched = dtensor.watch(model, optimizer, every=1)
    train(model, optimizer, 1)
    assert len(optimizer._optimizer_step_post_hooks) == 1
    watched.close()
    watched.close()
    assert not optimizer._optimizer_step_post_hooks
    if rank == 1:
        with torch.no_grad():
            model[0].weight += 1
    train(model, optimizer, 2)
    assert watched.steps == 1


@pytest.mark.parametrize("every", [0, -1, True, 2.5, None])
def test_every_is_a_positive_number_of_steps(every):
    with pytest.raises(ValueError, match="every is the number of steps between comparisons, an int of at least 1; got"):
        dtensor.watch(made(), every=every)


def test_arguments_that_cannot_be():
    model = made()
    with pytest.raises(ValueError, match=r"skip='0.wieght' matches no parameter .* for example 0.weight"):
        dtensor.watch(model, skip="0.wieght")
    with pytest.raises(ValueError, match="on_difference is 'raise' or 'warn'; got 'error'"):
        dtensor.watch(model, on_difference="error")
    with pytest.raises(TypeError, match=r"got int; every, skip and the like are given by their names"):
        dtensor.watch(model, 100)
    with pytest.raises(TypeError, match=r"watch takes an nn.Module and its optimizers; got an AdamW, write watch"):
        dtensor.watch(adam(model), model)
    with pytest.raises(TypeError, match="rng one of them or None; got nan=False, rng='no'"):
        dtensor.watch(model, rng="no")
    with pytest.raises(MeshError, match="device_mesh must be a mesh"):
        dtensor.watch(model, mesh="dp")


def test_one_process_looks_for_nans_alone():
    model = made()
    optimizer = adam(model)
    with dtensor.watch(model, optimizer, every=1):
        train(model, optimizer, 2)
        model[0].weight.register_hook(lambda g: g * float("nan"))
        with pytest.raises(FloatingPointError, match=r"after step 3, gradient of 0.weight"):
            train(model, optimizer, 1)


def test_parameters_without_memory_are_passed_over():
    with torch.device("meta"):
        model = nn.Linear(3, 3)
    dtensor.watch(model).check()
    dtensor.watch(nn.LazyLinear(3)).check()


@with_ranks(2)
def test_generators_that_differ(rank):
    torch.manual_seed(rank)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    plain, data = nn.Linear(2, 2), fully_shard(nn.Linear(4, 4), mesh)
    model = parallelize_module(nn.Linear(4, 4), mesh, ColwiseParallel())
    dtensor.watch(model, rng=False)
    dtensor.watch(data)  # each rank drops out other elements of its own batch
    with torch.no_grad():
        for p in plain.parameters():
            p.fill_(1.0)
    dtensor.watch(plain)
    text = said(ReplicaError, lambda: dtensor.watch(model))
    assert "before the first step, the generator of the CPU is in different states on rank 0 and rank 1" in text
    assert "along mesh axis 'tp'" in text
    assert "dtensor.random.manual_seed(seed, mesh)" in text
    assert "the generator of the CPU" in said(ReplicaError, lambda: dtensor.watch(plain, rng=True))
    dtensor.random.manual_seed(0, mesh)
    watched = dtensor.watch(model)
    if rank == 1:
        torch.rand(1)
    assert "the generator of the CPU" in said(ReplicaError, watched.check)


@with_ranks(2)
def test_compiled_models_and_steps(rank):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model: Any = parallelize_module(made(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    compiled = torch.compile(model, backend="dtensor", options={"inner": "aot_eager"}, fullgraph=True)
    step = torch.compile(optimizer.step, backend="aot_eager")
    watched = dtensor.watch(compiled, optimizer, every=2)

    def train(steps):
        for i in range(steps):
            compiled(batch(0, i)).square().sum().backward()
            step()
            optimizer.zero_grad()

    train(4)
    assert watched.steps == 4
    if rank == 1:
        flip(model[2].bias.detach().to_local(), 3, 20)
    text = said(ReplicaError, lambda: train(2))
    assert "after step 6, 2.bias (parameter, float32 [5] R) differs" in text
    watched.close()
    copy.deepcopy(model)


@with_ranks(2)
def test_a_whole_dtensor_and_its_copy(rank):
    """A tensor whose elements are sent in parts, and whose index is that in the global tensor."""
    mesh = init_device_mesh("cpu", (2,))
    model = nn.Module()
    model.register_buffer("table", distribute_tensor(torch.zeros(3, 1 << 21), mesh, [dtensor.Replicate()]))
    watched = dtensor.watch(model)
    if rank == 1:
        model.table.to_local()[2, 77] = 1.0
    assert "at [2, 77], which is 0.0 on rank 0 and 1.0 on rank 1" in said(ReplicaError, watched.check)
