"""Keeps shared parameters shared when they are replaced, such as an embedding table and the head tied to it."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ...errors import PlacementError

DISTRIBUTED_AS = "_dtensor_distributed_as"
"""The attribute of a plain parameter that holds the parameter that replaced it, for modules that share it."""


class Ties:
    """The parameters that are shared by several modules of a model.

    Attributes:
        shared: pairs of such a parameter and a list of (module that holds it, name of the parameter there).
    """

    def __init__(self, model: nn.Module) -> None:
        holders: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
        for module, name, parameter in _held(model):
            holders.setdefault(parameter, []).append((module, name))
        self.shared: list[tuple[nn.Parameter, list[tuple[nn.Module, str]]]] = [
            (parameter, found) for parameter, found in holders.items() if len(found) > 1
        ]

    def restore(self) -> None:
        """Put the replacement of a shared parameter in one module into all modules that hold it.

        Raises:
            PlacementError: the modules now have it in different placements.
        """
        for parameter, holders in self.shared:
            now: list[Any] = [module._parameters[name] for module, name in holders]
            new = [x for x in now if x is not parameter and x is not None]
            for x in new[1:]:
                if (x.placements, x.device_mesh) != (new[0].placements, new[0].device_mesh):
                    raise shared_otherwise(parameter, new[0], x.placements, x.device_mesh)
            for (module, name), x in zip(holders, now):
                if new and x is not None and x is not new[0]:
                    module.register_parameter(name, new[0])


def _held(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield module, name, parameter


def shared_otherwise(
    parameter: torch.Tensor, before: Any, placements: Sequence[Any], mesh: DeviceMesh
) -> PlacementError:
    """The error for a shared parameter that another module already has as `before`, in other placements."""
    return PlacementError(
        f"a parameter of shape {list(parameter.shape)} is shared by several modules: one already has it placed as "
        f"{list(before.placements)} on {before.device_mesh}, but another needs it as {list(placements)} on "
        f"{mesh}; use the same placements in both (RowwiseParallel shards an nn.Embedding the way ColwiseParallel "
        "shards the nn.Linear tied to it)"
    )


__all__ = ["DISTRIBUTED_AS", "Ties", "shared_otherwise"]
