"""Layers of experts of transformers' models, which `distribute_model` lets run as one operator."""

import copy

import pytest
import torch
from torch import nn

from dtensor import PlacementError, Replicate, Shard, distribute_model, init_device_mesh, search
from dtensor.parallel.whole_model import expert_modules
from dtensor.testing import fake_ranks, run_threads

transformers = pytest.importorskip("transformers")

SIZES = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "moe_intermediate_size": 24}
SIZES |= {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "num_experts_per_tok": 2}
OVER_EXPERTS = {"*.experts.*": {"ep": Shard(0)}}


def mixtral(**more):
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(num_local_experts=4, use_cache=False, **SIZES | more)
    )


def gpt_oss():
    config = transformers.GptOssConfig(num_local_experts=4, head_dim=8, use_cache=False, pad_token_id=0, **SIZES)
    return transformers.GptOssForCausalLM(config)


def used(model):
    """How the layers of experts are computed."""
    return {m.config._experts_implementation for m in model.modules() if hasattr(m, "_is_expert_parallel")}


TOKENS = torch.arange(24).view(4, 6)


@pytest.mark.parametrize("make", [mixtral, gpt_oss])
def test_losses_and_gradients_are_those_of_the_model_as_it_is(make):
    torch.manual_seed(0)
    plain = make()
    expected = plain(input_ids=TOKENS, labels=TOKENS).loss
    expected.backward()

    def rank(rank):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
        model = distribute_model(copy.deepcopy(plain), mesh, OVER_EXPERTS, inputs={"ep": Shard(0)})
        assert used(model) == {"dtensor"}
        mine = TOKENS.chunk(2)[rank]
        loss = model(input_ids=mine, labels=mine).loss
        loss.backward()
        torch.testing.assert_close(loss.full_tensor(), expected)
        for p, q in zip(plain.parameters(), model.parameters()):
            torch.testing.assert_close(q.grad.full_tensor(), p.grad)

    run_threads(rank, 2)
    assert used(plain) == {"grouped_mm"}, "another model of the same config is as it was"


def distributed(model, placements=OVER_EXPERTS, names=("ep",)):
    with fake_ranks(2 ** len(names)):
        mesh = init_device_mesh("cpu", (2,) * len(names), mesh_dim_names=names)
        return distribute_model(model, mesh, placements, src_data_rank=None)


class Scaled(nn.Module):
    """What is between both products, with a parameter."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(24))

    def forward(self, x):
        return x * self.scale


def test_layers_stay_where_the_operator_cannot_be_used():
    asked = mixtral()
    asked.set_experts_implementation("batched_mm")
    assert used(distributed(asked)) == {"batched_mm"}
    inside = {"*.experts.gate_up_proj": {"ep": Shard(1)}, "*.experts.down_proj": {"ep": Shard(2)}}
    assert used(distributed(mixtral(), inside)) == {"grouped_mm"}
    model = mixtral()
    model.model.layers[0].mlp.experts.act_fn = Scaled()
    assert used(distributed(model)) == {"grouped_mm"}


def test_a_search_sees_the_operator_and_leaves_the_model_as_it_is(monkeypatch):
    seen, own = [], expert_modules._forward

    def forward(module, *args):
        seen.append(module)
        return own(module, *args)

    monkeypatch.setattr(expert_modules, "_forward", forward)
    model = mixtral()
    plan = search(model, {"ep": 2}, {"input_ids": TOKENS, "labels": TOKENS}, device_type="cpu")
    assert seen
    assert plan.prediction is not None
    assert used(model) == {"grouped_mm"}
    assert not hasattr(model.model.layers[0].mlp.experts, expert_modules.GATE)


def test_a_models_own_plan_deals_out_experts_over_an_axis_of_that_name():
    placed = {n: p.placements for n, p in distributed(mixtral(), "model", ("dp", "ep")).named_parameters()}
    at = "model.layers.0"
    assert placed[f"{at}.mlp.experts.gate_up_proj"] == (Replicate(), Shard(0))
    assert placed[f"{at}.self_attn.q_proj.weight"] == (Replicate(), Replicate())
    placed = {n: p.placements for n, p in distributed(mixtral(), "model", ("ep", "tp")).named_parameters()}
    assert placed[f"{at}.mlp.experts.down_proj"] == (Shard(0), Replicate())
    assert placed[f"{at}.self_attn.q_proj.weight"] == (Replicate(), Shard(0))
    placed = {n: p.placements for n, p in distributed(gpt_oss(), "model").named_parameters()}
    assert placed[f"{at}.mlp.experts.gate_up_proj_bias"] == (Shard(0),)
    placed = {n: p.placements for n, p in distributed(gpt_oss().model, "model").named_parameters()}
    assert placed["layers.0.mlp.experts.down_proj"] == (Shard(0),)


def test_a_model_without_experts_has_no_plan_for_them():
    sizes = {k: v for k, v in SIZES.items() if "expert" not in k and "moe" not in k}
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    with pytest.raises(PlacementError, match="no expert parallel plan of its own"):
        distributed(llama, "model")
