"""Well-known plans: what they cut, what they compute, and that they fit where they are said to."""

import pytest
import torch
from torch import nn

from dtensor import PlacementError, predict, search
from dtensor.layout.cost import Network
from dtensor.layout.machine import MACHINES
from dtensor.parallel.search.choices import Choices
from dtensor.parallel.search.known import known
from dtensor.parallel.search.naming import plan_of
from dtensor.parallel.search.steps import steps_of
from dtensor.parallel.search.tape import record
from dtensor.parallel.search.tensor_parallel import tensor_parallel

from .programs import FAST, MODELS, SLOW, alone, made, on_ranks

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
    loss, gradients = on_ranks(model, batch, plan)
    expected, grads = alone(model, batch)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradients, grads)


@pytest.mark.parametrize("name", MODELS)
def test_what_fits_is_found(name):
    """With only as much memory as a plan takes that was found to take little, a plan is found."""
    model, batch = made(name)
    given = {"links": dict.fromkeys(MESH, SLOW), "machine": MACHINES["cpu"]}
    least = None
    with pytest.raises(PlacementError, match="no plan found fits"):
        for _ in range(6):
            least = search(model, MESH, batch, memory=None if least is None else 0.8 * least, **given).prediction.memory
            least /= 0.9  # of which a tenth is spared
    plan = search(model, MESH, batch, memory=1.001 * least, **given)
    assert predict(model, MESH, batch, plan, **given).prediction.memory <= 0.901 * least
