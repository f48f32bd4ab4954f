"""Models of torch.distributed.tensor and FSDP2 become models of dtensor, and tensors go over and back
(`torch_dtensor`).

Nothing is copied or sent. What torch has put on modules is taken off where it would do the work of what takes its place
(FSDP2), and given torch's tensors where it still has work to do (the hooks of tensor parallel styles).
"""

from typing import Any

from torch import nn

from ..parallel.fsdp.torch_fsdp2 import take_over, taken_over
from ..tensor.torch_dtensor import TORCH, as_ours, as_torchs, from_torch, is_torch_dtensor, to_torch
from ..torch_private.core import tree_map
from ..torch_private.fsdp import fsdp2_units, remove_fsdp2

FSDP1 = "FullyShardedDataParallel"


def convert_module(module: nn.Module) -> nn.Module:
    """Turn a model that torch.distributed.tensor.parallel or FSDP2 has sharded into one of dtensor, in place.

    Parameters, buffers and gradients become DTensors that share the memory of torch's; parameters that modules share
    stay shared. The hooks that torch's styles have put on modules go on working: they are given torch's DTensors, and
    what they give is turned back. FSDP2 is taken off, and `dtensor.parallel.fully_shard` is what the modules have
    instead, over the same mesh and dimensions, with the same mixed precision, resharding and shared units. Plain
    parameters and everything else stay as they are. Make optimizers afterwards: one made before holds the old
    parameters.

    Returns:
        `module`.

    Raises:
        PlacementError: a parameter has a placement that dtensor does not know.
        MeshError: FSDP2 and a style have used meshes that are no slices of one.
        NotImplementedError: a module is sharded by FSDP1 or `replicate`, offloaded, or has torch's `input_reshard`.
        ValueError: `module` is a part of what one call of FSDP2 has sharded, or FSDP2 holds unreduced gradients.

        Nothing is changed then.
    """
    for name, found in module.named_modules():
        _check(found, name)
    units = fsdp2_units(module)
    sharded = {id(p.parameter) for unit in units for p in unit.parameters}
    made: dict[int, Any] = {}
    for found in module.modules():
        for x in [*found._parameters.values(), *found._buffers.values()]:
            if is_torch_dtensor(x) and id(x) not in made and id(x) not in sharded:
                made[id(x)] = _converted(x)
    taken = taken_over(units)
    remove_fsdp2(module)
    take_over(units, taken)
    for found in module.modules():
        for tensors in (found._parameters, found._buffers):
            tensors.update({name: made[id(x)] for name, x in tensors.items() if id(x) in made})
        for hooks in _hooks(found):
            hooks.update({key: _bridged(hook) for key, hook in hooks.items() if _home(hook).startswith(TORCH)})
    return module


def _check(module: nn.Module, name: str) -> None:
    if type(module).__name__ == FSDP1 and type(module).__module__.startswith("torch.distributed"):
        raise NotImplementedError(
            f"module {name!r} is a {FSDP1} (FSDP1), whose flat parameters hold no tensors to convert; convert the "
            "model before it is wrapped, and write dtensor.parallel.fully_shard, or dtensor.parallel.enable_fsdp1()"
        )
    if any(_home(hook).endswith(".input_reshard") for hooks in _hooks(module) for hook in hooks.values()):
        raise NotImplementedError(
            f"module {name!r} has torch's input_reshard, which knows only torch's DTensors; convert the model before, "
            "and write dtensor.parallel.input_reshard"
        )


def _converted(x: Any) -> Any:
    """A parameter or buffer of ours in place of torch's."""
    new = from_torch(x.detach())
    if isinstance(x, nn.Parameter):
        new = nn.Parameter(new, requires_grad=x.requires_grad)
    if is_torch_dtensor(x.grad):
        new.grad = from_torch(x.grad)
    return new


def _hooks(module: nn.Module) -> tuple[dict[int, Any], ...]:
    return module._forward_pre_hooks, module._forward_hooks


def _home(hook: Any) -> str:
    """The module that a hook was written in."""
    hook = getattr(hook, "func", hook)
    return getattr(hook, "__module__", None) or ""


def _bridged(hook: Any) -> Any:
    """A hook of torch's styles, which gets and gives torch's DTensors, among ours."""

    def bridged(module: Any, *given: Any) -> Any:
        return tree_map(as_ours, hook(module, *tree_map(as_torchs, given)))

    return bridged


__all__ = ["convert_module", "from_torch", "is_torch_dtensor", "to_torch"]
