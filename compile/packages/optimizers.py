"""The optimizers of a compiled step: what their state was when Dynamo had traced it, and that of others made so.

An optimizer initializes its state at the first step. Dynamo does so before it makes guards, so that these ask for a
state that an optimizer which takes its first step from a package does not have yet.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dtensor.torch_private.frame_data import evaluate
from dtensor.torch_private.training.optimizers import Call, initialize

from .refusals import place


@dataclass(frozen=True)
class Stepped:
    """An optimizer that a frame refers to.

    Attributes:
        expression: what stands for it in the frame, as Dynamo writes it.
        kind: its class.
        calls: how Dynamo initialized its state.
        state: what its state was then, a line for each parameter.
    """

    expression: str
    kind: str
    calls: tuple[Call, ...]
    state: tuple[str, ...]


def stepped(found: Mapping[str, tuple[torch.optim.Optimizer, Sequence[Call]]]) -> tuple[Stepped, ...]:
    """Describe the optimizers that Dynamo initialized: expression -> optimizer, and calls of `_init_group`."""
    return tuple([Stepped(e, _kind(o), tuple(calls), tuple(_state(o))) for e, (o, calls) in found.items()])


def initialized(wanted: Sequence[Stepped], frame_locals: Any, frame_globals: dict[str, Any]) -> str:
    """Initialize the optimizers of a frame as Dynamo would, were it to compile that frame.

    Returns:
        The first that is missing, or of another kind or state than when the frame was compiled, in words; "" if none.
    """
    for one in wanted:
        try:
            optimizer = evaluate(one.expression, frame_locals, frame_globals)
        except Exception as error:  # whatever the user's objects raise
            return f"the optimizer {place(one.expression, frame_locals)} does not exist here: {error}"
        if not isinstance(optimizer, torch.optim.Optimizer) or _kind(optimizer) != one.kind:
            return f"{place(one.expression, frame_locals)} was the optimizer {one.kind}, and is {_kind(optimizer)}"
        try:
            initialize(optimizer, one.calls)
        except Exception as error:  # whatever the optimizer raises, as it does without a package
            return f"the state of the optimizer, {place(one.expression, frame_locals)}, cannot be initialized: {error}"
        if difference := _difference(one.state, tuple(_state(optimizer))):
            return f"the state of the optimizer, {place(one.expression, frame_locals)}, was {difference}"
    return ""


def _kind(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _state(optimizer: torch.optim.Optimizer) -> Iterator[str]:
    """What the state holds: for each parameter in the order of the state its number, and names with types.

    Guards hold what the compiled code reads of it; Dynamo takes for granted that parameters of a group have a state of
    the same form.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = {id(p): k for k, p in enumerate(parameters)}
    for key, state in optimizer.state.items():
        items = state.items() if isinstance(state, dict) else [("", state)]
        said = ", ".join([f"{name} {_form(value)}".strip() for name, value in items])
        yield f"of parameter {numbers.get(id(key), 'unknown')}: {said or 'empty'}"


def _form(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{type(value).__name__} {value.dtype}"
    return repr(value) if isinstance(value, (bool, int, float, str, type(None))) else _kind(value)


def _difference(before: Sequence[str], now: Sequence[str]) -> str:
    for one, other in zip(before, now):
        if one != other:
            return f"{one}, and is {other}"
    return "" if len(before) == len(now) else f"that of {len(before)} parameters, and is that of {len(now)}"


__all__ = ["Stepped", "initialized", "stepped"]
