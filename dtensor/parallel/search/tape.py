"""A training step of a model that is not sharded, as the operators that sharding rules see.

It is what `dispatch` would get, in order, with global sizes. Each operator knows the module in whose forward it ran; an
operator of the backward, the module of the operator that it differentiates. At the borders of modules the tape holds
an operator of its own, `BORDER`, that hands a tensor on: there a plan may change layouts.
"""

from dataclasses import dataclass, field
from typing import Any

import torch

from ...rules import Output

BORDER = "border"
"""In place of an operator: hands a tensor on at the border of a module."""

PARAMETER, BUFFER, INPUT, CONSTANT, MADE = "parameter", "buffer", "input", "constant", "made"
"""What a value is."""


@dataclass(eq=False)
class Value:
    """A tensor of the step.

    Attributes:
        kind: one of the constants above. CONSTANT: made by code of the model from nothing that is distributed.
        name: of a parameter, buffer or input.
        shape, stride, dtype: of the whole tensor.
        storage: identifies its memory; views share it.
        maker, index: the operator that made it, as which output; None for parameters, buffers and inputs.
    """

    kind: str
    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    storage: int
    maker: "Op | None" = field(default=None, repr=False)
    index: int = 0

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.shape)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return torch.Size(self.shape).numel()

    @property
    def bytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.numel * self.dtype.itemsize


@dataclass(eq=False)
class Op:
    """A call of an operator.

    Attributes:
        func: the operator, or BORDER.
        args, kwargs: its arguments, with a `Value` for each tensor.
        operands: the tensors among them, in order.
        outputs: what it returns, None where that is no tensor.
        many: whether it returns a tuple or list.
        path: name of the module in whose forward it ran.
        backward: whether it is part of the backward.
        what: for a border, "input" or "output": of the module at `path`.
        forward: for a border of the backward, the border that it differentiates.
        again: whether it is of a forward that the backward runs again.
    """

    func: Any
    args: tuple[Any, ...] = field(repr=False)
    kwargs: dict[str, Any] = field(repr=False)
    operands: list[Value]
    outputs: list[Value | None]
    many: bool
    path: str
    backward: bool
    what: str = ""
    forward: "Op | None" = field(default=None, repr=False)
    again: bool = False

    @property
    def described(self) -> tuple[Output | None, ...]:
        """The outputs as rules take them."""
        return tuple([None if v is None else Output(v.shape, v.stride, v.dtype) for v in self.outputs])


@dataclass
class Tape:
    """A recorded step.

    Attributes:
        ops: in order.
        values: parameters, buffers and inputs, in order, by kind and name.
        gradients: name of a parameter -> its gradient; empty if only the forward was recorded.
        ties: other names of a parameter or buffer -> the name that `values` has for it.
        results: what the model returns.
        loss: what the backward started from, or None.
    """

    ops: list[Op] = field(default_factory=list[Op])
    values: dict[tuple[str, str], Value] = field(default_factory=dict[tuple[str, str], Value])
    gradients: dict[str, Value] = field(default_factory=dict[str, Value])
    ties: dict[str, str] = field(default_factory=dict[str, str])
    results: list[Value] = field(default_factory=list[Value])
    loss: Value | None = None

    def of_kind(self, kind: str) -> dict[str, Value]:
        """The values of a kind, by name."""
        return {name: v for (k, name), v in self.values.items() if k == kind}


__all__ = ["BORDER", "BUFFER", "CONSTANT", "INPUT", "MADE", "PARAMETER", "Op", "Tape", "Value"]
