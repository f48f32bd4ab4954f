"""Models as they are, in every way: one device's loss, outputs, gradients and steps."""

from unittest.mock import patch

import pytest
import torch

from dtensor.testing import run_ranks

from .compare import breaks_of_plain, compare
from .models import DECODER, EXAMPLES
from .ways import WAYS, cases

BY_DAY = (
    ("mixtral", "tp", "eager"),
    ("qwen3, its own plan", "tp", "eager"),
    ("llama", "torch fsdp2, converted", "eager"),
)
"""Those of `DECODER` with one layer; at night all with as many as they have."""
OF_TORCH = ("torch fsdp2", "torch ddp")
"""Ways that break graphs by themselves."""
LAYERS = DECODER["num_hidden_layers"]
CASES = [
    *(pytest.param(*case, 1, id="-".join((*case, "one layer"))) for case in BY_DAY),
    *(pytest.param(*case, LAYERS, id="-".join(case), marks=pytest.mark.nightly) for case in cases()),
]


def on_rank(rank, name, way, how, layers):
    torch.compiler.reset()
    with patch.dict(DECODER, num_hidden_layers=layers):
        return compare(name, way, how)


@pytest.mark.parametrize(("name", "way", "how", "layers"), CASES)
def test_one_device(name, way, how, layers):
    if not EXAMPLES[name].is_installed():
        pytest.skip(f"needs {EXAMPLES[name].needs}; write: pip install 'dtensor-compile[zoo]'")
    ranks = run_ranks(on_rank, WAYS[way][0], name, way, how, layers, timeout=600)
    assert all(not found.fallbacks and not found.missed for found in ranks)
    assert len({(found.graphs, tuple(sorted(found.collectives.items()))) for found in ranks}) == 1
    if how != "eager" and way not in OF_TORCH:
        assert ranks[0].breaks.keys() <= breaks_of_plain(name).keys()
