"""What is written by hand trains to the losses of one device, by every plan."""

import pytest
import torch

from bench import models
from bench.limit import functions
from bench.models import Sizes, named
from bench.plans import RANKS
from bench.sides import RATE, batch, made
from dtensor import init_device_mesh
from dtensor.comm.start_collectives import FUNCTIONAL
from dtensor.testing import run_threads
from dtensor.tools.demo_plans import PLANS

SIZES = Sizes(dim=16, seq=8, batch=4, vocab=32)
STEPS = 3


def dense(model):
    """Losses of one device."""
    built = model.dense()
    optimizer, found = torch.optim.SGD(built.parameters(), lr=RATE), []
    for i in range(STEPS):
        inputs, targets = model.batch(i)
        loss = models.loss(built(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def trained(rank, name, plan, world):
    model = named(name, SIZES)
    mesh = init_device_mesh("cpu", PLANS[plan].mesh_shape(world), mesh_dim_names=PLANS[plan].axes)
    trainer = made("by hand", model, plan, mesh, lambda fn: fn)
    return [trainer.step(*batch(model, plan, mesh, i)) for i in range(STEPS)]


# Of the perceptron under sp each rank's loss is of its samples, and gradients are the sum of theirs, not the mean.
PAIRS = [(m, p) for m in ("mlp", "transformer-2", "llama-1") for p in RANKS if (m, p) != ("mlp", "sp")]


@pytest.mark.parametrize(("name", "plan"), PAIRS)
def test_losses_are_those_of_one_device(name, plan):
    ranks = run_threads(trained, RANKS[plan], name, plan, RANKS[plan])
    mean = [sum(losses) / len(losses) for losses in zip(*ranks)]
    assert mean == pytest.approx(dense(named(name, SIZES)), rel=1e-5)


@pytest.mark.parametrize("plan", ["sp", "fsdp", "hsdp"])
def test_scatters_as_exchanges(monkeypatch, plan):
    """As over gloo: the same losses."""
    monkeypatch.setattr(functions, "starts", lambda group, device: FUNCTIONAL._replace(reduce_scatter=None))
    ranks = run_threads(trained, RANKS[plan], "transformer-2", plan, RANKS[plan])
    mean = [sum(losses) / len(losses) for losses in zip(*ranks)]
    assert mean == pytest.approx(dense(named("transformer-2", SIZES)), rel=1e-5)
