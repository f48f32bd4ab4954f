"""Translates the tensor and expert parallel plans of a transformers model to placements of its parameters.

The styles of such a plan describe what a module does with local tensors; in a global view only the placements of
parameters matter. The style names are those of transformers' `ALL_PARALLEL_STYLES`.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ...errors import PlacementError
from ...layout.placements import Placement, Replicate, Shard


def _columns(x: torch.Tensor, name: str) -> Placement:
    return Shard(max(x.dim() - 2, 0))


def _rows(x: torch.Tensor, name: str) -> Placement:
    return Replicate() if name == "bias" else Shard(x.dim() - 1)


def _packed_rows(x: torch.Tensor, name: str) -> Placement:
    return Replicate() if x.dim() == 1 else Shard(x.dim() - 1)


def _whole(x: torch.Tensor, name: str) -> Placement:
    return Replicate()


STYLES: dict[str, Callable[[torch.Tensor, str], Placement]] = {
    **dict.fromkeys(("colwise", "colwise_rep", "colwise_gather_output", "packed_colwise"), _columns),
    **dict.fromkeys(("rowwise", "rowwise_rep", "rowwise_split_input"), _rows),
    "packed_rowwise": _packed_rows,
    "embedding_rowwise": lambda x, name: Shard(0),
    "embedding_colwise": lambda x, name: Shard(1),
    **dict.fromkeys(("sequence_parallel", "replicate", "replicated_with_grad_allreduce", "mla_kv_a_proj"), _whole),
    "grouped_gemm": lambda x, name: Shard(0),
    "ep_dispatch_experts": _whole,
    **dict.fromkeys(("all_reduce", "moe_tp_experts", "moe_identity_expert", "local_params"), _whole),
}
"""Style -> function from a parameter and its name within the module to its placement."""


EXPERTS = "ep"
"""The mesh axis over which a model's expert parallel plan deals out experts."""


def placements_of_plan(model: nn.Module, mesh: DeviceMesh) -> dict[str, list[Placement]]:
    """Parameter name -> placements, one per mesh axis: by the model's own `tp_plan` over "tp" or the only axis, and
    over an axis called "ep" by its expert parallel plan, which then says all of the layers of experts.

    Raises:
        PlacementError: the model has no such plan, a style is unknown, or none of several mesh axes is "tp" or "ep".
    """
    names = mesh.mesh_dim_names or ()
    found: dict[str, list[Placement]] = {}
    if EXPERTS not in names or "tp" in names:
        plan: Any = getattr(model, "tp_plan", None)
        if not isinstance(plan, Mapping) or not plan:
            raise PlacementError(
                f"{type(model).__name__} has no tp_plan of its own; write a dict from patterns of parameter names to "
                'placements, such as {"*.q_proj.weight": {"tp": Shard(0)}}'
            )
        axis = _axis(mesh)
        found = {name: _at(axis, mesh.ndim, p) for name, p in _placed(model, plan, "tp_plan")}
    if EXPERTS in names:
        axis = names.index(EXPERTS)
        found |= {name: _at(axis, mesh.ndim, p) for name, p in _placed(model, _of_experts(model), "expert plan")}
    return found


def _of_experts(model: Any) -> dict[str, str]:
    """The expert parallel plan of a model; its keys are of the model without a head."""
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    plan = getattr(config, "base_model_ep_plan", None)
    if not plan:
        raise PlacementError(
            f"{type(model).__name__} has no expert parallel plan of its own, which placements='model' takes for the "
            f'mesh axis {EXPERTS!r}; write a dict such as {{"*.experts.*": {{"ep": Shard(0)}}}}'
        )
    at = [name for name, module in model.named_modules() if module is model.base_model] if model.base_model else [""]
    prefix = f"{at[0]}." if at and at[0] else ""
    return {f"{prefix}{key}": style for key, style in plan.items() if "grouped_gemm" in style}


def _placed(model: nn.Module, plan: Mapping[str, str], called: str) -> Iterator[tuple[str, Placement]]:
    for key, style in plan.items():
        if style not in STYLES:
            raise PlacementError(
                f"the {called} of {type(model).__name__} gives {key!r} the style {style!r}, which is none of "
                f"{', '.join(sorted(STYLES))}; write placements for its parameters instead of 'model'"
            )
    entries = [(re.compile(re.escape(key).replace(r"\*", r"\d+")), style) for key, style in plan.items()]
    for name, x in model.named_parameters(remove_duplicate=False):
        module, _, last = name.rpartition(".")
        # An entry for the parameter takes precedence over one for its module.
        for at in (name, module):
            found = [style for key, style in entries if key.fullmatch(at)]
            if found:
                yield name, STYLES[found[-1]](x, last)
                break


def _axis(mesh: DeviceMesh) -> int:
    names = mesh.mesh_dim_names or ()
    if mesh.ndim > 1 and "tp" not in names:
        raise PlacementError(
            f"placements='model' shards over the axis 'tp', but the mesh has axes {list(names)}; name one of them 'tp'"
        )
    return names.index("tp") if mesh.ndim > 1 else 0


def _at(axis: int, ndim: int, placement: Placement) -> list[Placement]:
    return [placement if a == axis else Replicate() for a in range(ndim)]


__all__ = ["placements_of_plan"]
