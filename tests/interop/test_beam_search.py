"""transformers' beam search on models that each door has sharded gives the sequences of one device."""

import importlib.util

import pytest
import torch

from dtensor import distribute_model, init_device_mesh
from dtensor.parallel import ColwiseParallel, RowwiseParallel, fully_shard, parallelize_module
from dtensor.testing import run_ranks

LAYERS = {"self_attn.[qkv]_proj": ColwiseParallel, "self_attn.o_proj": RowwiseParallel}
LAYERS |= {"mlp.up_proj": ColwiseParallel, "mlp.gate_proj": ColwiseParallel, "mlp.down_proj": RowwiseParallel}
WAYS = {
    "fully_shard": lambda model, mesh: fully_shard(model, mesh),
    "distribute_model": lambda model, mesh: distribute_model(model, mesh, "model", outputs={}),
    "parallelize_module": lambda model, mesh: parallelize_module(
        model, mesh, {f"model.layers.*.{name}": style() for name, style in LAYERS.items()}
    ),
}
OPTIONS = (
    {"num_beams": 3},
    {"num_beams": 4, "num_return_sequences": 2, "length_penalty": 0.5, "early_stopping": True},
    {"num_beams": 3, "do_sample": True},
    {"num_beams": 2, "cache_implementation": "static", "no_repeat_ngram_size": 2},
)


def llama():
    import transformers

    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, eos_token_id=None, pad_token_id=0)
    return transformers.LlamaForCausalLM(config).eval()


def sequences(model):
    tokens, found = torch.arange(10).view(2, 5) + 1, []
    for options in OPTIONS:
        torch.manual_seed(3)
        found.append(model.generate(tokens, max_new_tokens=4, **options))
    return found


def on_rank(rank):
    mesh, want = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), sequences(llama())
    for way, shard in WAYS.items():
        for options, found, wanted in zip(OPTIONS, sequences(shard(llama(), mesh)), want):
            assert torch.equal(found, wanted), (way, options)


@pytest.mark.nightly
@pytest.mark.skipif(not importlib.util.find_spec("transformers"), reason="needs transformers")
def test_the_sequences_of_one_device():
    run_ranks(on_rank, 2, timeout=240.0)
