"""Whole tensors in `load_state_dict` of sharded models: each rank takes its part; errors are those of plain torch."""

import copy
import itertools

import pytest
import torch
import torch.distributed.tensor as theirs
from torch import nn

from dtensor import DTensor, Shard, distribute_model, init_device_mesh, safetensors
from dtensor.parallel import ColwiseParallel, RowwiseParallel, fully_shard, parallelize_module
from dtensor.testing import with_ranks

DOORS = {
    "styles": lambda m, mesh: parallelize_module(m, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()}),
    "fsdp": lambda m, mesh: fully_shard(m, mesh["dp"]),
    "both": lambda m, mesh: distribute_model(fully_shard(m, mesh["dp"]), mesh["tp"], {"*.weight": {"tp": Shard(0)}}),
    "model": lambda m, mesh: distribute_model(m, mesh, {"0.weight": {"tp": Shard(0)}}, outputs={}),
}


def made(device="cpu"):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).to(device)


def whole(x):
    return x.full_tensor() if isinstance(x, DTensor) else x


def assert_loaded(model, wanted):
    for name, x in model.state_dict().items():
        assert torch.equal(whole(x), wanted[name]), name


def refusal(model, state):
    with pytest.raises(RuntimeError) as caught:
        model.load_state_dict(state)
    return str(caught.value).partition("\n")[2]


@with_ranks(4)
def test_each_rank_takes_its_part(rank, tmp_path):
    load_into(tmp_path, "both")


@pytest.mark.nightly
@with_ranks(4)
def test_each_rank_takes_its_part_by_all_doors(rank, tmp_path):
    load_into(tmp_path, *DOORS)


def load_into(tmp_path, *doors):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    wanted = {k: torch.randn_like(v) if v.is_floating_point() else v + 3 for k, v in made().state_dict().items()}
    safetensors.export(wanted, tmp_path / "model.safetensors")
    for door, from_file, assign in itertools.product(doors, (False, True), (False, True)):
        shard = DOORS[door]
        for device in ("cpu", "meta") if assign else ("cpu",):
            model = shard(made(device), mesh)
            state = safetensors.state_dict(tmp_path / "model.safetensors") if from_file else copy.deepcopy(wanted)
            assert not any(model.load_state_dict(state, assign=assign)), door
            assert_loaded(model, wanted)
            for p in model.parameters():
                local = p.to_local() if isinstance(p, DTensor) else p
                assert not isinstance(p, DTensor) or local.untyped_storage().nbytes() == local.nbytes
            if door in ("fsdp", "model"):
                model(torch.ones(4, 6)).sum().backward()
            less = {**{k: v for k, v in state.items() if k != "0.weight"}, "more": torch.ones(1)}
            found = model.load_state_dict(less, strict=False)
            assert (found.missing_keys, found.unexpected_keys) == (["0.weight"], ["more"])
            assert refusal(model, less) == refusal(made(), less)
            other = {**state, "0.weight": torch.ones(2, 2), "2.bias": torch.ones(7)}
            assert refusal(model, other) == refusal(made(), other)
    of_torch = {
        k: theirs.distribute_tensor(v, mesh["dp"], [theirs.Shard(0)]) for k, v in wanted.items() if "1." not in k
    }
    model = copy.deepcopy(DOORS["fsdp"](made(), mesh))
    model.load_state_dict({**wanted, **of_torch})
    assert_loaded(model, wanted)


@with_ranks(2)
def test_a_model_of_tensors_that_are_read_when_it_is_sharded(rank, tmp_path):
    mesh, path = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)), tmp_path / "model.safetensors"
    wanted = made().state_dict()
    safetensors.export(wanted, path)
    model = made("meta")
    model[2].bias.requires_grad_(False)
    model.load_state_dict(safetensors.state_dict(path), assign=True)
    assert model[0].weight.is_meta
    fully_shard(model[0], mesh)
    fully_shard(model, mesh, ignored_params=[model[2].weight])
    assert_loaded(model, wanted)
    assert isinstance(model[1].weight, DTensor)
    assert not isinstance(model[2].weight, DTensor)
    assert [p.requires_grad for p in model.parameters()] == [True] * 5 + [False]
    plain = made("meta")
    plain.load_state_dict(safetensors.state_dict(path), assign=True)
    copied = made()
    copied.load_state_dict(safetensors.state_dict(path))
    assert_loaded(copied, wanted)
