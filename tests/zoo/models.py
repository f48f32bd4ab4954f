"""Models of transformers, diffusers and torch's own modules, small, as they are: how each is made, its inputs, and a
plan."""

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from dtensor import Placement, Shard

from .modules import Clicks, Encoder, Graph, Images, Recurrent, Sampled, WithLoss

COLUMNS, ROWS = {"tp": Shard(0)}, {"tp": Shard(1)}
VOCAB = 64


class Example(NamedTuple):
    """A model, made of the module transformers; the keyword arguments of its forward, which gives a loss; where its
    parameters go; which arguments are given cut, and how; and what else is to be installed."""

    model: Callable[[Any], nn.Module]
    inputs: Callable[[], dict[str, Any]]
    plan: Any
    cut: Mapping[str, Placement] = {}
    needs: str = "transformers"

    def is_installed(self) -> bool:
        return importlib.util.find_spec(self.needs) is not None


def _tokens() -> dict[str, torch.Tensor]:
    tokens = torch.arange(32).view(2, 16) * 7 % VOCAB
    return {"input_ids": tokens, "labels": (tokens * 3 + 1) % VOCAB}


def _images() -> dict[str, torch.Tensor]:
    return {
        "pixel_values": torch.linspace(-1, 1, 2 * 3 * 16 * 16).sin().view(2, 3, 16, 16),
        "labels": torch.tensor([1, 3]),
    }


def _speech() -> dict[str, torch.Tensor]:
    given = {name: x[:, :8] for name, x in _tokens().items()}
    sound = torch.linspace(-1, 1, 2 * 8 * 32).sin().view(2, 8, 32)
    return {"input_features": sound, "decoder_input_ids": given["input_ids"], "labels": given["labels"]}


def _images_and_texts() -> dict[str, Any]:
    return {
        "input_ids": _tokens()["input_ids"][:, :8],
        "pixel_values": _images()["pixel_values"],
        "return_loss": True,
    }


def _words() -> dict[str, torch.Tensor]:
    return {"tokens": torch.arange(12).view(2, 6) % 16}


def _adapted(transformers: Any) -> nn.Module:
    """With matrices of low rank beside its projections, which alone are trained."""
    peft = importlib.import_module("peft")

    config = peft.LoraConfig(r=4, lora_dropout=0.0, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return peft.get_peft_model(transformers.LlamaForCausalLM(transformers.LlamaConfig(**DECODER)), config)


def _with_checkpoints(transformers: Any) -> nn.Module:
    """Whose layers are computed again in the backward."""
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**DECODER))
    model.gradient_checkpointing_enable()
    return model.train()


def _denoising(_: Any) -> nn.Module:
    """In double precision: gradients that are zero but for rounding, as of keys' biases, AdamW makes steps of."""
    diffusers = importlib.import_module("diffusers")

    blocks = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
    sizes = {"sample_size": 16, "layers_per_block": 1, "block_out_channels": (16, 32), "attention_head_dim": 8}
    model = diffusers.UNet2DModel(in_channels=3, out_channels=3, norm_num_groups=4, **sizes, **blocks)
    return WithLoss(Sampled(model)).double()


DECODER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": VOCAB,
}
DECODER |= {"num_key_value_heads": 2, "max_position_embeddings": 32}
DECODER_PLAN = {
    "*.[qkv]_proj.weight": COLUMNS,
    "*.gate_proj.weight": COLUMNS,
    "*.up_proj.weight": COLUMNS,
    "*.o_proj.weight": ROWS,
    "*.down_proj.weight": ROWS,
    "*embed_tokens.weight": COLUMNS,
}

ENCODER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
ENCODER |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}

EXPERTS = DECODER | {"num_experts_per_tok": 2}
MLA = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
MLA |= {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 16, "first_k_dense_replace": 1}
SPEECH = {"d_model": 32, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "encoder_layers": 2, "decoder_layers": 2}
SPEECH |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_mel_bins": 8, "dropout": 0.0}
SPEECH |= {"max_source_positions": 16, "max_target_positions": 16, "vocab_size": VOCAB}
SPEECH |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
ATTENTION_PLAN = {
    "*.[qkv]_proj.weight": COLUMNS,
    "*.out_proj.weight": ROWS,
    "*.fc1.*": COLUMNS,
    "*.fc2.weight": ROWS,
}

