"""How a model is sharded: the plans of the demo, in the classes of either library.

`dtensor.tools.demo_plans.PLANS` defines the mesh of each plan and each rank's part of a batch. This module has the
styles for all models, and `applied`, which shards a model by one of the libraries. torch's `fully_shard` is FSDP2. For
replicas torch uses DistributedDataParallel with its default options.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard as their_fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor import parallel as their_styles
from torch.nn.parallel import DistributedDataParallel

from dtensor import parallel as our_styles
from dtensor.tools.demo_plans import PLANS, TENSOR

RANKS = {"tp": 2, "sp": 2, "ddp": 2, "fsdp": 2, "hsdp": 4, "2d": 4}
"""Plans that are compared -> the smallest number of ranks of each."""

NO_COLLECTIVES = ("ddp", "fsdp", "hsdp")
"""Plans for which torch communicates outside of its compiled graphs, so that Inductor's options change nothing."""

STYLES: dict[str, ModuleType] = {"dtensor": our_styles, "torch": their_styles}
FULLY_SHARD: dict[str, Callable[..., Any]] = {"dtensor": our_styles.fully_shard, "torch": their_fully_shard}


def styles(family: str, library: str, sequence: bool) -> dict[str, Any]:
    """Return module name -> style of `library`, for tensor parallelism with or without sequence parallelism."""
    return (_mlp if family == "mlp" else _language_model)(STYLES[library], family, sequence)


def _mlp(lib: Any, family: str, sequence: bool) -> dict[str, Any]:
    col, row = lib.ColwiseParallel, lib.RowwiseParallel
    if not sequence:
        return {"layers.*.w1": col(), "layers.*.w2": row()}
    return {"layers.*.w1": col(input_layouts=Shard(0)), "layers.*.w2": row(output_layouts=Shard(0))}


def _language_model(lib: Any, family: str, sequence: bool) -> dict[str, Any]:
    col, row, norm = lib.ColwiseParallel, lib.RowwiseParallel, lib.SequenceParallel
    positions = family == "transformer"
    # The Transformer splits heads with the global size of its dim; Llama's rotary embedding takes local tensors.
    heads = {"layers.*.attention.w[qkv]": col(use_local_output=not positions)}
    first = ["layers.*.feed_forward.w1"] + (["layers.*.feed_forward.w3"] if family == "llama" else [])
    if not sequence:
        return {
            "tok_embeddings": row(input_layouts=Replicate()),
            **({"pos_embeddings": row(input_layouts=Replicate())} if positions else {}),
            **heads,
            "layers.*.attention.wo": row(),
            **{name: col() for name in first},
            "layers.*.feed_forward.w2": row(),
            "output": col(output_layouts=Replicate()),
        }
    entering: dict[str, Any] = {"input_layouts": Shard(1), "desired_input_layouts": Replicate()}
    if family == "llama":  # its attention also takes the cosines and sines of the positions
        entering = {"input_layouts": (Shard(1), None, None), "desired_input_layouts": (Replicate(), None, None)}
    feeding = {"input_layouts": Shard(1), "desired_input_layouts": Replicate()}
    return {
        "tok_embeddings": row(input_layouts=Replicate(), output_layouts=Shard(1)),
        **({"pos_embeddings": row(input_layouts=Replicate(), output_layouts=Shard(0))} if positions else {}),
        "layers.*.attention_norm": norm(),
        "layers.*.attention": lib.PrepareModuleInput(**entering),
        **heads,
        "layers.*.attention.wo": row(output_layouts=Shard(1)),
        "layers.*.ffn_norm": norm(),
        "layers.*.feed_forward": lib.PrepareModuleInput(**feeding),
        **{name: col() for name in first},
        "layers.*.feed_forward.w2": row(output_layouts=Shard(1)),
        "norm": norm(),
        "output": col(input_layouts=Shard(1), output_layouts=Replicate()),
    }


def own_part(batch: torch.Tensor, family: str, plan: str, mesh: Any) -> torch.Tensor:
    """Return this rank's part of a batch; for the perceptron, sequence parallelism splits the samples."""
    chosen = PLANS[plan]
    if family == "mlp" and chosen.sequence:
        return batch.chunk(mesh[TENSOR].size())[mesh.get_local_rank(TENSOR)]
    return chosen.own_part(batch, mesh)


def applied(model: nn.Module, family: str, library: str, plan: str, mesh: Any, **options: Any) -> nn.Module:
    """Shard `model` in place by a plan, with `options` of `fully_shard`; returns the module to call instead of it."""
    chosen = PLANS[plan]
    if TENSOR in chosen.axes:
        given = styles(family, library, chosen.sequence)
        model = STYLES[library].parallelize_module(model, mesh[TENSOR], given)
    if chosen.replicas and library == "torch":
        return DistributedDataParallel(model, process_group=mesh[chosen.axes[0]].get_group())
    if chosen.data_axes:
        axes = mesh[chosen.data_axes]
        for layer in model.get_submodule("layers").children():
            FULLY_SHARD[library](layer, mesh=axes, **options)
        FULLY_SHARD[library](model, mesh=axes, **options)
    return model


__all__ = ["NO_COLLECTIVES", "RANKS", "applied", "own_part", "styles"]
