"""Unmodified models of transformers whose experts are dealt out: ten steps are those of one device."""

import math

import pytest
import torch

from dtensor import Shard, distribute_model, distribute_tensor, init_device_mesh
from dtensor.compile import statistics
from dtensor.testing import run_ranks

from .trained import trained

transformers = pytest.importorskip("transformers")

COMMON = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "use_cache": False}
COMMON |= {"num_attention_heads": 4, "num_key_value_heads": 4, "num_experts_per_tok": 2, "pad_token_id": 0}
COMMON |= {"moe_intermediate_size": 48, "eos_token_id": 1}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
GROUPS = {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}

MODELS = {
    "mixtral": lambda t: t.MixtralForCausalLM(t.MixtralConfig(num_local_experts=5, **COMMON)),
    "qwen3 moe": lambda t: t.Qwen3MoeForCausalLM(t.Qwen3MoeConfig(num_experts=8, head_dim=16, **COMMON)),
    "deepseek v3": lambda t: t.DeepseekV3ForCausalLM(t.DeepseekV3Config(**COMMON, **LATENT, **GROUPS)),
    "gpt-oss": lambda t: t.GptOssForCausalLM(
        t.GptOssConfig(num_local_experts=4, head_dim=16, sliding_window=8, **COMMON)
    ),
    "glm4 moe": lambda t: t.Glm4MoeForCausalLM(t.Glm4MoeConfig(n_routed_experts=8, head_dim=16, **COMMON)),
    "olmoe": lambda t: t.OlmoeForCausalLM(t.OlmoeConfig(num_experts=8, **COMMON)),
}
MESHES = {"ep": (2,), "dp x ep": (2, 2)}


def batch(step: int) -> dict[str, torch.Tensor]:
    """Tokens, of which those that follow are the labels."""
    tokens = torch.randint(1, 96, (4, 12), generator=torch.Generator().manual_seed(step))
    return {"input_ids": tokens, "labels": tokens}


def on_rank(rank: int, name: str, shape: tuple[int, ...], compiled: bool) -> int:
    """How many graphs there are."""
    torch.manual_seed(0)
    plain = MODELS[name](transformers)
    expected = trained(plain, plain, batch)
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "ep")[-len(shape) :])
    inputs = dict.fromkeys(mesh.mesh_dim_names, Shard(0))
    model = distribute_model(MODELS[name](transformers), mesh, {"*.experts.*": {"ep": Shard(0)}}, inputs=inputs)
    run = torch.compile(model, backend="dtensor") if compiled else model
    with statistics() as seen:
        found = trained(model, run, batch, lambda x: distribute_tensor(x, mesh, [Shard(0)] * len(shape)))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    return seen.graphs


@pytest.mark.nightly
@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", MODELS)
def test_ten_steps_of_one_device(name, mesh, compiled):
    graphs, *_ = run_ranks(on_rank, math.prod(MESHES[mesh]), name, MESHES[mesh], compiled, timeout=600)
    assert graphs == int(compiled)