EXAMPLES = {
    "llama": Example(lambda t: t.LlamaForCausalLM(t.LlamaConfig(**DECODER)), _tokens, DECODER_PLAN),
    "mistral": Example(
        lambda t: t.MistralForCausalLM(t.MistralConfig(sliding_window=8, **DECODER)), _tokens, DECODER_PLAN
    ),
    "gemma2": Example(
        lambda t: t.Gemma2ForCausalLM(t.Gemma2Config(head_dim=8, sliding_window=8, **DECODER)), _tokens, DECODER_PLAN
    ),
    "qwen3": Example(lambda t: t.Qwen3ForCausalLM(t.Qwen3Config(head_dim=8, **DECODER)), _tokens, DECODER_PLAN),
    "phi3": Example(
        lambda t: t.Phi3ForCausalLM(t.Phi3Config(pad_token_id=0, **DECODER)),
        _tokens,
        {
            "*.qkv_proj.weight": COLUMNS,
            "*.gate_up_proj.weight": COLUMNS,
            "*.o_proj.weight": ROWS,
            "*.down_proj.*": ROWS,
        },
    ),
    "gpt2": Example(
        lambda t: t.GPT2LMHeadModel(
            t.GPT2Config(
                n_embd=32,
                n_layer=2,
                n_head=4,
                n_positions=32,
                vocab_size=VOCAB,
                resid_pdrop=0.0,
                embd_pdrop=0.0,
                attn_pdrop=0.0,
            )
        ),
        _tokens,
        {"*.c_attn.weight": ROWS, "*.c_fc.weight": ROWS, "*.c_proj.weight": COLUMNS, "*.wte.weight": COLUMNS},
    ),
    "bert": Example(
        lambda t: t.BertForMaskedLM(t.BertConfig(vocab_size=VOCAB, max_position_embeddings=32, **ENCODER)),
        _tokens,
        {
            "*.query.weight": COLUMNS,
            "*.key.weight": COLUMNS,
            "*.value.weight": COLUMNS,
            "*.attention.output.dense.weight": ROWS,
            "*.intermediate.dense.weight": COLUMNS,
            "*.layer.*.output.dense.weight": ROWS,
            "*.word_embeddings.weight": COLUMNS,
        },
    ),
    "t5": Example(
        lambda t: t.T5ForConditionalGeneration(
            t.T5Config(
                d_model=32,
                d_kv=8,
                d_ff=48,
                num_layers=2,
                num_heads=4,
                vocab_size=VOCAB,
                dropout_rate=0.0,
                decoder_start_token_id=0,
            )
        ),
        _tokens,
        {
            "*.[qkv].weight": COLUMNS,
            "*.o.weight": ROWS,
            "*.wi.weight": COLUMNS,
            "*.wo.weight": ROWS,
            "shared.weight": COLUMNS,
        },
    ),
    "vit": Example(
        lambda t: t.ViTForImageClassification(t.ViTConfig(image_size=16, patch_size=4, num_labels=5, **ENCODER)),
        _images,
        {"*.[qkv]_proj.*": COLUMNS, "*.o_proj.weight": ROWS, "*.fc1.*": COLUMNS, "*.fc2.weight": ROWS},
    ),
    "llama, its own plan": Example(lambda t: t.LlamaForCausalLM(t.LlamaConfig(**DECODER)), _tokens, "model"),
    "qwen3, its own plan": Example(
        lambda t: t.Qwen3ForCausalLM(t.Qwen3Config(head_dim=8, **DECODER)), _tokens, "model"
    ),
    "mixtral": Example(
        lambda t: t.MixtralForCausalLM(t.MixtralConfig(num_local_experts=4, **EXPERTS)), _tokens, "model"
    ),
    "qwen3 moe": Example(
        lambda t: t.Qwen3MoeForCausalLM(
            t.Qwen3MoeConfig(num_experts=4, moe_intermediate_size=16, head_dim=8, **EXPERTS)
        ),
        _tokens,
        "model",
    ),
    "deepseek v3": Example(
        lambda t: t.DeepseekV3ForCausalLM(t.DeepseekV3Config(**(EXPERTS | MLA | {"num_key_value_heads": 4}))),
        _tokens,
        "model",
    ),
    "whisper": Example(lambda t: t.WhisperForConditionalGeneration(t.WhisperConfig(**SPEECH)), _speech, ATTENTION_PLAN),
    "clip": Example(
        lambda t: t.CLIPModel(
            t.CLIPConfig(
                text_config={**TOWER, "vocab_size": VOCAB, "max_position_embeddings": 16, "eos_token_id": 2},
                vision_config={**TOWER, "image_size": 16, "patch_size": 4},
                projection_dim=16,
            )
        ),
        _images_and_texts,
        ATTENTION_PLAN,
    ),
    "mamba": Example(
        lambda t: t.MambaForCausalLM(
            t.MambaConfig(vocab_size=VOCAB, hidden_size=32, state_size=4, num_hidden_layers=2, time_step_rank=4)
        ),
        _tokens,
        {
            "*.in_proj.weight": COLUMNS,
            "*.conv1d.*": COLUMNS,
            "*.x_proj.weight": ROWS,
            "*.dt_proj.*": COLUMNS,
            "*.A_log": COLUMNS,
            "*.D": COLUMNS,
            "*.out_proj.weight": ROWS,
        },
    ),
    "convolutions": Example(
        lambda t: WithLoss(Images()),
        lambda: {"images": _images()["pixel_values"]},
        {"*.first.*": COLUMNS, "*.norm.*": {}, "*.second.weight": ROWS},
    ),
    "images cut by rows": Example(
        lambda t: WithLoss(Images()),
        lambda: {"images": _images()["pixel_values"]},
        {"*.head.weight": COLUMNS},
        cut={"images": Shard(2)},
    ),
    "diffusion u-net": Example(
        _denoising,
        # A shard of one image torch does not compile by aot_eager, nor a batch of one.
        lambda: {"sample": _images()["pixel_values"].double().repeat(2, 1, 1, 1), "timestep": torch.arange(4) * 3},
        {
            "*.conv1.*": COLUMNS,
            "*.conv2.weight": ROWS,
            "*.time_emb_proj.*": COLUMNS,
            "*.to_[qkv].*": COLUMNS,
            "*.to_out.0.weight": ROWS,
        },
        needs="diffusers",
    ),
    "llama, LoRA": Example(
        _adapted,
        _tokens,
        {
            "*.q_proj.base_layer.weight": COLUMNS,
            "*.k_proj.weight": COLUMNS,
            "*.v_proj.base_layer.weight": COLUMNS,
            "*.lora_B.*": COLUMNS,
            **{name: where for name, where in DECODER_PLAN.items() if "qkv" not in name},
        },
        needs="peft",
    ),
    "llama, checkpoints": Example(_with_checkpoints, _tokens, DECODER_PLAN),
    "tables of clicks": Example(
        lambda t: WithLoss(Clicks()),
        lambda: {"numbers": torch.linspace(-1, 1, 16).view(4, 4), "ids": torch.arange(24).view(4, 2, 3) * 7 % 20},
        {"*.tables.*.weight": COLUMNS},
    ),
    "lstm": Example(
        lambda t: WithLoss(Recurrent(nn.LSTM)), _words, {"*.layers.weight_*": COLUMNS, "*.head.weight": COLUMNS}
    ),
    "gru": Example(lambda t: WithLoss(Recurrent(nn.GRU)), _words, {"*.head.weight": COLUMNS}),
    "encoder": Example(
        lambda t: WithLoss(Encoder()),
        _words,
        {"*.in_proj_weight": COLUMNS, "*.linear1.*": COLUMNS, "*.linear2.weight": ROWS},
    ),
    "graph": Example(
        lambda t: WithLoss(Graph()),
        lambda: {
            "nodes": torch.linspace(-1, 1, 30).view(5, 6),
            "edges": torch.tensor([[0, 1, 2, 3, 4, 0], [1, 2, 3, 4, 0, 2]]),
        },
        {"*.first.*": COLUMNS, "*.second.weight": ROWS},
    ),
}

__all__ = ["EXAMPLES", "Example"]
