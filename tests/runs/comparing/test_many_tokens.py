"""Gradients of a layer norm are sums over tokens, which CPUs add up in bfloat16: the more, the larger the rounding."""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import dtensor
from dtensor import init_device_mesh
from dtensor.parallel import fully_shard
from dtensor.runs.comparing.report import report
from dtensor.testing import run_threads

from . import faults, programs

TOKENS, DIM = 1024, 16


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(DIM, DIM), nn.LayerNorm(DIM), nn.Linear(DIM, DIM)).bfloat16()


def train(model, folder, x, weights, fault=None):
    with fault or nullcontext(), dtensor.record(folder):
        (model(x).float() * weights).mean().backward()


def compared(model, tmp_path, fault=None):
    generator = torch.Generator().manual_seed(1)
    x, weights = torch.randn(TOKENS, DIM, generator=generator).bfloat16(), torch.randn(TOKENS, DIM, generator=generator)
    train(copy.deepcopy(model), tmp_path / "one", x, weights)

    def on_rank(rank):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        mine = fully_shard(copy.deepcopy(model), mesh=mesh)
        given = x.chunk(2)[rank], weights.chunk(2)[rank]
        train(mine, tmp_path / "two", *given, fault() if fault is not None and rank == 1 else None)

    run_threads(on_rank, 2)
    return programs.compared(tmp_path / "one", tmp_path / "two")


def test_their_rounding_is_explained(model, tmp_path):
    found = compared(model, tmp_path)
    assert not found.findings, report(found)
    (bias,) = [p for p in found.pairs if p.b.op == "native_layer_norm_backward" and p.b.first["n"] == 2]
    assert bias.difference > 0


def test_a_lost_term_is_not(model, tmp_path):
    def lost():
        return faults.Wrong("native_layer_norm_backward", 0, faults.zero, True, 1)

    found = compared(model, tmp_path, lost).first
    assert (found.value.op, found.value.module) == ("native_layer_norm_backward", "1")
