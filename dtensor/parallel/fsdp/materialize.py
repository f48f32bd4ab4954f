"""Materialisation: allocates and initialises the shards of a model that was built and sharded on the meta device.

No rank ever holds a full parameter. Each draws the random numbers of the global tensor and keeps its shard
(`dtensor.random`), so that the values are those of one device with the same seed.
"""

import torch
from torch import nn

from ...comm.from_plain import check_module
from ...errors import ArgumentTypeError
from ...tensor.tensor import DTensor


def materialize(module: nn.Module, device: torch.device | str | None = None) -> nn.Module:
    """Moves `module`, in place, from the meta device to a real one, and initialises it.

    Calls `reset_parameters()` of every module inside that has its own parameters or buffers, in the order of
    `module.modules()`. All ranks must call this with their generators in the same state. The same call on the plain
    module, on one device with that seed, gives the same values.

    Args:
        module: the module, plain or sharded.
        device: the target device; None uses that of the parameters' mesh, or the CPU if no parameter is a DTensor.

    Returns:
        `module`.

    Raises:
        TypeError: `module` is not a module, or a module inside has parameters or buffers but no `reset_parameters`.
    """
    check_module("materialize", module)
    parts = {name: part for name, part in module.named_modules() if part._parameters or part._buffers}
    mute = [f"{name or 'the module itself'} ({type(part).__name__})" for name, part in parts.items() if not _can(part)]
    if mute:
        raise ArgumentTypeError(
            f"these modules have parameters or buffers but no reset_parameters(): {', '.join(mute)}; "
            "give their classes one, or write module.to_empty(device=...) and initialise them yourself"
        )
    module.to_empty(device=_device(module) if device is None else device)
    for part in parts.values():
        part.reset_parameters()  # pyright: ignore[reportCallIssue]
    return module


def _can(module: nn.Module) -> bool:
    return callable(getattr(module, "reset_parameters", None))


def _device(module: nn.Module) -> str:
    meshes = [p.device_mesh for p in module.parameters() if isinstance(p, DTensor)]
    return meshes[0].device_type if meshes else "cpu"


__all__ = ["materialize"]
