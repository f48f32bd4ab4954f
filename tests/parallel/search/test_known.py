"""Well-known plans: what they cut, what they compute, and that they fit where they are said to."""

import pytest
import torch
from torch import nn

from dtensor import predict, search
from dtensor.parallel.search.best import SPARE
from dtensor.parallel.search.choices import Choices
from dtensor.parallel.search.engine import Engine
from dtensor.parallel.search.known import known
from dtensor.parallel.search.naming import plan_of
from dtensor.parallel.search.recording import record
from dtensor.parallel.search.regime import Regime
from dtensor.parallel.search.repeats import steps_of
from dtensor.parallel.search.tensor_parallel import tensor_parallel
from dtensor.prices.links import Network
from dtensor.prices.machine import MACHINES

from .programs import FAST, MODELS, made, trains_as_one_device

MESH = {"dp": 2, "tp": 2}


def planned(model, batch, mesh):
    """The steps of a model on a mesh, and its choices."""
    steps = steps_of(record(model, batch))
    return steps, Choices(torch.device("cpu"), Network.of(tuple(mesh.values()), FAST), MACHINES["cpu"])


def cuts(model, batch, ranks=2):
    found = tensor_parallel(*planned(model, batch, {"tp": ranks}), 0)
    return {t.name: dim for t, dim in found.parameters.items()}


def test_a_decoder_is_cut_as_megatron_does():
    layer = "inner.layers.*."
    assert cuts(*made("decoder")) == {
        "inner.tok_embeddings.weight": 0,
        f"{layer}attention.wq.weight": 0,
        f"{layer}attention.wk.weight": 0,
        f"{layer}attention.wv.weight": 0,
        f"{layer}attention.wo.weight": 1,
        f"{layer}feed_forward.w1.weight": 0,
        f"{layer}feed_forward.w1.bias": 0,
        f"{layer}feed_forward.w2.weight": 1,
        "inner.output.weight": 0,
    }


def test_channels_of_convolutions_are_cut():
    names = ("a.weight", "a.bias", "b.weight", "head.weight", "head.bias")
    assert cuts(*made("images")) == dict(zip([f"inner.{n}" for n in names], (0, 0, 1, 0, 0)))


def test_a_tied_table_is_cut_along_its_words():
    assert cuts(*made("wide"))["inner.table.weight"] == 0


def test_modules_that_hand_on_what_they_get():
    """Borders of modules that are alike read each other."""
    layers = [m for wide in (64, 64, 16) for m in (nn.Linear(64, wide), nn.ReLU(), nn.Dropout(0.0))]
    steps, choices = planned(nn.Sequential(*layers), (torch.ones(8, 64),), {"tp": 2})
    found = tensor_parallel(steps, choices, 0).parameters
    assert [(tuple(t.like.shape), dim) for t, dim in found.items() if t.like.ndim == 2] == [
        ((64, 64), 0),
        ((16, 64), 1),
    ]


def test_what_does_not_divide_stays_whole():
    model = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 6))
    assert cuts(model, (torch.ones(4, 6),), ranks=2) == {"*.weight": 0, "*.bias": 0}  # those of the second layer


NAMES = {name: list(known(*planned(*made(name), MESH))) for name in MODELS}


@pytest.mark.parametrize("kind", NAMES["decoder"])
@pytest.mark.parametrize("name", MODELS)
def test_a_well_known_plan_computes_what_one_device_does(name, kind):
    model, batch = made(name)
    assert list(NAMES[name]) == NAMES["decoder"]
    steps, choices = planned(model, batch, MESH)
    plan = plan_of(known(steps, choices)[kind], steps, MESH)
    trains_as_one_device(model, batch, plan)


@pytest.mark.parametrize("name", MODELS)
def test_what_fits_is_found(name):
    """In as much memory as the smallest well-known plan takes, a plan is found, and it is no slower."""
    model, batch = made(name)
    steps, choices = planned(model, batch, MESH)
    runs = [Engine(steps, choices, Regime(states=0.0)).run(a) for a in known(steps, choices).values()]
    least = min(runs, key=lambda run: run.peak)
    how = {"links": dict.fromkeys(MESH, FAST), "machine": MACHINES["cpu"], "optimizer_states": 0.0}
    memory = 1.001 * least.peak / (1 - SPARE)
    plan = search(model, MESH, batch, memory=memory, limit=8.0, **how)
    assert plan.prediction.memory <= (1 - SPARE) * memory
    assert plan.prediction.seconds <= 1.01 * least.seconds
    again = predict(model, MESH, batch, plan, **how).prediction
    assert again.memory == pytest.approx(plan.prediction.memory)
