"""What `fully_shard` leaves on modules: the unit that several have in common, and what each is in it.

`sharded_module` reads it when a parameter is read, `accumulation` when backwards begin or end to reduce.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from .mixed_precision import MixedPrecisionPolicy
from .unshard import Unshard

MEMBER = "_fully_sharded"
"""The attribute of a module under which its `Member` lies."""


@dataclass(eq=False)
class Unit:
    """What the modules of one `fully_shard` have in common.

    Attributes:
        mesh: the data mesh.
        policy: of mixed precision.
        keep: whether what the forward gathers is kept for the backward.
        local: whether activations are this rank's part of the batch, rather than DTensors over the data mesh.
        reduce: over which axes a backward reduces gradients, as in `unsharded`.
        wanted: over which it is asked to; it is not done while something is accumulated that has to be reduced with it.
        running: how many forwards of the unit's modules are running; a compiled one is not counted.
    """

    mesh: Any
    policy: MixedPrecisionPolicy
    keep: bool
    local: bool
    reduce: str = "all"
    wanted: str = "all"
    running: int = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> "Unit":
        made = memo[id(self)] = Unit(*self._copied())
        return made

    def __reduce__(self) -> Any:
        return Unit, self._copied()

    def _copied(self) -> tuple[Any, ...]:
        # A copy has no gradients.
        return self.mesh, self.policy, self.keep, self.local, self.wanted, self.wanted


@dataclass(eq=False)
class Member:
    """One module of a unit: how each parameter is unsharded, and whether the module was given to `fully_shard`."""

    unit: Unit
    how: dict[str, Unshard] = field(default_factory=dict)
    given: bool = False


def members(module: nn.Module) -> Iterator[tuple[nn.Module, Member]]:
    """The fully sharded modules in `module`, itself included."""
    for found in module.modules():
        member = vars(found).get(MEMBER)
        if member is not None:
            yield found, member


__all__ = ["MEMBER", "Member", "Unit", "members"]
