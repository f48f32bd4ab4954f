"""The state that `fully_shard` stores on modules: the unit that several modules share, and each module's entry in it.

`sharded_module` uses it when a parameter is read, `accumulation` when reduction in the backward is turned on or off.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from .mixed_precision import MixedPrecisionPolicy
from .unshard import Unshard

MEMBER = "_fully_sharded"
"""The attribute of a module that holds its `Member`."""


@dataclass(eq=False)
class Unit:
    """The settings shared by the modules of one `fully_shard` call.

    Attributes:
        mesh: the data mesh.
        policy: the mixed precision policy.
        keep: whether parameters gathered by the forward are kept for the backward.
        local: whether activations are this rank's part of the batch, rather than DTensors over the data mesh.
        reduce: over which axes the backward now reduces gradients, as in `unsharded`.
        wanted: over which axes it should reduce. This takes effect once accumulated gradients have been reduced too.
        running: the number of running forwards of the unit's modules; compiled ones are not counted.
        unsharded: whether parameters are read unsharded outside of forwards, too.
    """

    mesh: DeviceMesh
    policy: MixedPrecisionPolicy
    keep: bool
    local: bool
    reduce: str = "all"
    wanted: str = "all"
    running: int = 0
    unsharded: bool = False

    def __deepcopy__(self, memo: dict[int, Any]) -> "Unit":
        made = memo[id(self)] = Unit(*self._copied())
        return made

    def __reduce__(self) -> Any:
        return Unit, self._copied()

    def _copied(self) -> tuple[Any, ...]:
        # A copy has no accumulated gradients.
        return self.mesh, self.policy, self.keep, self.local, self.wanted, self.wanted


@dataclass(eq=False)
class Member:
    """A module's entry in a unit: how to unshard each parameter, and whether it was itself passed to `fully_shard`."""

    unit: Unit
    how: dict[str, Unshard] = field(default_factory=dict)
    given: bool = False


def members(module: nn.Module) -> Iterator[tuple[nn.Module, Member]]:
    """The fully sharded modules in `module`, including itself, each with its `Member`."""
    for found in module.modules():
        member = vars(found).get(MEMBER)
        if member is not None:
            yield found, member


__all__ = ["MEMBER", "Member", "Unit", "members"]
