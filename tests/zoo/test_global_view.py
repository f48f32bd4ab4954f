"""Models as they are, by `distribute_model` and beside `fully_shard`: one device's loss, outputs, gradients, steps."""

import pytest
import torch

from dtensor._torch_compile import dynamo_counters
from dtensor.testing import run_ranks

from .compare import WAYS, compare, made
from .models import EXAMPLES, NOT_COMPILED

pytest.importorskip("transformers", reason="needs transformers; write: pip install 'dtensor[test]'")

BY_DAY = {("llama", "tp", True), ("mixtral", "tp", False), ("lstm", "2d", False), ("qwen3, its own plan", "tp", False)}
CASES = [
    pytest.param(*case, marks=() if case in BY_DAY else pytest.mark.nightly, id="-".join(map(str, case)))
    for case in [(name, way, compiled) for name in EXAMPLES for way in WAYS for compiled in (False, True)]
    if not (case[0] in NOT_COMPILED and case[2])
]


def on_rank(rank, name, way, compiled):
    torch.compiler.reset()
    return compare(name, way, compiled)


def breaks_of_plain(name):
    """Graph breaks that the model has without us."""
    torch.compiler.reset()
    before = sum(dynamo_counters()["graph_break"].values())
    torch.compile(made(name), backend="eager")(**EXAMPLES[name].inputs())
    return sum(dynamo_counters()["graph_break"].values()) - before


@pytest.mark.parametrize(("name", "way", "compiled"), CASES)
def test_one_device(name, way, compiled):
    ranks = run_ranks(on_rank, WAYS[way][0], name, way, compiled, timeout=600)
    assert all(not found.fallbacks for found in ranks)
    assert len({(found.graphs, tuple(sorted(found.collectives.items()))) for found in ranks}) == 1
    if compiled:
        assert ranks[0].breaks <= breaks_of_plain(name)
