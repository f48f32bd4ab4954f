"""Placements: how a tensor is distributed along one mesh axis.

Placements are plain frozen data. `dtensor.layout.planner` decides what they mean for a redistribution, and
`dtensor.rules` what they mean for an operator. They are registered with torch as opaque value types, so that Dynamo
can construct, compare and pass them inside a traced function.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import ArgumentError, ArgumentTypeError, PlacementError, shown
from ..torch_private.core import register_value_type

REDUCE_OPS = ("sum", "avg", "max", "min", "product")


@dataclass(frozen=True)
class Placement:
    """Base class of `Shard`, `Replicate` and `Partial`. Placements compare by value."""

    def is_shard(self, dim: int | None = None) -> bool:
        """Whether this is a `Shard` (of `dim`, if given)."""
        return isinstance(self, Shard) and (dim is None or self.dim == dim)

    def is_replicate(self) -> bool:
        """Whether this is a `Replicate`."""
        return isinstance(self, Replicate)

    def is_partial(self, reduce_op: str | None = None) -> bool:
        """Whether this is a `Partial` (with `reduce_op`, if given)."""
        return isinstance(self, Partial) and (reduce_op is None or self.reduce_op == reduce_op)


@dataclass(frozen=True)
class Shard(Placement):
    """The ranks of the mesh axis hold consecutive chunks of tensor dimension `dim`, split as by `torch.chunk`.

    Ranks past the last chunk hold an empty one.

    Several axes that shard the same dimension split it one after the other, normally in mesh order. `cut` states
    another one, as the position of this axis in it: `[Shard(0, cut=1), Shard(0, cut=0)]`, which
    `by_dim(mesh, ("y", "x"))` gives.

    Attributes:
        dim: The tensor dimension. A negative one counts from the end of the tensor that the placement is applied to.
        cut: Position of this axis among those that shard the dimension, 0 for the outermost; None for mesh order.
    """

    dim: int
    cut: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.dim, int) or isinstance(self.dim, bool):
            raise ArgumentTypeError(f"Shard takes a tensor dimension, an int such as Shard(0); got {self.dim!r}")
        if self.cut is not None and (not isinstance(self.cut, int) or self.cut < 0):
            raise ArgumentTypeError(
                f"Shard takes as cut the position of its axis, an int, 0 the outermost; got {self.cut!r}"
            )

    def __str__(self) -> str:
        return f"S({self.dim})" if self.cut is None else f"S({self.dim})#{self.cut}"

    def __repr__(self) -> str:
        return f"Shard(dim={self.dim})" if self.cut is None else f"Shard(dim={self.dim}, cut={self.cut})"

    def __fx_repr__(self) -> Any:
        return f"Shard({self.dim})" if self.cut is None else f"Shard({self.dim}, cut={self.cut})", {"Shard": Shard}


@dataclass(frozen=True)
class Replicate(Placement):
    """Every rank of the mesh axis holds the same values."""

    def __str__(self) -> str:
        return "R"

    def __fx_repr__(self) -> Any:
        return "Replicate()", {"Replicate": Replicate}


@dataclass(frozen=True)
class Partial(Placement):
    """The value is the reduction, by `reduce_op`, of the local tensors of the ranks of the mesh axis.

    Attributes:
        reduce_op: One of "sum", "avg", "max", "min", "product".
    """

    reduce_op: str = "sum"

    def __post_init__(self) -> None:
        if self.reduce_op not in REDUCE_OPS:
            fix = ", write Partial('avg')" if self.reduce_op == "mean" else ""
            raise ArgumentError(f"Partial takes one of {', '.join(REDUCE_OPS)}; got {shown(self.reduce_op)}{fix}")

    def __str__(self) -> str:
        return "P" if self.reduce_op == "sum" else f"P({self.reduce_op})"

    def __fx_repr__(self) -> Any:
        return f"Partial({self.reduce_op!r})", {"Partial": Partial}


_COMMON = ("is_shard", "is_replicate", "is_partial", "__eq__", "__hash__", "__str__", "__repr__")
register_value_type(Shard, ("dim", "cut", *_COMMON))
register_value_type(Replicate, _COMMON)
register_value_type(Partial, ("reduce_op", *_COMMON))


def as_placement(given: Any) -> Placement:
    """Convert `given`, a placement of this library or of torch.distributed.tensor, to one of this library.

    Raises:
        PlacementError: `given` is neither, or a strided shard of torch.
    """
    if isinstance(given, Placement):
        return given
    kind = type(given).__name__
    if type(given).__module__.startswith("torch.distributed"):
        if kind == "Shard":
            return Shard(given.dim)
        if kind == "Replicate":
            return Replicate()
        if kind == "Partial":
            return Partial(given.reduce_op)
        if kind == "_StridedShard":
            raise PlacementError(
                f"{given!r} states the order of mesh axes by sizes, which a placement here does not know; write Shard "
                f"with a cut for each axis that shards the dimension, Shard({given.dim}, cut=0) for the outermost, or "
                "take the placements of from_torch(x)"
            )
    raise PlacementError(f"a placement is Shard(dim), Replicate() or Partial(); got {shown(given)}{_meant(given)}")


def _meant(given: Any) -> str:
    """What to write instead of something that is no placement."""
    if isinstance(given, type):
        return f", write {KINDS[given.__name__]}" if given.__name__ in KINDS else ""
    if isinstance(given, int):
        return f", write Shard({given})"
    if not isinstance(given, str) and given is not None:
        return ""
    for kind, example in KINDS.items():
        if isinstance(given, str) and given.lower().startswith((kind.lower(), f"{kind[0].lower()}(")):
            return f", write {example}"
    return (
        ": say for each mesh axis which dim it shards, such as Shard(0); dtensor.by_dim(mesh, …) takes for each dim "
        "the axes that shard it"
    )


KINDS = {"Shard": "Shard(0)", "Replicate": "Replicate()", "Partial": "Partial()"}


def as_placements(given: Sequence[Any] | Placement | None, mesh_ndim: int, ndim: int) -> tuple[Placement, ...]:
    """Check the placements that a user gave.

    Args:
        given: One placement per mesh axis, or None for Replicate on every axis.
        mesh_ndim: Number of mesh axes.
        ndim: Number of tensor dimensions.

    Returns:
        One placement per mesh axis, with dims counted from the front.

    Raises:
        PlacementError: The number of placements is wrong, an item is not a placement, or a dim is out of range.
    """
    if given is None:
        return (Replicate(),) * mesh_ndim
    if isinstance(given, Placement) or not isinstance(given, (tuple, list)):
        raise _not_a_sequence(given)
    found = [as_placement(p) for p in given]
    if len(found) != mesh_ndim:
        raise PlacementError(
            f"the mesh has {mesh_ndim} {'axis' if mesh_ndim == 1 else 'axes'} but {len(given)} "
            f"{'placement was' if len(given) == 1 else 'placements were'} given: {found}; write one placement per mesh "
            "axis, Replicate() where nothing is sharded"
        )
    checked = tuple([_from_front(p, ndim) for p in found])
    _check_cuts(checked)
    return checked


def _check_cuts(placements: tuple[Placement, ...]) -> None:
    shards = [p for p in placements if isinstance(p, Shard)]
    for p in shards:
        cuts = [q.cut for q in shards if q.dim == p.dim]
        if p.cut is not None and (None in cuts or len({*cuts}) < len(cuts)):
            raise PlacementError(
                f"{list(placements)} leaves open in which order axes shard dimension {p.dim}; give each of these axes "
                "a different cut, or none of them one"
            )


def words(given: Sequence[Any] | None) -> str:
    """Placements as text, such as `S(-1)R`, which `parsed` reads back; "" for None.

    Does little work, because Dynamo traces it.

    Raises:
        PlacementError: `given` is not a sequence, or an item is not a placement.
    """
    if given is None:
        return ""
    if not isinstance(given, (tuple, list)):
        raise _not_a_sequence(given)
    return "".join([str(as_placement(p)) for p in given])


def parsed(text: str) -> tuple[Placement, ...]:
    """The placements that `words` turned into `text`."""
    found = [m.groups() for m in _WORD.finditer(text)]
    return tuple(
        [
            Shard(int(dim), int(cut) if cut else None) if dim else Replicate() if r else Partial(op or "sum")
            for dim, cut, r, op in found
        ]
    )


_WORD = re.compile(r"S\((-?\d+)\)(?:#(\d+))?|(R)|P(?:\((\w+)\))?")


def _not_a_sequence(given: Any) -> PlacementError:
    fix = f"write [{given!r}]" if isinstance(given, Placement) else "write such as [Shard(0)]"
    return PlacementError(f"placements must be a sequence with one placement per mesh axis; got {shown(given)}, {fix}")


def _from_front(p: Placement, ndim: int) -> Placement:
    if not isinstance(p, Shard):
        return p
    if not -ndim <= p.dim < ndim:
        fix = f"dims run from {-ndim} to {ndim - 1}" if ndim else "a 0-dim tensor takes Replicate() or Partial()"
        raise PlacementError(f"Shard({p.dim}) does not fit a tensor of {ndim} dimensions; {fix}")
    return p if p.dim >= 0 else Shard(p.dim + ndim, p.cut)


__all__ = [
    "REDUCE_OPS",
    "Partial",
    "Placement",
    "Replicate",
    "Shard",
    "as_placement",
    "as_placements",
    "parsed",
    "words",
]
