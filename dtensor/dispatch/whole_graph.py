"""Layouts that were decided for a whole program at once, and how its operators follow them one by one.

    record the program's operators -> decide all layouts together (`dtensor.parallel.decisions`) -> follow them

A program that is recorded hands its operators to a `Recorder`, which makes results of the right shapes and computes
nothing. When it runs, or is traced, each operator takes the layouts of the recorded one that it is: the same operator,
next in order. Where a program is not what was recorded, operators choose their own layouts again.
"""

import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ..mesh.provenance import look_up_each
from ..program import environment
from ..rules import State
from ..torch_private.core import (
    OpOverload,
    after_backward,
    backward_number,
    backward_run,
    forward_number,
    real_object,
    tree_leaves,
)

TRANSPARENT = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)
"""Operators that are neither recorded nor followed: their result is where their operand is. A trace has more of them
than the program, wherever a tensor is saved."""

ALIASING = (torch.ops.aten._unsafe_view.default, torch.ops.aten._reshape_alias.default)
"""Operators that are no views by their schema, and whose result is the memory of their operand."""

OF_TRACES = (torch.ops.aten.copy_.default, torch.ops.aten.clone.default)
"""Operators that a trace adds at its end: writes to buffers, and copies of results that share memory."""

AHEAD = 64
"""How many recorded operators may be left out at once where a program runs fewer than were recorded."""

LOST = 16
"""With more than one in this many, or this many, operators left out or not found, a program is not what was recorded:
layouts decided for other operators may send more than what each operator chooses."""


Node = tuple[int, int]
"""A node of autograd, by the next operator of the forward that runs when it has been made, of those whose layouts are
decided: the operator's index; and how many nodes back from then on. An operator's own node is one back."""


@dataclass(frozen=True, eq=False)
class OperatorLayouts:
    """The layouts decided for one operator of a program.

    Attributes:
        func: the operator.
        dims: number of dims of each operand.
        inputs: for each operand the state in which it is taken; None for any.
        outputs: for each result the state in which it is made; None where it is no tensor.
        node: of an operator of a backward, the node of autograd that runs it; None of other operators.
    """

    func: OpOverload
    dims: tuple[int, ...]
    inputs: tuple[State | None, ...]
    outputs: tuple[State | None, ...]
    node: Node | None = None


