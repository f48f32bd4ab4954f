"""`dtensor inspect` prices the graphs of a compiled step, and `dtensor plan` its operators: they say the same."""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist

from bench.cases.search import AXIS, by_hand, model_of
from bench.models import Sizes
from dtensor import distribute_model, init_device_mesh, predict, prepare
from dtensor.compile.recording import frames
from dtensor.compile.recording.imagined import imagined
from dtensor.prices.links import Link

SIZES = Sizes(dim=256, seq=128, batch=8)
WITHIN = 0.01
"""The largest difference, as a fraction."""

LINKS = {"loopback": None, "1 Gbit/s": [Link(alpha=50e-6, bandwidth=125e6, memory=10e9, start=50e-6)]}


def prices(name, side, link):
    """Seconds of one step by inspect and by plan, without the optimizer."""
    with imagined({AXIS: 2}), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist.init_process_group()
        try:
            mesh = init_device_mesh("cpu", (2,), mesh_dim_names=(AXIS,))
            prepare(mesh, links=LINKS[link])
            model, batch = model_of(name, SIZES)
            plan = by_hand(model, batch, {AXIS: 2})[side]
            predicted = predict(model, mesh, batch, plan, optimizer_states=0.0).prediction
            torch._dynamo.reset()
            sharded = distribute_model(copy.deepcopy(model), mesh, plan, outputs={})
            options = {"inner": "aot_eager", "agreement": False, "decide": False}  # as the plan is priced
            step = torch.compile(sharded, backend="dtensor", options=options)
            step(*plan.part(batch, mesh, model)).backward()
        finally:
            dist.destroy_process_group()
    stories = frames.recent_frames()[-1].stories
    timelines = [story.timeline for story in stories.values() if story.timeline is not None]
    assert len(timelines) == 2, "the forward and the backward"
    return sum([t.seconds for t in timelines]), predicted.seconds - predicted.updating


CASES = {
    "perceptron": ("ddp", "1 Gbit/s"),  # the last gradient is sent when nothing is left to compute
    "decoder": ("sp", "loopback"),
    "llama": ("fsdp", "1 Gbit/s"),  # each parameter is gathered while the one before it is in use
    "images": ("tp", "1 Gbit/s"),  # the comparison of inputs is a part of the step that counts
}


@pytest.mark.parametrize("name", CASES)
def test_they_agree_on_the_price_of_a_step(name):
    inspected, planned = prices(name, *CASES[name])
    assert inspected == pytest.approx(planned, rel=WITHIN)


@pytest.mark.nightly
@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("side", ["tp", "sp", "ddp", "fsdp"])
@pytest.mark.parametrize("name", [*CASES, "wide"])
def test_they_agree_under_every_plan(name, side, link):
    if side == "sp" and name not in ("decoder", "llama"):
        pytest.skip("there is no sequence")
    inspected, planned = prices(name, side, link)
    assert inspected == pytest.approx(planned, rel=WITHIN)
