"""Models as they are, by `distribute_model` on two ranks: loss, outputs and every gradient of one device."""

import pytest
import torch

from dtensor import Replicate, distribute_model, init_device_mesh
from dtensor.testing import with_ranks

from .models import EXAMPLES

transformers = pytest.importorskip("transformers", reason="needs transformers; write: pip install 'dtensor[test]'")

BY_DAY = {("llama", True), ("mixtral", False), ("lstm", False), ("qwen3, its own plan", False)}
CASES = [
    pytest.param(name, compiled, marks=() if (name, compiled) in BY_DAY else pytest.mark.nightly)
    for name in EXAMPLES
    for compiled in (False, True)
]


def made(name):
    torch.manual_seed(0)
    return EXAMPLES[name].model(transformers)


def results(out):
    return out["loss"], out["logits_per_image" if "logits_per_image" in out else "logits"]


@pytest.mark.parametrize(("name", "compiled"), CASES)
@with_ranks(2)
def test_one_device(rank, name, compiled):
    plain, given = made(name), EXAMPLES[name].inputs()
    want = results(plain(**given))
    want[0].backward()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = distribute_model(made(name), mesh, EXAMPLES[name].plan, outputs={})
    assert any(p.placements != (Replicate(),) for p in model.parameters())
    run = torch.compile(model, backend="dtensor", options={"inner": "aot_eager"}) if compiled else model
    found = results(run(**given))
    torch.testing.assert_close(found, want)
    found[0].backward()
    expected = dict(plain.named_parameters())
    for n, p in model.named_parameters():
        if expected[n].grad is None:
            assert p.grad is None, n
            continue
        torch.testing.assert_close(p.grad.full_tensor(), expected[n].grad, msg=f"{n}: {{}}".format)
        assert p.grad.placements == p.placements
