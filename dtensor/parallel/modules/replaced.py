"""Lets optimizers follow parameters that sharding has replaced, and state dicts and methods of models know of it.

A parameter cannot become a tensor of another class, so sharding puts a new one in its place. An optimizer made before
still holds the old one, which no forward uses any more. `following` records what a call replaces; before the next step
of an optimizer, its parameter groups get the new parameters. State for an old parameter (moments) has no shards: the
optimizer raises. The modules then take whole tensors in `load_state_dict` (`plain_states`), and models have methods
that work on shards (`model_methods`).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ...errors import ShardingError
from ...torch_private.core import never_traced
from ...torch_private.dynamo import before_optimizers_are_traced
from .model_methods import teach_methods
from .plain_states import check_values, read_left, take_plain_states

REPLACED_BY = "_dtensor_replaced_by"
"""The attribute of a replaced parameter that holds the parameter that modules have in its place."""

AFTER = (
    "make the optimizer after sharding (fully_shard, parallelize_module, distribute_model or convert_module), from "
    "model.parameters()"
)
"""What an optimizer that holds replaced parameters is told."""


@contextmanager
def following(module: nn.Module, *others: nn.Module) -> Iterator[None]:
    """Record which parameters of modules are replaced inside the block, for the optimizers that hold them."""
    parts = _parts(module, *others)
    check_values(parts)
    before = _parameters(module, *others)
    yield
    read_left(parts)
    for part in parts:
        take_plain_states(part)
        teach_methods(part)
    after = _parameters(module, *others)
    replaced = False
    for place, old in before.items():
        new = after.get(place)
        if new is not None and new is not old:
            vars(old)[REPLACED_BY] = new
            replaced = True
    if replaced:
        _changes.count += 1
        if not _hooked:
            _hooked.append(register_optimizer_step_pre_hook(_before_step))
            before_optimizers_are_traced(follow)


def _parameters(*modules: nn.Module) -> dict[tuple[nn.Module, str], nn.Parameter]:
    return {(part, name): p for part in _parts(*modules) for name, p in part._parameters.items() if p is not None}


def _parts(*modules: nn.Module) -> list[nn.Module]:
    return list({part: None for module in modules for part in module.modules()})


class _Changes:
    """The number of calls so far that have replaced parameters."""

    count = 0


_changes = _Changes()
_hooked: list[Any] = []

checks: list[Callable[[Optimizer], None]] = []
"""What else is checked of an optimizer, before its first step after a model was sharded."""

_checked: WeakKeyDictionary[Optimizer, tuple[int, int]] = WeakKeyDictionary()
"""For each optimizer, the changes that its parameters have followed, and its number of groups then."""


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if not torch.compiler.is_compiling():  # there Dynamo has checked it
        follow(optimizer)


@never_traced
def follow(optimizer: Optimizer) -> None:
    """Put the parameters that replaced those of `optimizer` into its groups, as its next step does.

    Raises:
        ShardingError: the optimizer has state or a gradient for a replaced parameter, or also holds the new one; or it
            holds what `checks` refuse.
    """
    now = _changes.count, len(optimizer.param_groups)
    if _checked.get(optimizer) != now:
        _follow(optimizer)
        for check in checks:
            check(optimizer)
        _checked[optimizer] = now


def _follow(optimizer: Optimizer) -> None:
    groups = [group["params"] for group in optimizer.param_groups]
    held = {id(p) for group in groups for p in group}
    swaps = [(group, i, p, _newest(p)) for group in groups for i, p in enumerate(group) if REPLACED_BY in vars(p)]
    for _, _, old, new in swaps:
        name = f"a parameter of shape {list(old.shape)}, which sharding has replaced by a DTensor"
        if optimizer.state.get(old):
            raise ShardingError(
                f"this {type(optimizer).__name__} has state ({', '.join(map(str, optimizer.state[old]))}) for {name}, "
                f"and would go on with the old one; {AFTER}, and load its state into it "
                "(set_optimizer_state_dict, or a checkpoint)"
            )
        if old.grad is not None:
            raise ShardingError(
                f"this {type(optimizer).__name__} would step with the gradient of {name}: it was computed before, or by"
                f" a module that still uses the old one; call zero_grad() before sharding, and {AFTER}"
            )
        if id(new) in held:
            raise ShardingError(f"this {type(optimizer).__name__} holds {name}, and the new one too; {AFTER}")
    for group, i, old, new in swaps:
        optimizer.state.pop(old, None)
        group[i] = new


def _newest(parameter: Any) -> Any:
    while REPLACED_BY in vars(parameter):
        parameter = vars(parameter)[REPLACED_BY]
    return parameter


__all__ = ["checks", "follow", "following"]
