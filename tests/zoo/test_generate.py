"""`generate()` of models as they are gives the tokens of one device, with a cache that grows or is written to."""

import copy

import pytest
import torch

from dtensor import DTensor
from dtensor.testing import run_ranks

from .compare import made
from .models import EXAMPLES
from .ways import WAYS

pytest.importorskip("transformers", reason="needs transformers; write: pip install 'dtensor-compile[test]'")

NAMES = ("llama", "mistral", "gemma2", "qwen3", "phi3", "gpt2", "t5", "whisper", "mixtral", "qwen3 moe", "mamba")
CASES = [
    pytest.param(
        name, cache, compiled, marks=() if (name, cache, compiled) == ("t5", "static", False) else pytest.mark.nightly
    )
    for name in NAMES
    for cache, compiled in ((None, False), ("static", False), ("static", True))
]


def on_rank(rank, name, cache, compiled):
    plain = made(name).eval()
    model, _ = WAYS["tp"][1](copy.deepcopy(plain), name, {})
    if compiled:
        model.forward = torch.compile(model.forward, backend="dtensor", options={"inner": "aot_eager"})
    given = EXAMPLES[name].inputs()
    given = (
        {"input_features": given["input_features"]} if "input_features" in given else {"input_ids": given["input_ids"]}
    )
    options = {"max_new_tokens": 6, "do_sample": False, "cache_implementation": cache}
    found = model.generate(**given, **options)
    assert not isinstance(found, DTensor)
    assert torch.equal(found, plain.generate(**given, **options))


@pytest.mark.parametrize(("name", "cache", "compiled"), CASES)
def test_tokens_of_one_device(name, cache, compiled):
    run_ranks(on_rank, 2, name, cache, compiled, timeout=400)
