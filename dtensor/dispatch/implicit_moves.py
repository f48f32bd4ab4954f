"""Describes implicit redistributions: which operand of a call moves, to which layout, and at what cost.

`strictness` refuses these moves and `explain` shows them. Calls may hold DTensors or their specs.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from ..comm.collectives import COMMUNICATING
from ..comm.redistribute import plan_of
from ..layout.layout import Layout
from ..layout.placements import Placement, Replicate
from ..layout.planner import Plan, Step
from ..mesh.tensor_spec import Spec
from ..torch_private.core import OpOverload


@dataclass(frozen=True)
class Move:
    """The redistribution of one operand before its operator runs.

    Attributes:
        argument: its name in the operator's schema; `tensors[1]` for an element of a list.
        spec: the operand's spec before the move.
        target: the layout in which the operator takes it.
        returns: whether the operator writes to it, so that it is redistributed back afterwards.
    """

    argument: str
    spec: Spec
    target: Layout
    returns: bool = False

    @cached_property
    def plans(self) -> tuple[Plan, ...]:
        """The plan to the target, followed by the plan back if `returns`."""
        there = plan_of(self.spec, self.target)
        return (there, plan_of(self.spec.with_layout(self.target), self.spec.layout)) if self.returns else (there,)

    @property
    def bytes(self) -> float:
        """Bytes that each rank sends."""
        return sum(p.bytes for p in self.plans)

    @property
    def seconds(self) -> float:
        """Estimated seconds."""
        return sum(p.seconds for p in self.plans)

    @property
    def steps(self) -> list[Step]:
        """The steps of all plans, in order."""
        return [s for p in self.plans for s in p.steps]

    @property
    def axes(self) -> frozenset[int]:
        """The mesh axes over which the move communicates; empty for a local move."""
        return frozenset(axis for s in self.steps if s.op in COMMUNICATING for axis in s.axes)

    def __str__(self) -> str:
        found = ", then ".join(f"{s.op} over {axes_name(self.spec.mesh, s.axes)}" for s in self.steps)
        src, dst = as_code(self.spec.layout.placements), as_code(self.target.placements)
        back = " and back" if self.returns else ""
        return f"'{self.argument}' from {src} to {dst}{back} ({found or 'nothing to send'}; {round(self.bytes)} bytes)"

    def as_call(self) -> str:
        """The `redistribute` call to write instead; whatever the operator still moves afterwards is local."""
        have, want = self.spec.layout, self.target.placements
        wanted = [Replicate() if w.is_partial() and w != h else w for h, w in zip(have.placements, want)]
        return redistribute_call(self.argument, wanted)


def as_code(placements: Sequence[Placement | None]) -> str:
    """Placements as source code, such as `[Replicate(), Shard(1)]`."""
    shown = ["None" if p is None else "Partial()" if p.is_partial("sum") else p.__fx_repr__()[0] for p in placements]  # pyright: ignore[reportAttributeAccessIssue]
    return f"[{', '.join(shown)}]"


def redistribute_call(argument: str, placements: Sequence[Placement]) -> str:
    """A call of `redistribute` as source code."""
    return f"{argument}.redistribute(placements={as_code(placements)})"


def axis_name(mesh: DeviceMesh, axis: int) -> str:
    """`axis 0`, followed by its name in parentheses if the mesh has names."""
    names = getattr(mesh, "mesh_dim_names", None)
    return f"axis {axis} ({names[axis]})" if names else f"axis {axis}"


def axes_name(mesh: DeviceMesh, axes: tuple[int, ...]) -> str:
    """As `axis_name`, for the axes of one collective: `axis 0 and axis 1`."""
    return " and ".join([axis_name(mesh, axis) for axis in axes])


def named_operands(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> list[tuple[str, Spec]]:
    """Argument name and spec of each operand, in the order of the call, which holds DTensors or specs."""
    names = [a.name for a in func._schema.arguments]
    return [found for name, value in [*zip(names, args), *kwargs.items()] for found in _named(name, value)]


def _named(name: str, value: Any) -> Iterator[tuple[str, Spec]]:
    spec = value if isinstance(value, Spec) else getattr(value, "_spec", None)
    if isinstance(spec, Spec):
        yield name, spec
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from _named(f"{name}[{i}]" if len(value) > 1 else name, item)


def moves_of(
    operands: list[tuple[str, Spec]], targets: Sequence[Layout | None], writes: Sequence[int] = ()
) -> list[Move]:
    """The moves of named operands to their targets (None: the operand stays); those at `writes` also move back."""
    return [
        Move(name, spec, target, i in writes)
        for i, ((name, spec), target) in enumerate(zip(operands, targets))
        if target is not None and target is not spec.layout
    ]


__all__ = ["Move", "as_code", "axis_name", "moves_of", "named_operands", "redistribute_call"]
