"""Parameters that a module was given after it was fully sharded, such as adapters: no unit averages their gradients.

Each rank would train its own copy of them, on its part of the batch. So the first step of an optimizer that holds one
raises.
"""

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim import Optimizer

from ...errors import ShardingError
from ...mesh.mesh import facts
from ...tensor.tensor import DTensor
from ..modules.replaced import checks
from .unit import MEMBER, Member

LEFT = "_dtensor_left"
"""The attribute of a parameter that was there when its module was fully sharded, and was left as it was."""

_sharded: WeakKeyDictionary[nn.Module, None] = WeakKeyDictionary()
"""The modules given to `fully_shard`, in this order, which is the same on all ranks."""


def remember(model: nn.Module) -> None:
    """Remember which parameters a model has that is fully sharded now."""
    for part in model.modules():
        for _, parameter in _not_averaged(part):
            vars(parameter)[LEFT] = True
    _sharded[model] = None


def _not_averaged(part: nn.Module) -> list[tuple[str, torch.Tensor]]:
    how = vars(part)[MEMBER].how if MEMBER in vars(part) else {}
    return [(name, p) for name, p in part._parameters.items() if p is not None and name not in how]


def _refuse_added(optimizer: Optimizer) -> None:
    """Refuse an optimizer that holds a parameter whose gradient is that of this rank's part of the batch.

    Raises:
        ShardingError: as it says; raised on all ranks.
    """
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for model in reversed(list(_sharded)):
        member: Member = vars(model)[MEMBER]
        if not member.unit.local or member.unit.mesh.size() == 1:
            continue
        for prefix, part in model.named_modules():
            for name, parameter in _not_averaged(part):
                if id(parameter) in held and LEFT not in vars(parameter) and not _lies_on(parameter, member.unit.mesh):
                    kind = type(model).__name__.removeprefix("FSDP")
                    raise ShardingError(
                        f"{prefix}.{name} was added to {kind} after fully_shard, which does not average its gradient: "
                        "each rank would train its own copy; add adapters and other parameters first and call "
                        "fully_shard then, or call fully_shard on the modules that were added, too"
                    )


def _lies_on(parameter: torch.Tensor, mesh: Any) -> bool:
    if not isinstance(parameter, DTensor):
        return False
    of, own = facts(mesh), facts(parameter.device_mesh).groups.values()
    return all(of.groups[(axis,)] in own for axis in range(mesh.ndim))


checks.append(_refuse_added)

__all__ = ["remember"]