class Recorder(Protocol):
    """What is given the operators of a program in place of running them."""

    def run(self, decision: Any, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a call returns; `decision` says how it would run if it chose for itself."""
        ...

    def becomes(self, x: Any, made: Any) -> None:
        """The tensor `x` is from now on the result `made` of an operator."""
        ...


class Copies:
    """What tensors were moved to, for operators after the first that take them there.

    In a graph equal moves are one. Here a copy is kept as long as its tensor is alive and neither is written to. Writes
    of operators on DTensors are below autograd, where no version counts them, so `written` has to be told of them.
    """

    def __init__(self) -> None:
        self._kept: dict[Any, tuple[StorageWeakRef, int, torch.Tensor, int]] = {}

    def once(self, step: Callable[..., torch.Tensor], local: torch.Tensor, arguments: tuple[Any, ...]) -> torch.Tensor:
        """What a step of a redistribution makes of a local tensor: now, or what it made before."""
        if type(local) is not torch.Tensor:
            return step(local, *arguments)
        storage = local.untyped_storage()
        key = storage._cdata, local.storage_offset(), local.shape, local.stride(), step, arguments
        if (found := self._kept.get(key)) is not None:
            owner, version, copy, copy_version = found
            if not owner.expired() and (version, copy_version) == (local._version, copy._version):
                return copy
        made = step(local, *arguments)
        for k in [k for k, (owner, *_) in self._kept.items() if owner.expired()]:
            del self._kept[k]
        if type(made) is torch.Tensor and made.untyped_storage()._cdata != storage._cdata:
            self._kept[key] = StorageWeakRef(storage), local._version, made, made._version
        return made

    def once_for_view(
        self, step: Callable[..., torch.Tensor], local: torch.Tensor, arguments: tuple[Any, ...]
    ) -> torch.Tensor:
        """The same for an operator whose result is the memory of its operand: no other has that memory."""
        before = [id(copy) for _, _, copy, _ in self._kept.values()]
        made = self.once(step, local, arguments)
        return made.clone() if id(made) in before else made

    def clear(self) -> None:
        """Keep none any longer."""
        self._kept.clear()


class Following:
    """A program's place in its decisions.

    Args:
        decided: the layouts of its operators, in the order in which they were recorded.
        mesh: the mesh on which they run; operators on others are not looked for.
        copies: what tensors were moved to before, where the program is not traced.

    Attributes:
        at: index of the next operator.
        missed: operators of the program that were not recorded there.
        off: how many were left out or not found.
        made: where the program is not traced: how many nodes of autograd there were at each of its operators, and that
            operator's index; -1 if it was not recorded.
    """

    def __init__(self, decided: Sequence[OperatorLayouts], mesh: Any, copies: Copies | None = None) -> None:
        self.decided: Sequence[OperatorLayouts] = decided
        self.mesh: Any = mesh
        self.copies: Copies | None = copies
        self.at: int = 0
        self.missed: list[str] = []
        self.off: int = 0
        self.made: list[tuple[int, int]] = []
        self._found: int | None = None

    def restart(self) -> None:
        """The program runs from its beginning."""
        self.at, self.missed, self.off = 0, [], 0

    def find(self, func: OpOverload, given: Any, mesh: Any) -> OperatorLayouts | None:
        """The layouts of the recorded operator that a call is; None if it is none of the next ones."""
        self._found = None
        dims: tuple[int, ...] | None = None
        if func in TRANSPARENT or self.off > max(LOST, len(self.decided) // LOST):
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
        """The call that was looked for last runs as one operator.

        A trace ends in what the program does not have, which runs on tensors where they are.
        """
        if func in TRANSPARENT or (self._found is None and func in OF_TRACES):
            return
        if self.copies is not None:
            self.made.append((forward_number(), -1 if self._found is None else self._found))
        if self._found is None:
            self.missed.append(str(func))
            self.off += 1
        else:
            self.off += self._found - self.at
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
        text: the decisions as the content of a file (`dtensor.parallel.decisions.files`).
    """

    operators: int = 0
    seconds: float = 0.0
    bound: float = 0.0
    missed: int = 0
    why: str = ""
    text: str = field(default="", repr=False)

    @property
    def gap(self) -> float:
        """How far they are at most from the best, as a fraction of the seconds."""
        return max(0.0, 1 - self.bound / self.seconds) if self.seconds else 0.0


class Ran:
    """A forward that followed decisions operator by operator, whose backward does, too, whenever it comes.

    A backward runs in an order of its own, perhaps on a thread of its own, and not at once. So its operators are looked
    for among those of the node of autograd that runs them.

    Args:
        forward: the forward, at its end.
        first: the number of the first node that it made.
    """

    def __init__(self, forward: Following, first: int) -> None:
        self.first: int = first
        self.copies: Copies = forward.copies or Copies()
        self._mesh: Any = forward.mesh
        self._numbers = [number for number, _ in forward.made]
        self._indices = [index for _, index in forward.made]
        self._of: dict[Node, list[OperatorLayouts]] = {}
        for layouts in forward.decided:
            if layouts.node is not None:
                self._of.setdefault(layouts.node, []).append(layouts)
        self._places: dict[int, tuple[int, Following]] = {}
        self._known: set[int] = set()

    def at(self, number: int) -> Following | None:
        """The place in the decisions of the node with this number; None if it is none of this forward."""
        if not self._numbers or not self.first <= number < self._numbers[-1]:
            return None
        run = backward_run()
        if run not in self._known:
            self._known.add(run)
            after_backward(self.copies.clear)
        if number not in self._places or self._places[number][0] != run:
            k = bisect_right(self._numbers, number)
            node = self._indices[k], self._numbers[k] - number
            self._places[number] = run, Following(self._of.get(node, ()), self._mesh, self.copies)
        return self._places[number][1]


RUNS = 256
"""Forwards whose backwards may follow decisions: more than anybody runs before the first backward."""


class _Runs:
    """The forwards that ran last, by thread: nodes are numbered by the thread that made them."""

    def __init__(self) -> None:
        self.by_thread: dict[int, deque[Ran]] = {}

    def add(self, ran: Ran) -> None:
        self.by_thread.setdefault(threading.get_ident(), deque(maxlen=RUNS)).append(ran)

    def at(self, number: int) -> Following | None:
        """The place in decisions of the node that runs on this thread, be it one of autograd's own."""
        known = self.by_thread
        runs = known.get(threading.get_ident()) or (next(iter(known.values())) if len(known) == 1 else ())
        return next((found for ran in reversed(runs) if (found := ran.at(number)) is not None), None)


runs: _Runs = _Runs()
"""Forwards that followed decisions without being compiled."""


class _Now(threading.local):
    following: Following | None = None
    recorder: Recorder | None = None
    told: Told | None = None


now: _Now = _Now()
"""The decisions that operators of this thread follow, the recorder that is given them instead, and what is said of the
decisions of the graph that this thread traced last; None where nothing was to be decided."""


_asked: ContextVar[bool | str] = ContextVar("dtensor_decide", default=True)


@contextmanager
def deciding(wanted: bool | str) -> Iterator[None]:
    """Context of a compilation whose options say whether layouts are decided for whole graphs, or in which folder they
    are."""
    token = _asked.set(wanted)
    try:
        yield
    finally:
        _asked.reset(token)


def is_deciding() -> bool:
    """Whether layouts are decided for whole graphs now: unless the options of a compilation or the environment say no.

    Raises:
        ValueError: the variable is neither 0 nor 1.
    """
    return bool(_asked.get()) and environment.switched("decide", True)


def decisions_given() -> str:
    """The folder with decisions that the options of a compilation name; "" without."""
    found = _asked.get()
    return found if isinstance(found, str) else ""


def place() -> Following | None:
    """Where this thread is in the decisions that it follows, if it follows any."""
    if now.following is not None or not runs.by_thread:
        return now.following
    number = backward_number()
    return None if number is None else runs.at(number)


def once(func: OpOverload) -> Callable[..., torch.Tensor] | None:
    """What calls the steps of redistributions for `func` where decisions are followed untraced: equal ones are one."""
    following = place()
    if following is None or following.copies is None:
        return None
    return following.copies.once_for_view if func.is_view or func in ALIASING else following.copies.once


def written() -> None:
    """An operator on DTensors has written to one: what any tensor, or its view, was moved to may be old."""
    following = place()
    if following is not None and following.copies is not None:
        following.copies.clear()


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


__all__ = ["TRANSPARENT", "Copies", "Following", "Node", "OperatorLayouts", "Ran", "Recorder", "Told", "deciding"]
__all__ += ["decisions_given", "followed", "is_deciding", "now", "once", "place", "recorded", "runs", "written"]
