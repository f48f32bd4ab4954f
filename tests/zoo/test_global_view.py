"""Models as they are, by `distribute_model` on two ranks: loss, outputs and every gradient of one device."""

import pytest
import torch

from dtensor import distribute_model, init_device_mesh
from dtensor.testing import with_ranks

from .models import EXAMPLES

transformers = pytest.importorskip("transformers", reason="needs transformers; write: pip install 'dtensor[test]'")

BY_DAY = {("llama", True), ("qwen3", False)}
CASES = [
    pytest.param(name, compiled, marks=() if (name, compiled) in BY_DAY else pytest.mark.nightly)
    for name in EXAMPLES
    for compiled in (False, True)
]


def made(name):
    torch.manual_seed(0)
    return EXAMPLES[name].model(transformers)


@pytest.mark.parametrize(("name", "compiled"), CASES)
@with_ranks(2)
def test_one_device(rank, name, compiled):
    plain, given = made(name), EXAMPLES[name].inputs()
    want = plain(**given)
    want.loss.backward()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = distribute_model(made(name), mesh, EXAMPLES[name].plan, outputs={})
    run = torch.compile(model, backend="dtensor", options={"inner": "aot_eager"}) if compiled else model
    found = run(**given)
    torch.testing.assert_close(found.loss, want.loss)
    torch.testing.assert_close(found.logits, want.logits)
    found.loss.backward()
    expected = dict(plain.named_parameters())
    for n, p in model.named_parameters():
        torch.testing.assert_close(p.grad.full_tensor(), expected[n].grad, msg=f"{n}: {{}}".format)
        assert p.grad.placements == p.placements
