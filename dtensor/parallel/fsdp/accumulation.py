"""Gradient accumulation of fully sharded modules: several backwards accumulate unreduced gradients, reduced once.

While a unit does not reduce, its gradients are unsharded on each rank and partial (an average), and autograd adds them
up. When reduction is turned on again, the next backward still produces unreduced gradients, which autograd adds to the
accumulated ones. When that backward is complete, the sums are reduced: once for any number of backwards. So the
compiled graphs of all backwards of a cycle are the same, and parameters that the last one does not use are reduced too.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ...layout.layout import Layout
from ...tensor.tensor import DTensor
from ...torch_private.core import after_backward
from .unit import Member
from .unshard import Unshard


def set_reduced(found: Sequence[tuple[nn.Module, Member]], reduce: str) -> None:
    """Set how far backward reduces the gradients of these modules: "all", "scatter" or "none", as in `unsharded`."""
    units = {id(member.unit): member.unit for _, member in found}
    held = {id(member.unit) for module, member in found if any(_accumulated(module, member, reduce))}
    for key, unit in units.items():
        unit.wanted = reduce
        if key not in held:
            unit.reduce = reduce
    if held:
        Sums([(module, member) for module, member in found if id(member.unit) in held])


class Sums:
    """Reduces accumulated gradients at the end of the next backward that reaches one of these modules."""

    def __init__(self, found: Sequence[tuple[nn.Module, Member]]) -> None:
        self.found = found
        self.awaited: bool = False
        used = {id(p): p for module, _ in found for p in module._parameters.values() if p is not None}
        self.hooks: list[Any] = [
            p.register_post_accumulate_grad_hook(self._begun) for p in used.values() if p.requires_grad and p.is_leaf
        ]

    def _begun(self, parameter: torch.Tensor) -> None:
        if not self.awaited:
            self.awaited = True
            after_backward(self._reduce)

    def _reduce(self) -> None:
        for hook in self.hooks:
            hook.remove()
        for module, member in self.found:
            member.unit.reduce = member.unit.wanted
            for parameter, target in _accumulated(module, member, member.unit.wanted):
                # After backward(create_graph=True) a gradient has its own graph, which is kept.
                with torch.set_grad_enabled(parameter.grad.requires_grad):
                    parameter.grad = torch.ops.dtensor.redistribute(parameter.grad, target.text, False)


def _accumulated(module: nn.Module, member: Member, reduce: str) -> list[tuple[Any, Layout]]:
    """The parameters whose gradients are reduced less than `reduce` requires, and the layouts they would have."""
    found = []
    for name, how in member.how.items() if reduce != "none" else ():
        parameter: Any = module._parameters.get(name)
        if parameter is not None and isinstance(parameter.grad, DTensor):
            target = _target(how, reduce)
            if {axis for axis, _ in parameter.grad._spec.layout.partial} - {axis for axis, _ in target.partial}:
                found.append((parameter, target))
    return found


def _target(how: Unshard, reduce: str) -> Layout:
    return how.layout if reduce == "all" else how.scattered


__all__ = ["set_reduced"]
