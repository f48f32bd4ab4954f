"""Unmodified models of transformers whose sequence is cut from end to end: ten steps are those of one device."""

import functools

import pytest
import torch

from dtensor import Shard, distribute_model, distribute_tensor, init_device_mesh
from dtensor.compile import statistics
from dtensor.testing import run_ranks

from .trained import trained

transformers = pytest.importorskip("transformers")

LENGTH = 37
COMMON = {"vocab_size": 96, "num_hidden_layers": 2, "use_cache": False, "pad_token_id": 0}
DECODER = COMMON | {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
WINDOWS = {"head_dim": 16, "sliding_window": 8}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
STATES = {"hidden_size": 64, "state_size": 8, "num_heads": 8, "head_dim": 16, "n_groups": 1, "chunk_size": 8}

MODELS = {
    "llama": lambda t: t.LlamaForCausalLM(t.LlamaConfig(**DECODER)),
    "llama, packed": lambda t: t.LlamaForCausalLM(t.LlamaConfig(**DECODER)),
    "qwen3": lambda t: t.Qwen3ForCausalLM(t.Qwen3Config(head_dim=16, **DECODER)),
    "gemma3": lambda t: t.Gemma3ForCausalLM(
        t.Gemma3TextConfig(layer_types=["sliding_attention", "full_attention"], **WINDOWS, **DECODER)
    ),
    "gpt-oss": lambda t: t.GptOssForCausalLM(t.GptOssConfig(**EXPERTS, **WINDOWS, **DECODER)),  # has sinks
    "mamba2": lambda t: t.Mamba2ForCausalLM(t.Mamba2Config(**STATES, **COMMON)),
}


def batch(name: str, step: int) -> dict[str, torch.Tensor]:
    """Tokens, and their positions in documents of three lengths if these are packed."""
    packed = name.endswith("packed")
    tokens = torch.randint(1, 96, (1 if packed else 2, LENGTH), generator=torch.Generator().manual_seed(step))
    given = {"input_ids": tokens, "labels": tokens}
    if packed:
        given["position_ids"] = torch.cat([torch.arange(n) for n in (12, 7, LENGTH - 19)])[None]
    return given


def on_rank(rank: int, name: str, compiled: bool) -> int:
    """How many graphs there are."""
    torch.manual_seed(0)
    plain = MODELS[name](transformers)
    batches = functools.partial(batch, name)
    expected = trained(plain, plain, batches)
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    inputs = {key: {"cp": Shard(1)} for key in batch(name, 0)}
    model = distribute_model(MODELS[name](transformers), mesh, {}, inputs=inputs)
    run = torch.compile(model, backend="dtensor") if compiled else model
    with statistics() as seen:
        found = trained(model, run, batches, lambda x: distribute_tensor(x, mesh, [Shard(1)]))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    return seen.graphs


@pytest.mark.nightly
@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_ten_steps_of_one_device(name, compiled):
    graphs, _ = run_ranks(on_rank, 2, name, compiled, timeout=600)
    assert graphs == int(compiled)
