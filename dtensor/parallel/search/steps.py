"""Steps and tensors: what repeats in a tape counts once.

Operators and values of layers that are alike are one step, and one tensor. A plan treats them in the same way.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from ...rules import is_in_place
from ...torch_private.core import OpOverload
from .tape import BORDER, CONSTANT, INPUT, Op, Tape, Value

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)")


def pattern(name: str) -> str:
    """The name of a module or parameter with `*` for the numbers in it."""
    return _NUMBER.sub("*", name)


@dataclass(eq=False)
class Tensor:
    """Values that are alike.

    Attributes:
        like: one of them.
        kind: as of a `Value`.
        name: of a parameter, buffer or input, as a pattern.
        count: how many there are.
        step, index: what makes them, as which output; None for parameters, buffers and inputs.
        users: (step, operand) that take them, and how many times.
        saved: how many of them stay until the backward.
    """

    like: Value
    kind: str
    name: str
    count: int = 0
    step: "Step | None" = field(default=None, repr=False)
    index: int = 0
    users: Counter[tuple["Step", int]] = field(default_factory=Counter[tuple["Step", int]], repr=False)
    saved: int = 0

    @property
    def plain(self) -> bool:
        """Whether code of the model makes it from nothing that is distributed, so that all ranks hold it."""
        return self.kind == CONSTANT


@dataclass(eq=False)
class Step:
    """Operators that are alike.

    Attributes:
        like: one of them.
        count: how many there are.
        sources: for each operand the tensors that it is, and how many times each.
        outputs: what they make.
        moved: for each operand and then each output, the bytes that one moves as its share of kernels.
        launches: its share of their number.
        flops: floating-point operations of one.
    """

    like: Op
    count: int
    sources: list[Counter[Tensor]] = field(repr=False)
    outputs: list[Tensor | None] = field(repr=False)
    moved: tuple[Sequence[float], Sequence[float]] = ((), ())
    launches: float = 0.0
    flops: float = 0.0

    @property
    def name(self) -> str:
        """Name of the operator, with its overload."""
        return str(self.like.func)

    @property
    def backward(self) -> bool:
        """Whether it runs in the backward."""
        return self.like.backward

    @property
    def border(self) -> bool:
        """Whether it is no operator: a place at which an activation may change its layout."""
        return self.like.func == BORDER

    @property
    def plain(self) -> bool:
        """Whether it runs on plain tensors only, the same on all ranks."""
        return all(v is None or v.plain for v in self.outputs) and not self.border

    @property
    def in_place(self) -> bool:
        """Whether the operator writes to an argument."""
        return isinstance(self.like.func, OpOverload) and is_in_place(self.like.func)


@dataclass
class Steps:
    """A tape in which what repeats counts once.

    Attributes:
        tape: the tape.
        steps: in the order in which each is first met.
        tensors: likewise.
        of: operator -> its step.
        which: value -> its tensor.
        gradients: (tensor of gradients, tensor of parameters) -> how many.
        last: memory -> the index of the last operator that needs it; not of parameters, inputs and gradients.
        ahead: parameters, and what is a view or a cast of one; their moves need wait for nothing.
        late: gradients, and what only becomes one by views and casts; nothing in the backward waits for their moves.
        decided: border -> the one that stands for all at which a plan says the same: those of the same modules, be it
            in another call of them, for gradients that come back, or where the backward runs a forward again.
        places: each of these -> the names of its modules.
        first: step of a forward that the backward runs again -> the same step of the forward, with the same choices.
        reread: parameters of which the backward reads views, so that it gathers them again; not vectors.
        held: the last of those that the forward reads, if the backward reads them first; it finds them gathered.
        in_passing: what the backward reads only to compute gradients of parameters, for which nothing else waits.
    """

    tape: Tape
    steps: list[Step] = field(default_factory=list[Step])
    tensors: list[Tensor] = field(default_factory=list[Tensor])
    of: dict[Op, Step] = field(default_factory=dict[Op, Step])
    which: dict[Value, Tensor] = field(default_factory=dict[Value, Tensor])
    gradients: Counter[tuple[Tensor, Tensor]] = field(default_factory=Counter[tuple[Tensor, Tensor]])
    last: dict[int, int] = field(default_factory=dict[int, int])
    ahead: set[Tensor] = field(default_factory=set[Tensor])
    late: set[Tensor] = field(default_factory=set[Tensor])
    reread: set[Tensor] = field(default_factory=set[Tensor])
    held: set[Value] = field(default_factory=set[Value])
    in_passing: set[Tensor] = field(default_factory=set[Tensor])
    decided: dict[Step, Step] = field(default_factory=dict[Step, Step])
    places: dict[Step, list[str]] = field(default_factory=dict[Step, list[str]])
    first: dict[Step, Step] = field(default_factory=dict[Step, Step])

    def beside(self, t: Tensor, backward: bool) -> bool:
        """Whether nothing waits for moves of a tensor to where the forward or the backward reads it."""
        return t in self.ahead or t in self.late or (backward and t in self.in_passing)

    def of_kind(self, kind: str) -> list[Tensor]:
        """The tensors of a kind, such as parameters."""
        return [t for t in self.tensors if t.kind == kind]

    def batch(self) -> list[Tensor]:
        """The inputs that hold the batch: the first that has dims, and others of its length."""
        inputs = [t for t in self.of_kind(INPUT) if t.like.ndim]
        return [t for t in inputs if t.like.shape[0] == inputs[0].like.shape[0]]


def is_free(step: Step) -> bool:
    """Whether it only hands memory on."""
    func = step.like.func
    return func == BORDER or func.is_view or func._schema.name in ("aten::_unsafe_view", "aten::detach")


__all__ = ["Step", "Steps", "Tensor", "is_free", "pattern"]
