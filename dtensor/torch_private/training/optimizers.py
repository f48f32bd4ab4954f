"""Private APIs of torch.optim by which an optimizer becomes what Dynamo makes of it while it traces a step.

Dynamo does not trace how an optimizer initializes its state: it calls `_init_group` itself, and the compiled code finds
the state in place. Where that code comes from elsewhere, the calls are repeated.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ..core import disable_current_modes  # first: it checks the version of torch

# isort: split
from torch._dynamo.variables.optimizer import OptimizerVariable
from torch.optim.optimizer import _global_optimizer_post_hooks, register_optimizer_step_post_hook

CAPTURABLE_STAYS = not hasattr(OptimizerVariable, "_safe_to_set_capturable")
"""Whether Dynamo leaves `capturable` set, as releases before 2.15 do."""


@dataclass(frozen=True)
class Group:
    """In place of a parameter group that is an argument, its number."""

    index: int


Call = tuple[tuple[Any, ...], tuple[tuple[str, Any], ...]]
"""Arguments of a call of `_init_group`, by position and by name."""


def noted_call(optimizer: torch.optim.Optimizer, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
    """Return the arguments of a call of `_init_group` in a form that does not refer to the optimizer."""

    def noted(value: Any) -> Any:
        if isinstance(value, dict):
            return next(Group(i) for i, group in enumerate(optimizer.param_groups) if group is value)
        return list(value) if isinstance(value, list) else value

    return tuple([noted(x) for x in args]), tuple([(name, noted(x)) for name, x in kwargs.items()])


def initialize(optimizer: Any, calls: Sequence[Call]) -> None:
    """Initialize the state of an optimizer as Dynamo does; what is initialized stays as it is.

    Raises:
        IndexError: it has fewer parameter groups than the calls name.
        Exception: whatever the optimizer's `_init_group` raises.
    """

    def given(value: Any) -> Any:
        if isinstance(value, Group):
            return optimizer.param_groups[value.index]
        return list(value) if isinstance(value, list) else value

    arguments = [([given(x) for x in args], {name: given(x) for name, x in kwargs}) for args, kwargs in calls]
    changed = [(g, g["capturable"]) for g in optimizer.param_groups if _becomes_capturable(optimizer, g)]
    with disable_current_modes():
        for parameter, state in optimizer.state.items():
            if "step" in state and state["step"].is_cpu:
                state["step"] = state["step"].to(parameter.device)
        for group, _ in changed:
            group["capturable"] = True
        try:
            for args, kwargs in arguments:
                optimizer._init_group(*args, **kwargs)
        finally:
            for group, own in changed:
                group["capturable"] = CAPTURABLE_STAYS or own


def _becomes_capturable(optimizer: Any, group: dict[str, Any]) -> bool:
    on_gpu = all(p.is_cuda or p.is_xpu for p in group["params"])
    return on_gpu and "capturable" in group and not any(p in optimizer.state for p in group["params"])


@contextmanager
def steps_noted() -> Iterator[list[torch.optim.Optimizer]]:
    """A context that collects the optimizers which take a step inside of it, each once."""
    found: list[torch.optim.Optimizer] = []

    def note(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if all(optimizer is not other for other in found):
            found.append(optimizer)

    handle = register_optimizer_step_post_hook(note)
    try:
        yield found
    finally:
        handle.remove()


@contextmanager
def hooks_apart(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[None]:
    """A context in which the optimizers' steps are traced: at its end it calls the hooks after a step that are not part
    of a graph, those of all optimizers and those that are `torch.compiler.disable`d."""
    untraced = [_taken_out(optimizer) for optimizer in optimizers]
    try:
        yield
    finally:
        for optimizer, own in zip(optimizers, untraced):
            if own:
                optimizer._optimizer_step_post_hooks.update(own)
    for optimizer, own in zip(optimizers, untraced):
        for hook in (*own.values(), *_global_optimizer_post_hooks.values()):
            hook(optimizer, (), {})


def _taken_out(optimizer: torch.optim.Optimizer) -> dict[int, Any]:
    hooks = optimizer._optimizer_step_post_hooks
    return {key: hooks.pop(key) for key, hook in [*hooks.items()] if getattr(hook, "_torchdynamo_disable", False)}


__all__ = ["Call", "Group", "hooks_apart", "initialize", "noted_call", "steps_noted"]
