"""`CountCollectives`, which records the collectives of eager code.

It is a dispatch mode that records each collective in which this rank takes part, with the bytes the rank sends. It
sees the `dtensor::*` operators and torch's functional collectives. For compiled graphs, `dtensor.compile.statistics`
reports the same.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch

from ..job.groups import group_size
from ..prices.links import moved, wire_bytes
from ..tensor.tensor import DTensor
from ..torch_private.core import TorchDispatchMode

OPERATORS = {
    "dtensor::all_gather": "all_gather",
    "dtensor::reduce_scatter": "reduce_scatter",
    "dtensor::all_reduce": "all_reduce",
    "dtensor::all_to_all": "all_to_all",
    "dtensor::collective_permute": "collective_permute",
    "_c10d_functional::all_gather_into_tensor": "all_gather",
    "_c10d_functional::reduce_scatter_tensor": "reduce_scatter",
    "_c10d_functional::all_reduce": "all_reduce",
    "_c10d_functional::all_reduce_": "all_reduce",
    "_c10d_functional::all_to_all_single": "all_to_all",
    "dtensor::all_gather_start": "all_gather",
    "dtensor::all_to_all_start": "all_to_all",
    "dtensor::all_reduce_start": "all_reduce",
    "dtensor::collective_permute_start": "collective_permute",
}
"""Operator -> the collective it runs. Every operator takes the tensor first and the name of the group last."""


NAMES_IN_TORCH = {
    "all_gather": "all_gather_into_tensor",
    "reduce_scatter": "reduce_scatter_tensor",
    "all_reduce": "all_reduce",
    "all_to_all": "all_to_all_single",
}
"""Collective -> the operator of torch.ops.c10d_functional under which torch's CommDebugMode counts it."""


@dataclass(frozen=True)
class Collective:
    """One collective that ran.

    Attributes:
        op: "all_gather", "reduce_scatter", "all_reduce", "all_to_all" or "collective_permute".
        bytes: bytes this rank sends in a ring algorithm (see `dtensor.prices.links`).
        group: name of the process group.
    """

    op: str
    bytes: int
    group: str


class CountCollectives(TorchDispatchMode):
    """Context manager that records the collectives of this thread, in order, in `collectives`.

    It also has the counting methods of torch's CommDebugMode, which does not see these collectives.

    Attributes:
        collectives: the collectives recorded so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.collectives: list[Collective] = []

    @property
    def bytes(self) -> int:
        """Bytes this rank sends in all recorded collectives."""
        return sum(c.bytes for c in self.collectives)

    def get_total_counts(self) -> int:
        """Return the number of recorded collectives."""
        return len(self.collectives)

    def get_comm_counts(self) -> dict[Any, int]:
        """Return how often each collective ran.

        The keys are operators of torch.ops.c10d_functional, as in CommDebugMode, and dtensor.collective_permute.
        """
        counts = Counter(c.op for c in self.collectives)
        return {_operator(op): n for op, n in counts.items()}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # DTensor then dispatches, and its local operators come back here
        op = OPERATORS.get(func.name().split(".")[0])
        if op is not None:
            part = moved(args[1]) if op == "collective_permute" else 1.0
            self.collectives.append(_collective(op, args[0], args[-1], part))
        return func(*args, **(kwargs or {}))


def _operator(op: str) -> Any:
    name = NAMES_IN_TORCH.get(op)
    return getattr(torch.ops.dtensor, op) if name is None else getattr(torch.ops.c10d_functional, name)


def _collective(op: str, x: torch.Tensor, group: str, part: float) -> Collective:
    n = group_size(group)
    size = x.numel() * x.element_size() * (n if op == "all_gather" else 1)
    return Collective(op, round(wire_bytes(op, size, n) * part), group)


__all__ = ["Collective", "CountCollectives"]
