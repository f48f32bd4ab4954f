"""Whole tensors in `load_state_dict` of a sharded model: each rank takes its part of them.

A file of torch.save or safetensors holds whole tensors. A hook on each module with DTensors replaces them, before torch
copies or assigns, by DTensors that hold this rank's part. What torch says of missing and unexpected names and of
shapes remains. Nothing is communicated: every rank passes the same state dict.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ...errors import PlacementError
from ...tensor.deferred import Deferred, own_box, read
from ...tensor.tensor import DTensor
from ...tensor.torch_dtensor import as_ours

TAKES_PLAIN = "_dtensor_takes_plain"
"""The attribute that marks a module whose `load_state_dict` takes whole tensors."""


def take_plain_states(module: nn.Module) -> None:
    """Let `load_state_dict` of a module of a sharded model, and of all that hold it, take whole tensors."""
    if TAKES_PLAIN not in vars(module) and (module._parameters or module._buffers):
        vars(module)[TAKES_PLAIN] = True
        module.register_load_state_dict_pre_hook(_take_parts)


def _take_parts(module: nn.Module, state: dict[str, Any], prefix: str, local: dict[str, Any], *_: Any) -> None:
    assigned = local.get("assign_to_params_buffers", False)
    for name, x in (*module._parameters.items(), *module._buffers.items()):
        given = as_ours(state.get(prefix + name))
        if not isinstance(given, torch.Tensor):
            continue
        if isinstance(x, DTensor) and not isinstance(given, DTensor):
            given = given[0] if x.dim() == 0 and given.shape == (1,) else given  # as torch does, for old files
            given = part_of(given, x, copied=assigned) if given.shape == x.shape else given
        state[prefix + name] = read(given)


@torch.no_grad()
def part_of(whole: torch.Tensor, like: DTensor, *, copied: bool = False) -> DTensor:
    """The plain tensor `whole` as a DTensor placed like `like`, of which this rank holds its part.

    Args:
        whole: the values of the global tensor.
        like: a DTensor of its shape.
        copied: whether the part has memory of its own, so that it does not keep `whole` alive.
    """
    spec = like._spec
    part = read(whole.detach(), own_box(spec))
    if not part.is_meta:
        part = part.to(spec.mesh.device_type if like.is_meta else like.to_local().device)
    if copied:
        part = part.clone(memory_format=torch.contiguous_format)
    return DTensor(part, spec.mesh, spec.layout, spec.shape, spec.stride)


def check_values(modules: Iterable[nn.Module]) -> None:
    """Raise PlacementError if some tensors of modules are yet to be read, and others have no values to come."""
    named = [
        (m, name, x) for m in modules for name, x in (*m._parameters.items(), *m._buffers.items()) if x is not None
    ]
    empty = [(m, name) for m, name, x in named if x.is_meta and not isinstance(x, (Deferred, DTensor))]
    if empty and any(isinstance(x, Deferred) for _, _, x in named):
        more = f" (and {len(empty) - 1} more)" if empty[1:] else ""
        raise PlacementError(
            f"{empty[0][1]!r} of a {type(empty[0][0]).__name__}{more}: no file holds it, and it is on the meta device, "
            "while other tensors of the model are read from files; give it values before the model is sharded, as to a "
            "buffer that is not persistent: module.name = ..."
        )


def read_left(modules: Iterable[nn.Module]) -> None:
    """Read the parameters and buffers of modules that sharding has left plain and that are yet to be read."""
    here: dict[torch.Tensor, torch.Tensor] = {}
    for module in modules:
        for tensors in (module._parameters, module._buffers):
            for name, x in tensors.items():
                if isinstance(x, Deferred) and x not in here:  # a shared parameter stays shared
                    is_parameter = isinstance(x, nn.Parameter)
                    here[x] = nn.Parameter(read(x), requires_grad=x.requires_grad) if is_parameter else read(x)
                if x in here:
                    tensors[name] = here[x]  # pyright: ignore


__all__ = ["check_values", "part_of", "read_left", "take_plain_states"]
