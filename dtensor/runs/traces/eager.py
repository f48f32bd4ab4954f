"""Names eager collectives: what is moved, over which axis, for which parameter or module, and the line that asked.

The place of an operator is read off Python's stack (`records.places`). In a backward the stack shows none; there the
place is that of the forward operator whose gradient is computed. `noting_places` notes it for every operator on
DTensors, as many communicate in the backward only.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from weakref import ref

import torch

from ...comm import profiled
from ...tensor.tensor import DTensor
from ...torch_private.core import autograd_node, next_sequence_number
from ..records.places import BACKWARD, Names, Place, Places

MOST = 1 << 20
"""The number of places that are kept; one more, and all are forgotten."""


NEAR = (0, 1, -1)
"""How far from a number of autograd's the place of its forward is looked for."""

NO_PLACE = Place(BACKWARD, "", "")


class Namer:
    """Describes eager collectives; see `dtensor.comm.profiled.namer`."""

    def __init__(self) -> None:
        self.names: Names = Names()
        self.places: Places = Places(self.names)
        self._parameters: dict[int, tuple[ref[torch.Tensor], str]] = {}
        self._of: dict[int, str] = {}

    def forget(self) -> None:
        """Forget all models and places: the next trace begins with none."""
        self.__init__()

    def note(self) -> None:
        """Note the place of the operator that is called now, for its backward."""
        if len(self.places.forward) > MOST:
            self.places.forward.clear()
            self._of.clear()
        self.places.here()

    def describe(self, op: str, x: torch.Tensor, args: tuple[Any, ...]) -> profiled.Described:
        """Describe a collective by its operator, this rank's tensor, and the operator's other arguments."""
        node, place = autograd_node(), self.places.here()
        parameter = self._parameter(x)
        if node is None or place.phase != BACKWARD:
            of = parameter or place.module
            if parameter:
                self._of[next_sequence_number() - 1] = parameter
        else:
            place = self._forward(node.sequence_number)
            parameter = self._of.get(node.sequence_number, "")
            of = f"gradient of {parameter}" if parameter else place.module or f"backward of {node.name}"
        return {
            "op": op,
            "move": moved(op, args),
            "axis": str(args[-1]).removeprefix("mesh."),
            "of": of,
            "line": place.line,
            "stage": place.phase,
            "graph": "",
        }

    def _forward(self, number: int) -> Place:
        """The place of the forward whose backward has a number. `from_local` and `to_local` are no operators on
        DTensors; their places are those of the operators after and before."""
        forward = self.places.forward
        return next((replace(forward[number + k], phase=BACKWARD) for k in NEAR if number + k in forward), NO_PLACE)

    def _parameter(self, x: torch.Tensor) -> str:
        """The name of the parameter whose memory `x` is; "" if it is none's."""
        for tensor in self.names.kept:
            local = getattr(tensor, "_local_tensor", tensor)
            if type(local) in (torch.Tensor, torch.nn.Parameter) and local.numel():
                self._parameters[local.data_ptr()] = ref(tensor), self.names.tensors[id(tensor)]
        self.names.kept.clear()  # a profile keeps no model alive
        alive, name = self._parameters.get(x.data_ptr(), (None, "")) if x.numel() else (None, "")
        return name if alive is not None and alive() is not None else ""


def moved(op: str, args: tuple[Any, ...]) -> str:
    """The placements along the axis before and after a collective, such as "S(0)->R"; "" for one that keeps them."""
    match op, args:
        case "all_gather", (dim, *_):
            return f"S({dim})->R"
        case "reduce_scatter", (reduction, dim, *_):
            return f"{_partial(reduction)}->S({dim})"
        case "all_reduce", (reduction, *_):
            return f"{_partial(reduction)}->R"
        case "all_to_all", (gathered, scattered, *_):
            return f"S({gathered})->S({scattered})"
    return ""


def _partial(reduction: str) -> str:
    return "P" if reduction == "sum" else f"P({reduction})"


namer: Namer = Namer()
"""The one of this process."""


@contextmanager
def noting_places() -> Iterator[None]:
    """A context in which the place of every operator on DTensors is noted, for its backward."""
    own: Any = DTensor.__dict__["__torch_dispatch__"]

    def dispatched(func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if autograd_node() is None:
            namer.note()
        return own.__func__(func, types, args, kwargs)

    DTensor.__torch_dispatch__ = staticmethod(dispatched)
    try:
        yield
    finally:
        DTensor.__torch_dispatch__ = own


__all__ = ["Namer", "moved", "namer", "noting_places"]
