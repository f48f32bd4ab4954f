"""A model that is called operator by operator follows the decisions that its compiled graph would.

The forward is recorded on a batch, without computing anything, when the first call of its kind comes: with gradients
or without, in training or not, in a dtype of autocast. A program with graph breaks has other decisions compiled, where
each graph has its own.
"""

import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ...dispatch.whole_graph import Copies, Following, Ran, followed, is_deciding, now, runs
from ...mesh.provenance import look_up_each
from ...program.source_lines import users_level
from ...tensor.tensor import DTensor
from ...torch_private.core import forward_number, is_in_backward
from ..fsdp.sharding import SHARDED_AS
from .deciding import Decisions
from .frames import decided


class EagerDecisions:
    """The decisions of a model, for calls that are not compiled.

    Args:
        model: the model, whose parameters are DTensors.
        device: the type of its mesh's device.
        call: calls its forward on a batch of the sizes for which to decide, whose tensors are empty DTensors.
    """

    def __init__(self, model: nn.Module, device: str, call: Callable[[], Any]) -> None:
        self.model, self.device, self.call = model, device, call
        self._known: dict[Any, Decisions | None] = {}
        self._said = False
        self._copies = Copies()

    def of_now(self) -> Decisions | None:
        """The decisions for a call as things are switched now; None if there are none."""
        if not is_deciding() or now.following is not None or now.recorder is not None or is_in_backward():
            return None
        device = self.device
        cast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        kind = torch.is_grad_enabled(), self.model.training, cast
        if kind not in self._known:
            self._known[kind] = self._decided()
        return self._known[kind]

    def _decided(self) -> Decisions | None:
        parameters = dict(self.model.named_parameters())
        fully = next((name for name, p in parameters.items() if SHARDED_AS in vars(p)), None)
        found: Decisions | str = f"{fully} is fully sharded, and gathered when the forward runs"
        if fully is None:
            inside = {name: p for name, p in parameters.items() if isinstance(p, DTensor)}
            found = decided(lambda *_: self.call(), (), (), inside, self.model)
        if isinstance(found, Decisions):
            look_up_each(1)  # operators of the backward are to be looked up whenever it comes
            weakref.finalize(self, look_up_each, -1)
            return found
        if found:
            self._say(f"as {found}")
        return None

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Context of a forward that follows its decisions, if it has any."""
        found = self.of_now()
        if found is None:
            yield
            return
        self._copies.clear()  # of a forward whose backward is still to come, which then moves them again
        self._copies = Copies()
        following, first = Following(found.layouts, found.mesh, self._copies), forward_number()
        try:
            with followed(following):
                yield
        except BaseException:
            self._copies.clear()
            raise
        if following.missed:
            self._say(f"as operators are not those that were recorded, from {following.missed[0]} on")
        if torch.is_grad_enabled():
            runs.add(Ran(following, first))
        else:
            self._copies.clear()

    def _say(self, why: str) -> None:
        if not self._said:
            self._said = True
            warnings.warn(f"operators choose their own layouts {why}", stacklevel=users_level())


__all__ = ["EagerDecisions"]
