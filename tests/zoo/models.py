"""Models of transformers, small, as they are: how each is made, its inputs, and a plan of parameter names."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from dtensor import Shard

COLUMNS, ROWS = {"tp": Shard(0)}, {"tp": Shard(1)}
VOCAB = 64


class Example(NamedTuple):
    """A model, the keyword arguments of its forward, which has a loss, and where its parameters go."""

    model: Callable[[Any], nn.Module]
    inputs: Callable[[], dict[str, torch.Tensor]]
    plan: dict[str, Any]


def _tokens() -> dict[str, torch.Tensor]:
    tokens = torch.arange(32).view(2, 16) * 7 % VOCAB
    return {"input_ids": tokens, "labels": (tokens * 3 + 1) % VOCAB}


def _images() -> dict[str, torch.Tensor]:
    return {
        "pixel_values": torch.linspace(-1, 1, 2 * 3 * 16 * 16).sin().view(2, 3, 16, 16),
        "labels": torch.tensor([1, 3]),
    }


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
}


__all__ = ["EXAMPLES", "Example"]
