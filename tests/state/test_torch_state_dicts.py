"""Whole and sharded state dicts of torch.distributed.checkpoint.state_dict, and DTensors that torch.save wrote."""

import copy
import io
import itertools

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor as theirs
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from dtensor import DTensor, Replicate, Shard, ShardingError, distribute_model, distribute_tensor, init_device_mesh
from dtensor.parallel import ColwiseParallel, RowwiseParallel, fully_shard, parallelize_module
from dtensor.testing import with_ranks

STYLES = {"0": ColwiseParallel(), "2": RowwiseParallel()}
DOORS = {
    "none": lambda model, mesh: model,
    "styles": lambda model, mesh: parallelize_module(model, mesh, STYLES),
    "fully_shard": fully_shard,
    "distribute_model": lambda model, mesh: distribute_model(model, mesh),
}


def trained(seed, door="none", mesh=None, steps=2):
    """A model whose first bias is frozen and whose dims are uneven, and its optimizer, after some steps."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3))
    model[0].bias.requires_grad_(False)
    model = DOORS[door](model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        torch.manual_seed(seed + step)
        model(torch.randn(4, 6)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def same(found, wanted):
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys()
        for key in wanted:
            same(found[key], wanted[key])
    elif isinstance(wanted, list | tuple):  # torch makes lists of tuples when it sets whole ones
        assert len(found) == len(wanted)
        for x, y in zip(found, wanted):
            same(x, y)
    elif isinstance(wanted, torch.Tensor):
        assert type(found) is torch.Tensor
        torch.testing.assert_close(found, wanted)
    else:
        assert found == wanted, (found, wanted)


def whole(x):
    if isinstance(x, dict):
        return {key: whole(value) for key, value in x.items()}
    return [whole(v) for v in x] if isinstance(x, list | tuple) else x.full_tensor() if isinstance(x, DTensor) else x


@with_ranks(2)
def test_state_dicts_are_those_of_one_device(rank):
    compare("fully_shard")


@pytest.mark.nightly
@with_ranks(2)
def test_state_dicts_of_all_doors_are_those_of_one_device(rank):
    compare("styles", "distribute_model")


def compare(*doors):
    """Every option of the functions that get and set, through `doors`."""
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))
    one, its = trained(0)
    for door in doors:
        model, optimizer = trained(0, door, mesh)
        for full, offload, frozen, flat in itertools.product((False, True), repeat=4):
            options = StateDictOptions(
                full_state_dict=full,
                cpu_offload=offload,
                ignore_frozen_params=frozen,
                flatten_optimizer_state_dict=flat,
            )
            found = (
                get_model_state_dict(model, options=options),
                get_optimizer_state_dict(model, optimizer, options=options),
            )
            if full and offload and rank:
                assert found == ({}, {})
                continue
            plain = StateDictOptions(ignore_frozen_params=frozen, flatten_optimizer_state_dict=flat)
            same(found[0] if full else whole(found[0]), get_model_state_dict(one, options=plain))
            same(found[1] if full else whole(found[1]), get_optimizer_state_dict(one, its, options=plain))
        for broadcast, offload, strict in itertools.product((False, True), repeat=3):
            options = StateDictOptions(
                full_state_dict=True,
                broadcast_from_rank0=broadcast,
                cpu_offload=offload,
                strict=strict,
            )  # torch cannot set a flat and whole optimizer state, even of a model that is not sharded
            states = get_model_state_dict(one), get_optimizer_state_dict(one, its)
            states = copy.deepcopy(states) if rank == 0 or not broadcast else ({}, {})
            other, of_other = trained(7, door, mesh, steps=0)
            set_model_state_dict(other, states[0], options=options)
            set_optimizer_state_dict(other, of_other, states[1], options=options)
            same(whole(get_model_state_dict(other)), get_model_state_dict(one))
            same(whole(get_optimizer_state_dict(other, of_other)), get_optimizer_state_dict(one, its))
            other(torch.ones(4, 6)).sum().backward()
            of_other.step()


@with_ranks(2)
def test_torchs_own_tensors_stay_right(rank):
    from torch.distributed.fsdp import fully_shard as torch_fully_shard

    mesh = init_device_mesh("cpu", (2,))
    one, model = trained(0)[0], trained(0)[0]
    torch_fully_shard(model, mesh=mesh)
    for broadcast in (False, True):
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
        given = copy.deepcopy(one.state_dict()) if rank == 0 or not broadcast else {}
        set_model_state_dict(model, given, options=options)
        assert all(isinstance(p, theirs.DTensor) for p in model.parameters())
        same(get_model_state_dict(model, options=options), one.state_dict())


def sent(x, weights_only=True):
    """What torch.load makes on this rank of what rank 0 saved by torch.save."""
    buffer = io.BytesIO()
    torch.save(x, buffer)
    told = [buffer.getvalue()]
    dist.broadcast_object_list(told, src=0)
    return torch.load(io.BytesIO(told[0]), weights_only=weights_only)


@with_ranks(4)
def test_a_pickled_part_is_never_another_ranks(rank):
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    given = torch.arange(12.0).view(4, 3)
    for mesh, placements, fits in (
        (grid, [Shard(0), Replicate()], (0, 1)),
        (grid, [Replicate(), Shard(1)], (0, 2)),
        (grid, [Shard(0), Shard(0)], (0,)),
        (grid["tp"], [Shard(0)], (0, 2)),
        (grid, [Replicate(), Replicate()], (0, 1, 2, 3)),
        (grid["dp"], [Replicate()], (0, 1, 2, 3)),
    ):
        x = distribute_tensor(given, mesh, placements)
        for weights_only in (True, False):
            if rank not in fits:
                with pytest.raises(
                    ShardingError, match=r"write|Pickle whole tensors, x.full_tensor\(\) or get_model_state"
                ):
                    sent(x, weights_only)
                found = x
            else:
                found = sent(x, weights_only)
            assert found.full_tensor().equal(given)
            again = found.redistribute(placements=[Shard(0)] * mesh.ndim)
            assert again.to_local().equal(x.redistribute(placements=[Shard(0)] * mesh.ndim).to_local())
