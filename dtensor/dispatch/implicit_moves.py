"""Move: one operand that is redistributed before its operator runs, with the argument's name and what it costs.

What `strictness` refuses and `explain` shows. Takes calls that hold DTensors as well as calls that hold specs.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..comm.collectives import COMMUNICATING
from ..comm.redistribute import plan_of
from ..layout.layout import Layout
from ..layout.placements import Placement, Replicate
from ..layout.planner import Plan, Step
from ..mesh.tensor_spec import Spec
from ..torch_private.core import OpOverload


@dataclass(frozen=True)
class Move:
    """An operand on its way to another layout.

    Attributes:
        argument: its name in the operator's schema; `tensors[1]` for one of a list.
        spec: the operand as it is.
        target: the layout the operator takes it in.
        returns: whether the operator writes to it, so that it is moved back afterwards.
    """

    argument: str
    spec: Spec
    target: Layout
    returns: bool = False

    @cached_property
    def plans(self) -> tuple[Plan, ...]:
        """The plan to the target, and the one back if there is one."""
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
        """The steps, of the plan back too."""
        return [s for p in self.plans for s in p.steps]

    @property
    def axes(self) -> frozenset[int]:
        """The mesh axes over which the move communicates; empty for one that is local."""
        return frozenset(axis for s in self.steps if s.op in COMMUNICATING for axis in s.axes)

    def __str__(self) -> str:
        found = ", then ".join(f"{s.op} over {axes_name(self.spec.mesh, s.axes)}" for s in self.steps)
        src, dst = as_code(self.spec.layout.placements), as_code(self.target.placements)
        back = " and back" if self.returns else ""
        return f"'{self.argument}' from {src} to {dst}{back} ({found or 'nothing to send'}; {round(self.bytes)} bytes)"

    def as_call(self) -> str:
        """The `redistribute` to write instead, after which what is left to do is local."""
        have, want = self.spec.layout, self.target.placements
        wanted = [Replicate() if w.is_partial() and w != h else w for h, w in zip(have.placements, want)]
        return redistribute_call(self.argument, wanted)


def as_code(placements: Sequence[Placement | None]) -> str:
    """Placements as one writes them, `[Replicate(), Shard(1)]`."""
    shown = ["None" if p is None else "Partial()" if p.is_partial("sum") else p.__fx_repr__()[0] for p in placements]  # pyright: ignore[reportAttributeAccessIssue]
    return f"[{', '.join(shown)}]"


def redistribute_call(argument: str, placements: Sequence[Placement]) -> str:
    """The text of a call of `redistribute`."""
    return f"{argument}.redistribute(placements={as_code(placements)})"


def axis_name(mesh: Any, axis: int) -> str:
    """`axis 0`, with the axis' name if it has one."""
    names = getattr(mesh, "mesh_dim_names", None)
    return f"axis {axis} ({names[axis]})" if names else f"axis {axis}"


def axes_name(mesh: Any, axes: tuple[int, ...]) -> str:
    """As `axis_name`, of the axes that one collective takes together: `axis 0 and axis 1`."""
    return " and ".join([axis_name(mesh, axis) for axis in axes])


def named_operands(func: OpOverload, args: Sequence, kwargs: dict[str, Any]) -> list[tuple[str, Spec]]:
    """Argument name and spec of each operand of a call, in its order; the call holds DTensors or specs."""
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
    """The moves of named operands to their target layouts, None where one stays; those at `writes` are moved back."""
    return [
        Move(name, spec, target, i in writes)
        for i, ((name, spec), target) in enumerate(zip(operands, targets))
        if target is not None and target is not spec.layout
    ]


__all__ = ["Move", "as_code", "axis_name", "moves_of", "named_operands", "redistribute_call"]
