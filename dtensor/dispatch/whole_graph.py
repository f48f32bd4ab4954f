"""Layouts that were decided for a whole program at once, and how its operators follow them one by one.

    record the program's operators -> decide all layouts together (`dtensor.parallel.decisions`) -> follow them

A program that is recorded hands its operators to a `Recorder`, which makes results of the right shapes and computes
nothing. When it runs, or is traced, each operator takes the layouts of the recorded one that it is: the same operator,
next in order. Where a program is not what was recorded, operators choose their own layouts again.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..mesh.provenance import look_up_each
from ..program import environment
from ..rules import State
from ..torch_private.core import OpOverload, real_object, tree_leaves

TRANSPARENT = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)
"""Operators that are neither recorded nor followed: their result is where their operand is. A trace has more of them
than the program, wherever a tensor is saved."""

AHEAD = 64
"""How many recorded operators may be left out where a program runs fewer than were recorded."""


@dataclass(frozen=True, eq=False)
class OperatorLayouts:
    """The layouts decided for one operator of a program.

    Attributes:
        func: the operator.
        dims: number of dims of each operand.
        inputs: for each operand the state in which it is taken; None for any.
        outputs: for each result the state in which it is made; None where it is no tensor.
    """

    func: OpOverload
    dims: tuple[int, ...]
    inputs: tuple[State | None, ...]
    outputs: tuple[State | None, ...]


class Recorder(Protocol):
    """What is given the operators of a program in place of running them."""

    def run(self, decision: Any, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a call returns; `decision` says how it would run if it chose for itself."""
        ...


class Following:
    """A program's place in its decisions.

    Args:
        decided: the layouts of its operators, in the order in which they were recorded.
        mesh: the mesh on which they run; operators on others are not looked for.

    Attributes:
        at: index of the next operator.
        missed: operators of the program that were not recorded there.
    """

    def __init__(self, decided: Sequence[OperatorLayouts], mesh: Any) -> None:
        self.decided: Sequence[OperatorLayouts] = decided
        self.mesh: Any = mesh
        self.at: int = 0
        self.missed: list[str] = []
        self._found: int | None = None

    def restart(self) -> None:
        """The program runs from its beginning."""
        self.at, self.missed = 0, []

    def find(self, func: OpOverload, given: Any, mesh: Any) -> OperatorLayouts | None:
        """The layouts of the recorded operator that a call is; None if it is none of the next ones."""
        self._found = None
        dims: tuple[int, ...] | None = None
        if func in TRANSPARENT:
            return None
        for k in range(self.at, min(self.at + AHEAD, len(self.decided))):
            layouts = self.decided[k]
            if layouts.func is func and real_object(mesh) is self.mesh:
                dims = dims or tuple([x.dim() for x in tree_leaves(given) if isinstance(x, torch.Tensor)])
                if layouts.dims == dims:
                    self._found = k
                    return layouts
        return None

    def take(self, func: OpOverload) -> None:
        """The call that was looked for last runs as one operator."""
        if func in TRANSPARENT:
            return
        if self._found is None:
            self.missed.append(str(func))
        else:
            self.at = self._found + 1


@dataclass(frozen=True)
class Told:
    """What is said of decisions.

    Attributes:
        operators: for how many operators layouts were decided.
        seconds: that a step takes with them, as the model of cost has it.
        bound: no other layouts take fewer seconds under that model.
        missed: how many operators of the trace were not recorded, and chose for themselves.
        why: why nothing was decided; "" if something was.
    """

    operators: int = 0
    seconds: float = 0.0
    bound: float = 0.0
    missed: int = 0
    why: str = ""

    @property
    def gap(self) -> float:
        """How far they are at most from the best, as a fraction of the seconds."""
        return max(0.0, 1 - self.bound / self.seconds) if self.seconds else 0.0


class _Now(threading.local):
    following: Following | None = None
    recorder: Recorder | None = None
    told: Told | None = None


now: _Now = _Now()
"""The decisions that operators of this thread follow, the recorder that is given them instead, and what is said of the
decisions of the graph that this thread traced last; None where nothing was to be decided."""


_asked: ContextVar[bool | None] = ContextVar("dtensor_decide", default=None)


@contextmanager
def deciding(wanted: bool) -> Iterator[None]:
    """Context of a compilation whose options say whether layouts are decided for whole graphs."""
    token = _asked.set(wanted)
    try:
        yield
    finally:
        _asked.reset(token)


def is_deciding() -> bool:
    """Whether layouts are decided for the graph that is compiled now: by its options, or else by the environment.

    Raises:
        ValueError: the variable is neither 0 nor 1.
    """
    asked = _asked.get()
    return environment.switched("decide", True) if asked is None else asked


@contextmanager
def _with(name: str, value: Any) -> Iterator[None]:
    before = getattr(now, name)
    setattr(now, name, value)
    look_up_each(1)
    try:
        yield
    finally:
        look_up_each(-1)
        setattr(now, name, before)


def followed(following: Following) -> AbstractContextManager[None]:
    """Context in which the operators of this thread follow decisions."""
    return _with("following", following)


def recorded(recorder: Recorder) -> AbstractContextManager[None]:
    """Context in which the operators of this thread are handed to a recorder."""
    return _with("recorder", recorder)


__all__ = ["TRANSPARENT", "Following", "OperatorLayouts", "Recorder", "Told", "deciding", "followed", "is_deciding"]
__all__ += ["now", "recorded"]
