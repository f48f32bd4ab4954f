"""Plans by hand, whose values are plain tensors: what their ranks hold follows from what it is compared with."""

import copy
import re

import pytest
import torch
from torch import nn

import dtensor
from dtensor import init_device_mesh
from dtensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from dtensor.parallel.checks.rank_variance import WATCHED
from dtensor.runs.comparing.report import report
from dtensor.testing import run_threads

from . import programs


class Layer(nn.Module):
    """Heads that are normalised one by one, so that all of them share a weight."""

    def __init__(self):
        super().__init__()
        self.q, self.q_norm, self.o = nn.Linear(8, 16), nn.RMSNorm(4), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.o(self.q_norm(self.q(x).unflatten(-1, (-1, 4))).sin().flatten(2))


PLAN = {"q": ColwiseParallel(), "o": RowwiseParallel()}


def train(model, folder, reduce=lambda: None, **given):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with dtensor.record(folder, **given):
        for _ in range(2):
            x = torch.linspace(-1, 1, 2 * 3 * 8).sin().view(2, 3, 8)
            model(x).square().mean().backward()
            reduce()
            optimizer.step()
            optimizer.zero_grad()


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Layer()


def sharded(model, folder, reduced, **given):
    def on_rank(rank):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        mine = parallelize_module(copy.deepcopy(model), mesh, PLAN)
        weight = mine.q_norm.weight
        vars(weight).pop(WATCHED)

        def reduce():
            if reduced:
                term = dtensor.DTensor.from_local(weight.grad, mesh, [dtensor.Partial()])
                weight.grad.copy_(term.full_tensor())

        train(mine, folder, reduce, **given)

    run_threads(on_rank, 2)


def test_a_gradient_that_nobody_adds_up(model, tmp_path):
    train(copy.deepcopy(model), tmp_path / "one", values="gradient/q_norm*")
    sharded(model, tmp_path / "two", reduced=False, values="gradient/q_norm*")
    found = programs.compared(tmp_path / "one", tmp_path / "two")
    first = found.first
    assert (first.value.phase, first.value.module, first.ranks) == ("gradient", "q_norm.weight", (0, 1))
    assert first.said == "each rank has its own term of the sum, and nobody added them up"
    text = report(found)
    assert re.search(r"\n  inputs     \w+ in q_norm \(backward, .* test_plans_by_hand.py:\d+: differs by ", text)
    assert "\n  worst      element [" in text


def test_a_gradient_that_is_added_up(model, tmp_path):
    train(copy.deepcopy(model), tmp_path / "one")
    sharded(model, tmp_path / "two", reduced=True)
    assert programs.compared(tmp_path / "one", tmp_path / "two").findings == []


def test_a_gradient_that_is_twice_as_large(model, tmp_path):
    """As of a loss that ranks sum and should average: an optimizer may not mind, but it is not the same gradient."""
    train(copy.deepcopy(model), tmp_path / "one")

    def on_rank(rank):
        mine = copy.deepcopy(model)
        train(mine, tmp_path / "two", lambda: mine.q_norm.weight.grad.mul_(2))

    run_threads(on_rank, 2)
    first = programs.compared(tmp_path / "one", tmp_path / "two").first
    assert (first.value.module, first.said) == ("q_norm.weight", "2 times as large")


def test_a_run_that_fails_is_no_run_that_agrees(model, tmp_path):
    train(copy.deepcopy(model), tmp_path / "one")

    def fails():
        raise ValueError("no more\nof this")

    with pytest.raises(ValueError, match="no more"):
        train(copy.deepcopy(model), tmp_path / "failed", fails)
    text = report(programs.compared(tmp_path / "one", tmp_path / "failed"))
    assert "\nB ended with an error: ValueError: no more\n" in text
    assert "most values are of one run alone" in text
