"""A cached decision in the form in which it runs: nothing is looked up that follows from the decision.

    decision -> which arguments are redistributed, which are fixed, and what is called

`dispatch` keeps one for each key. What it holds is valid for arguments that have the same key, on plain local tensors
as in a trace.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..comm.redistribute import Redistribution
from ..mesh.tensor_spec import Spec
from ..rules.call import replaced
from ..torch_private.core import OpOverload, without_frame
from .decision import Decision, binding_of, is_dtensor, reshaped

Place = tuple[int, ...]
"""The position of an argument, or of an item of one that is a list."""


class Prepared:
    """A decision that is ready to run.

    Attributes:
        func: the operator, which the key names by its id.
        decision: the decision.
        call: what makes the results of local arguments, unless `local` does.
        local: the decision's function that runs in place of the operator.
        is_view: whether the result is a view, or a copy in place of one, which is to be remembered.
        spec: the spec of the result, if the call makes nothing else and writes to nothing; None otherwise.
        wrapper: what `dispatch` made the last result's outside with, of which the device may change.
        moves: where an operand is that is redistributed, and the redistribution.
        fixed: the local arguments that are the same in each call, by their position.
        is_whole: whether this form covers the call; otherwise it is carried out step by step (`dispatch.run`).
    """

    __slots__ = ("call", "decision", "fixed", "func", "is_view", "is_whole", "local", "moves", "spec", "wrapper")

    def __init__(self, decision: Decision, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.func: OpOverload = func
        self.decision: Decision = decision
        self.call: Callable[..., Any] = without_frame(func)
        self.local: Callable[..., Any] | None = decision.local
        self.is_view: bool = func.is_view and not decision.simple
        self.spec: Spec | None = None
        self.wrapper: tuple[Any, ...] = (None,) * 8
        self.moves: tuple[tuple[Place, Redistribution], ...] = ()
        self.fixed: tuple[tuple[int, Any], ...] = ()
        self.is_whole: bool = not (decision.kind or decision.writes or any(_places(tuple(kwargs.values()))))
        if not self.is_whole:
            return
        places = list(_places(args))
        if decision.local is reshaped and len(args) == 2 and isinstance(args[1], (list, tuple)):
            self.call, self.local = torch.reshape, None
        elif decision.local is None and type(_at(args, places[0])._local_tensor) is torch.Tensor:
            self.call = binding_of(func, args, kwargs)
        if decision.simple and not decision.many and not decision.written:
            self.spec = decision.outputs[0]
        if decision.moves:
            found = [(at, to, _at(args, at)._spec) for at, to in zip(places, decision.moves, strict=True)]
            self.moves = tuple(
                [(at, Redistribution(spec.real or spec, to)) for at, to, spec in found if to is not None]
            )
        if decision.replace:
            positional, keywords = replaced(func, args, kwargs, decision.replace)
            names = dict(decision.replace)
            self.is_whole = keywords.keys() == kwargs.keys() and names.keys().isdisjoint(kwargs)
            known = [a.name for a in func._schema.arguments]
            self.fixed = tuple([(i, a) for i, a in enumerate(positional) if i >= len(args) or known[i] in names])


def _places(args: tuple[Any, ...] | list[Any]) -> Iterator[Place]:
    """Where the DTensors are among arguments, in the order of operands."""
    for i, a in enumerate(args):
        if is_dtensor(a):
            yield (i,)
        elif isinstance(a, (list, tuple)):
            for inner in _places(a):
                yield (i, *inner)


def _at(args: Any, place: Place) -> Any:
    for i in place:
        args = args[i]
    return args


__all__ = ["Place", "Prepared"]
