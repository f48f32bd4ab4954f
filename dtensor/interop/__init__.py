"""Other libraries: models of torch.distributed.tensor and FSDP2, and training loops that were written for one device.

`accelerate`, `transformers` and `lightning` have the classes that take the place of those of the packages of these
names, for models that are sharded. They are imported by name only, and import dtensor imports none of the packages.
`batches` says who reads which part of a batch.

Models of torch.distributed.tensor and FSDP2 are converted to dtensor, and tensors in both directions.

Nothing is copied or communicated. FSDP2 is removed from modules, because `fully_shard` replaces it. The hooks of
torch's tensor parallel styles are kept and continue to receive torch's DTensors. The conversion of tensors is in
`dtensor.tensor.torch_dtensor`.
"""

from typing import Any

from torch import nn

from ..errors import UnsupportedError
from ..parallel.fsdp.torch_fsdp2 import take_over, taken_over
from ..parallel.modules.replaced import following
from ..tensor.torch_dtensor import TORCH, as_ours, as_torchs, from_torch, is_torch_dtensor, to_torch
from ..torch_private.core import tree_map
from ..torch_private.fsdp import fsdp2_units, remove_fsdp2
from .batches import batch_parts

FSDP1 = "FullyShardedDataParallel"


def convert_module(module: nn.Module) -> nn.Module:
    """Converts a model that torch.distributed.tensor.parallel or FSDP2 has sharded to dtensor, in place.

    Parameters, buffers and gradients become DTensors that share the memory of torch's; shared parameters stay shared.
    The hooks that torch's styles have installed continue to work: they receive torch's DTensors, and their results are
    converted back. FSDP2 is replaced by `dtensor.parallel.fully_shard`, over the same mesh and dims, with the same
    mixed precision, resharding and shared units. Plain parameters and everything else are unchanged. If the conversion
    raises, nothing is changed. An optimizer made before gets the new parameters with its next step, unless it has state
    for the old ones: that step raises. Create optimizers afterwards.

    Args:
        module: the model.

    Returns:
        `module`.

    Raises:
        PlacementError: a parameter has a placement that dtensor does not support.
        MeshError: FSDP2 and a style were applied over meshes that are not slices of one mesh.
        NotImplementedError: a module is sharded by FSDP1 or `replicate`, offloaded, or has torch's `input_reshard`.
        ValueError: `module` is only a part of what one FSDP2 call has sharded, separate calls have untied a shared
            parameter, or FSDP2 holds unreduced gradients.
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
    with following(module):
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
        raise UnsupportedError(
            f"module {name!r} is a {FSDP1} (FSDP1), whose flat parameters hold no tensors to convert; convert the "
            "model before it is wrapped, and write dtensor.parallel.fully_shard, or dtensor.parallel.enable_fsdp1()"
        )
    if any(_home(hook).endswith(".input_reshard") for hooks in _hooks(module) for hook in hooks.values()):
        raise UnsupportedError(
            f"module {name!r} has torch's input_reshard, which supports only torch's DTensors; convert the model "
            "before applying it, and write dtensor.parallel.input_reshard"
        )


def _converted(x: Any) -> Any:
    """The DTensor parameter or buffer that replaces one of torch's, with its gradient."""
    new = from_torch(x.detach())
    if isinstance(x, nn.Parameter):
        new = nn.Parameter(new, requires_grad=x.requires_grad)
    if is_torch_dtensor(x.grad):
        new.grad = from_torch(x.grad)
    return new


def _hooks(module: nn.Module) -> tuple[dict[int, Any], ...]:
    return module._forward_pre_hooks, module._forward_hooks


def _home(hook: Any) -> str:
    """The name of the Python module that defines a hook."""
    hook = getattr(hook, "func", hook)
    return getattr(hook, "__module__", None) or ""


def _bridged(hook: Any) -> Any:
    """A hook of torch's styles, with DTensors converted to torch's before it and back after it."""

    def bridged(module: Any, *given: Any) -> Any:
        return tree_map(as_ours, hook(module, *tree_map(as_torchs, given)))

    return bridged


__all__ = ["batch_parts", "convert_module", "from_torch", "is_torch_dtensor", "to_torch"]
