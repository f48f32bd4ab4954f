"""Seven models of transformers, with what a user writes by hand to shard each of them over an axis of the mesh.

    parameters      patterns of names -> the dim of parameters that is cut, for `distribute_model`
    styles          module -> style, for `parallelize_module`; the same parameters are cut
    sequence        the same with activations cut along the sequence between blocks, as Megatron does
    adapted         changes to modules that no style makes

GPT-2 and Mixtral keep matrices of several projections in one. By columns, such a matrix does not fall into parts that
belong to heads, so by hand GPT-2's attention stays whole, and Mixtral's experts are dealt out.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from .experts import dealt

Styles = dict[str, Any]
WIDTH, HIDDEN, HEADS, LAYERS, VOCAB = 256, 768, 8, 2, 1024
BATCH, TOKENS = 8, 128
COLUMNS, ROWS = 0, 1
"""The dims of the weight of nn.Linear."""


def _nothing(model: nn.Module, mesh: Any, tensor: Any) -> None:
    pass


@dataclass(frozen=True)
class Subject:
    """A model; functions of styles take the module that has the classes of styles, of either library.

    Attributes:
        name: name of the model.
        make: makes it, from the module transformers.
        batch: makes the arguments of its forward for a batch, labels among them.
        layers: names of the lists of its layers.
        parameters: pattern of names of parameters -> the dim that is cut.
        styles: the styles of tensor parallelism.
        sequence: the styles of tensor and sequence parallelism.
        adapted: adapts modules to styles, before they are applied.
    """

    name: str
    make: Callable[[Any], nn.Module]
    batch: Callable[[], dict[str, torch.Tensor]]
    layers: tuple[str, ...]
    parameters: dict[str, int]
    styles: Callable[[Any], Styles]
    sequence: Callable[[Any], Styles]
    adapted: Callable[[nn.Module, Any, Any], None] = field(default=_nothing)

    def model(self) -> nn.Module:
        """Return the model on one device, with the same values each time."""
        import transformers

        torch.manual_seed(0)
        return self.make(transformers).train()


def _tokens() -> dict[str, torch.Tensor]:
    tokens = torch.arange(BATCH * TOKENS).view(BATCH, TOKENS) * 7 % VOCAB
    return {"input_ids": tokens, "labels": (tokens * 3 + 1) % VOCAB}


def _images() -> dict[str, torch.Tensor]:
    side = IMAGE["image_size"]
    pixels = torch.linspace(-1, 1, BATCH * 3 * side * side).sin().view(BATCH, 3, side, side)
    return {"pixel_values": pixels, "labels": torch.arange(BATCH) % 10}


DECODER = {"hidden_size": WIDTH, "intermediate_size": HIDDEN, "num_hidden_layers": LAYERS, "vocab_size": VOCAB}
DECODER |= {"num_attention_heads": HEADS, "num_key_value_heads": HEADS // 2, "max_position_embeddings": TOKENS}
ENCODER = {"hidden_size": WIDTH, "intermediate_size": HIDDEN, "num_hidden_layers": LAYERS}
ENCODER |= {"num_attention_heads": HEADS, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
IMAGE = {"image_size": 44, "patch_size": 4}
"""121 patches and one token of the class: a number that two ranks divide."""
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
GPT2 = {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_inner": HIDDEN, "n_positions": TOKENS}
T5 = {"d_model": WIDTH, "d_kv": WIDTH // HEADS, "d_ff": HIDDEN, "num_layers": LAYERS, "num_heads": HEADS}


def _cut(lib: Any, others: int = 0) -> Any:
    """The style of the first layer, which is given all tokens and keeps this rank's; it is called with `others` more
    positional arguments."""
    left = (None,) * others
    return lib.PrepareModuleInput(
        input_layouts=(Replicate(), *left), desired_input_layouts=(Shard(1), *left), use_local_output=True
    )


def _gathered(lib: Any, others: int = 0, *, first: bool = True, **names: Any) -> Any:
    """The style of a module that is given parts of sequences and reads all of them: its first positional argument,
    unless `first` is False, of 1 + `others`, and those called `names`."""
    left = (None,) * others
    given: Any = {"input_layouts": (Shard(1), *left), "desired_input_layouts": (Replicate(), *left)} if first else {}
    if names:
        given |= {"input_kwarg_layouts": names, "desired_input_kwarg_layouts": dict.fromkeys(names, Replicate())}
    return lib.PrepareModuleInput(use_local_output=True, **given)


def _whole_inside(lib: Any, *others: None) -> Any:
    """The style of a module that works on whole sequences between parts of them; `others`: its further outputs."""
    return lib.PrepareModuleInputOutput(
        input_layouts=(Shard(1),),
        desired_input_layouts=(Replicate(),),
        use_local_input=True,
        output_layouts=(Replicate(), *others),
        desired_output_layouts=(Shard(1), *others),
        use_local_output=True,
    )


def _norm(lib: Any, dim: int = 1) -> Any:
    return lib.SequenceParallel(sequence_dim=dim, use_local_output=True)


def _pair(lib: Any, columns: tuple[str, ...], rows: tuple[str, ...], sequence: bool = False) -> Styles:
    row = lib.RowwiseParallel(output_layouts=Shard(1)) if sequence else lib.RowwiseParallel()
    return {**{name: lib.ColwiseParallel() for name in columns}, **dict.fromkeys(rows, row)}


# Decoders: Llama, Qwen3, Mixtral.

ATTENTION = tuple([f"model.layers.*.self_attn.{w}_proj" for w in "qkv"])
OUT = ("model.layers.*.self_attn.o_proj",)
FEED = ("model.layers.*.mlp.gate_proj", "model.layers.*.mlp.up_proj")
DOWN = ("model.layers.*.mlp.down_proj",)
ATTENTION_CUT = {"*.[qkv]_proj.weight": COLUMNS, "*.o_proj.weight": ROWS}
FEED_CUT = {"*.gate_proj.weight": COLUMNS, "*.up_proj.weight": COLUMNS, "*.down_proj.weight": ROWS}


def _heads_normed(lib: Any) -> Styles:
    return {f"model.layers.*.self_attn.{name}_norm": _norm(lib, 2) for name in "qk"}


def _decoder(feed: bool = True, normed: bool = False) -> Callable[[Any], Styles]:
    def styles(lib: Any) -> Styles:
        own = _heads_normed(lib) if normed else {}
        return _pair(lib, ATTENTION + (FEED if feed else ()), OUT + (DOWN if feed else ())) | own

    return styles


def _decoder_sequence(feed: bool = True, normed: bool = False) -> Callable[[Any], Styles]:
    def styles(lib: Any) -> Styles:
        return {
            "model.layers.0": _cut(lib),
            **{f"model.layers.*.{name}_layernorm": _norm(lib) for name in ("input", "post_attention")},
            "model.layers.*.self_attn": _gathered(lib, first=False, hidden_states=Shard(1)),
            **({"model.layers.*.mlp": _gathered(lib)} if feed else {}),
            **_pair(lib, ATTENTION + (FEED if feed else ()), OUT + (DOWN if feed else ()), sequence=True),
            **(_heads_normed(lib) if normed else {}),
            "model.norm": _norm(lib),
            "lm_head": _gathered(lib),
        }

    return styles


def _mixtral_sequence(lib: Any) -> Styles:
    return {**_decoder_sequence(feed=False)(lib), "model.layers.*.mlp": _whole_inside(lib)}


# GPT-2


def _gpt2_model(t: Any) -> nn.Module:
    """The model, told its loss: it warns of a name that it does not find, in the forward, where that breaks a graph."""
    model = t.GPT2LMHeadModel(t.GPT2Config(vocab_size=VOCAB, **GPT2, **NO_DROPOUT))
    model.loss_type = "ForCausalLM"
    return model


def _gpt2(lib: Any) -> Styles:
    return _pair(lib, ("transformer.h.*.mlp.c_fc",), ("transformer.h.*.mlp.c_proj",))


def _gpt2_sequence(lib: Any) -> Styles:
    return {
        **{f"transformer.h.*.ln_{i}": _norm(lib) for i in (1, 2)},
        "transformer.h.0": _cut(lib, 3),
        "transformer.h.*.attn": _whole_inside(lib, None),
        "transformer.h.*.mlp": _gathered(lib),
        **_pair(lib, ("transformer.h.*.mlp.c_fc",), ("transformer.h.*.mlp.c_proj",), sequence=True),
        "transformer.ln_f": _gathered(lib),
    }


# BERT

BERT_IN = (
    *[f"bert.encoder.layer.*.attention.self.{w}" for w in ("query", "key", "value")],
    "bert.encoder.layer.*.intermediate.dense",
)
BERT_OUT = ("bert.encoder.layer.*.attention.output.dense", "bert.encoder.layer.*.output.dense")


def _bert(lib: Any) -> Styles:
    return _pair(lib, BERT_IN, BERT_OUT)


def _bert_sequence(lib: Any) -> Styles:
    return {
        "bert.encoder.layer.0": _cut(lib, 2),
        "bert.encoder.layer.*.attention.self": _gathered(lib),
        "bert.encoder.layer.*.intermediate": _gathered(lib),
        **_pair(lib, BERT_IN, BERT_OUT, sequence=True),
        **{f"bert.encoder.layer.*.{name}output.LayerNorm": _norm(lib) for name in ("attention.", "")},
        "cls": _gathered(lib),
    }


# T5

T5_STACKS = {
    "encoder": ("SelfAttention", "DenseReluDense"),
    "decoder": ("SelfAttention", "EncDecAttention", "DenseReluDense"),
}
"""Stack -> the modules of a block, in order."""


def _t5(lib: Any, sequence: bool = False) -> Styles:
    columns, rows = [], []
    for stack, parts in T5_STACKS.items():
        columns.append(f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias")
        for i, part in enumerate(parts):
            at = f"{stack}.block.*.layer.{i}.{part}"
            columns += [f"{at}.{w}" for w in (("wi",) if part == "DenseReluDense" else ("q", "k", "v"))]
            rows.append(f"{at}.{'wo' if part == 'DenseReluDense' else 'o'}")
    return _pair(lib, tuple(columns), tuple(rows), sequence)


def _t5_sequence(lib: Any) -> Styles:
    found = {"lm_head": _gathered(lib)}
    for stack, parts in T5_STACKS.items():
        found |= {f"{stack}.block.0": _cut(lib, 5), f"{stack}.final_layer_norm": _norm(lib)}
        for i, part in enumerate(parts):
            at = f"{stack}.block.*.layer.{i}"
            both = {"key_value_states": Shard(1)} if part == "EncDecAttention" else {}
            found |= {f"{at}.layer_norm": _norm(lib), f"{at}.{part}": _gathered(lib, **both)}
    return found | _t5(lib, sequence=True)


def _fewer_heads(model: nn.Module, mesh: Any, tensor: Any) -> None:
    """Tell T5's attention of how many heads it makes a bias."""
    for module in model.modules():
        if type(module).__name__ == "T5Attention":
            module.n_heads //= mesh.size()


