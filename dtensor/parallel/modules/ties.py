"""Parameters that several modules hold stay one when they are replaced: a table and the head that is tied to it."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ...errors import PlacementError

DISTRIBUTED_AS = "_dtensor_distributed_as"
"""The attribute of a plain parameter under which that lies which has taken its place, for modules that share it."""


class Ties:
    """The parameters that several modules of a model hold.

    Attributes:
        shared: each of them, and the modules that hold it, with its name there.
    """

    def __init__(self, model: nn.Module) -> None:
        holders: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
        for module, name, parameter in _held(model):
            holders.setdefault(parameter, []).append((module, name))
        self.shared: list[tuple[nn.Parameter, list[tuple[nn.Module, str]]]] = [
            (parameter, found) for parameter, found in holders.items() if len(found) > 1
        ]

    def restore(self) -> None:
        """Have what took the place of a parameter in one module take it in all of them.

        Raises:
            PlacementError: modules have it in different placements now.
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


def shared_otherwise(parameter: torch.Tensor, before: Any, placements: Sequence[Any], mesh: Any) -> PlacementError:
    """The error for a module that is to have a parameter in other placements than another has it, `before`."""
    return PlacementError(
        f"a parameter of shape {list(parameter.shape)} is shared by several modules, of which one has it placed as "
        f"{list(before.placements)} on {before.device_mesh}, and this one is to have it as {list(placements)} on "
        f"{mesh}; give both the same (RowwiseParallel shards an nn.Embedding as ColwiseParallel shards the "
        "nn.Linear tied to it)"
    )


__all__ = ["DISTRIBUTED_AS", "Ties", "shared_otherwise"]
