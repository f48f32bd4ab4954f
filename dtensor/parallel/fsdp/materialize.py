"""Materialising: a model built and sharded on the meta device gets memory for its shards, and its initial values.

No rank ever holds a whole parameter: each draws the numbers of the global tensor and keeps its own (`dtensor.random`),
so that the values are those of one device with the same seed.
"""

import torch
from torch import nn

from ...comm.from_plain import check_module
from ...tensor.tensor import DTensor


def materialize(module: nn.Module, device: torch.device | str | None = None) -> nn.Module:
    """Put `module`, in place, from the meta device on a real one, and initialise it.

    Every module inside that has parameters or buffers of its own has its `reset_parameters()` called, in the order of
    `module.modules()`. All ranks call this with generators in one state. The same call on the plain module, on one
    device with that seed, gives the same values.

    Args:
        module: the module; plain or sharded.
        device: where to; by default that of the parameters' mesh, and the CPU without one.

    Returns:
        `module`.

    Raises:
        TypeError: `module` is none, or has modules with parameters or buffers that have no `reset_parameters`.
    """
    check_module("materialize", module)
    parts = {name: part for name, part in module.named_modules() if part._parameters or part._buffers}
    mute = [f"{name or 'the module itself'} ({type(part).__name__})" for name, part in parts.items() if not _can(part)]
    if mute:
        raise TypeError(
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