# ViT

VIT_IN = (*[f"vit.layers.*.attention.{w}_proj" for w in "qkv"], "vit.layers.*.mlp.fc1")
VIT_OUT = ("vit.layers.*.attention.o_proj", "vit.layers.*.mlp.fc2")


def _vit(lib: Any) -> Styles:
    return _pair(lib, VIT_IN, VIT_OUT)


def _vit_sequence(lib: Any) -> Styles:
    return {
        "vit.layers.0": _cut(lib, 1),
        **{f"vit.layers.*.layernorm_{name}": _norm(lib) for name in ("before", "after")},
        "vit.layers.*.attention": _gathered(lib, 1),
        "vit.layers.*.mlp": _gathered(lib),
        **_pair(lib, VIT_IN, VIT_OUT, sequence=True),
        "vit.layernorm": _gathered(lib),
    }


SUBJECTS = {
    s.name: s
    for s in (
        Subject(
            "llama",
            lambda t: t.LlamaForCausalLM(t.LlamaConfig(**DECODER)),
            _tokens,
            ("model.layers",),
            ATTENTION_CUT | FEED_CUT,
            _decoder(),
            _decoder_sequence(),
        ),
        Subject(
            "qwen3",
            lambda t: t.Qwen3ForCausalLM(t.Qwen3Config(head_dim=WIDTH // HEADS, **DECODER)),
            _tokens,
            ("model.layers",),
            ATTENTION_CUT | FEED_CUT,
            _decoder(normed=True),
            _decoder_sequence(normed=True),
        ),
        Subject(
            "gpt2",
            _gpt2_model,
            _tokens,
            ("transformer.h",),
            {"*.c_fc.weight": 1, "*.c_fc.bias": 0, "*.mlp.c_proj.weight": 0},
            _gpt2,
            _gpt2_sequence,
        ),
        Subject(
            "bert",
            lambda t: t.BertForMaskedLM(t.BertConfig(vocab_size=VOCAB, max_position_embeddings=TOKENS, **ENCODER)),
            _tokens,
            ("bert.encoder.layer",),
            {
                **{f"*.self.{name}.*": COLUMNS for name in ("query", "key", "value")},
                "*.intermediate.dense.*": COLUMNS,
                "*.layer.*.output.dense.weight": ROWS,
            },
            _bert,
            _bert_sequence,
        ),
        Subject(
            "t5",
            lambda t: t.T5ForConditionalGeneration(
                t.T5Config(vocab_size=VOCAB, dropout_rate=0.0, decoder_start_token_id=0, **T5)
            ),
            _tokens,
            ("encoder.block", "decoder.block"),
            {
                "*Attention.[qkv].weight": COLUMNS,
                "*Attention.o.weight": ROWS,
                "*.wi.weight": COLUMNS,
                "*.wo.weight": ROWS,
                "*.relative_attention_bias.weight": 1,
            },
            _t5,
            _t5_sequence,
            _fewer_heads,
        ),
        Subject(
            "vit",
            lambda t: t.ViTForImageClassification(t.ViTConfig(num_labels=10, **IMAGE, **ENCODER)),
            _images,
            ("vit.layers",),
            {
                "*.[qkv]_proj.*": COLUMNS,
                "*.o_proj.weight": ROWS,
                "*.fc1.*": COLUMNS,
                "*.fc2.weight": ROWS,
            },
            _vit,
            _vit_sequence,
        ),
        Subject(
            "mixtral",
            lambda t: t.MixtralForCausalLM(t.MixtralConfig(num_local_experts=4, num_experts_per_tok=2, **DECODER)),
            _tokens,
            ("model.layers",),
            ATTENTION_CUT | {"*.experts.*_proj": 0},
            _decoder(feed=False),
            _mixtral_sequence,
            dealt,
        ),
    )
}
"""Name -> subject."""

__all__ = ["SUBJECTS", "Subject"]
