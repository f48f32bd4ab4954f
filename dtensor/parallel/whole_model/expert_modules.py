"""Layers of experts of transformers' models run as one operator, `dtensor.parallel.experts`.

transformers looks up how a layer of experts is computed under a name (`experts_implementation`); here a name is added.
Its own "grouped_mm" sorts the tokens of the whole batch, so that no rank could compute its own part alone.
"""

import copy
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from ...errors import ArgumentError, MixedTensorError
from ...layout.placements import Shard
from ...rules.expert_layers import gate_name
from ...tensor.tensor import DTensor

NAME = "dtensor"
REPLACED = "grouped_mm"
"""The implementation in place of which it is used: transformers' own choice. Others were asked for, and stay."""

GATE = "_dtensor_gate"


def use_operator(model: nn.Module, *, always: bool) -> None:
    """Let the layers of experts of a model run as one operator: all, or those whose matrices are not cut inside."""
    traced: dict[Any, str] = {}
    for module in _layers(model):
        if always or not _is_cut_inside(module):
            _change(module, traced)


@contextmanager
def using_operator(model: nn.Module) -> Iterator[None]:
    """Context in which the layers of experts of a model run as one operator."""
    traced: dict[Any, str] = {}
    with ExitStack() as stack:
        for module in _layers(model):
            config = module.config
            if _change(module, traced):
                stack.callback(setattr, module, "config", config)
                stack.callback(delattr, module, GATE)
        yield


def _layers(model: nn.Module) -> list[Any]:
    """The layers of experts whose implementation is `REPLACED`."""
    if "transformers.integrations.moe" not in sys.modules:
        return []
    return [m for m in model.modules() if hasattr(m, "_is_expert_parallel") and _fits(m)]


def _fits(module: Any) -> bool:
    matrices = [getattr(module, name, None) for name in ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")]
    return (
        module.config._experts_implementation == REPLACED
        and not module.has_post_expert_norm
        and not module._is_expert_parallel
        and all(isinstance(m, torch.Tensor) and m.dim() == 3 and m.is_floating_point() for m in matrices)
    )


def _change(module: Any, traced: dict[Any, str]) -> bool:
    """Let a layer run as one operator; False if what it has between both products holds tensors, so that it cannot.

    `traced` has what was traced for layers before: tracing takes a tenth of a second, and layers are alike.
    """
    up, _ = _matrices(module)
    device = up.device_mesh.device_type if isinstance(up, DTensor) else "cpu"
    up = up.to_local() if isinstance(up, DTensor) else up
    alike = _says(module), up.dtype, up.device, up.shape[-1]
    try:
        gate = traced.get(alike) or gate_name(_gate(module), up.detach(), up.shape[-1], device)
    except (ArgumentError, MixedTensorError):
        return False
    traced[alike] = gate
    setattr(module, GATE, gate)
    sys.modules["transformers.integrations.moe"].ALL_EXPERTS_FUNCTIONS.register(NAME, _forward)
    module.config = copy.copy(module.config)
    module.config._experts_implementation = NAME
    return True


def _says(module: Any) -> Any:
    """What tells the code of a layer from that of others: its classes, its configuration, and the values it holds."""
    simple = (bool, int, float, str, type(None))
    held = [
        (type(m), tuple(sorted((k, v) for k, v in vars(m).items() if isinstance(v, simple)))) for m in module.modules()
    ]
    return id(module.config), tuple(held)


def _is_cut_inside(module: Any) -> bool:
    placed = [p for x in module.parameters() if isinstance(x, DTensor) for p in x.placements]
    return any(isinstance(p, Shard) and p.dim for p in placed)


def _gate(module: Any) -> Any:
    return module._apply_gate if module.has_gate else module.act_fn


def _matrices(module: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The matrices of both products, by which rows are multiplied."""
    up, down = module.gate_up_proj if module.has_gate else module.up_proj, module.down_proj
    return (up, down) if module.is_transposed else (up.transpose(-2, -1), down.transpose(-2, -1))


def _forward(module: Any, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> torch.Tensor:
    up, down = _matrices(module)
    biases = (None, None)
    if module.has_bias:
        biases = (module.gate_up_proj_bias if module.has_gate else module.up_proj_bias), module.down_proj_bias
    given = hidden_states.to(up.dtype), top_k_index, top_k_weights, up, down
    out, _ = torch.ops.dtensor.experts(*given, *biases, getattr(module, GATE))
    return out.to(hidden_states.dtype)


__all__ = ["use_operator", "using_operator"]
