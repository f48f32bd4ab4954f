"""Layout: how a whole tensor lies over all axes of a mesh, with the order in which axes share a dimension.

`placements` (one per mesh axis) is the user's view of a layout. A `Layout` lists for each tensor dimension the mesh
axes that shard it, outermost cut first, and beside that the partial axes. Layouts are interned: equal layouts are one
object, so comparing them in a guard or a cache is a pointer comparison. Sizes are no part of a layout.
"""

import re
from dataclasses import dataclass, field
from typing import Any

from ..errors import PlacementError
from ..torch_private.core import register_value_type
from .chunks import chunk_length
from .placements import Partial, Placement, Replicate, Shard

_TOKEN = re.compile(r"(?:S\((\d+)\)(?:#(\d+))?)|(R)|(?:P(?:\((\w+)\))?)")
_interned: dict[tuple[Any, ...], "Layout"] = {}
_parsed: dict[tuple[str, int], "Layout"] = {}


@dataclass(frozen=True, eq=False)
class Layout:
    """Build with `Layout.make`, `Layout.of` or `Layout.parse`, which intern; never directly.

    Attributes:
        mesh_ndim: number of mesh axes.
        dims: for each tensor dimension the mesh axes that shard it, outermost cut first.
        partial: (axis, reduce_op) of each partial axis, ascending.
        placements: one placement per mesh axis.
        text: canonical text, such as `S(0)R` or `S(0)#1S(0)#0` where axis 1 cuts dimension 0 before axis 0 does.
        context: the layout alone in a tuple, for guards. Tuples look in C whether what they hold is the same object;
            layouts, which torch wants to have an `__eq__`, compare in Python.
    """

    mesh_ndim: int
    dims: tuple[tuple[int, ...], ...]
    partial: tuple[tuple[int, str], ...]
    placements: tuple[Placement, ...] = field(init=False)
    text: str = field(init=False)
    context: "tuple[Layout]" = field(init=False)

    def __post_init__(self) -> None:
        found: list[Placement] = [Replicate()] * self.mesh_ndim
        text = ["R"] * self.mesh_ndim
        for dim, axes in enumerate(self.dims):
            for rank, axis in enumerate(axes):
                found[axis] = Shard(dim, None if list(axes) == sorted(axes) else rank)
                text[axis] = str(found[axis])
        for axis, reduce_op in self.partial:
            found[axis] = Partial(reduce_op)
            text[axis] = str(found[axis])
        object.__setattr__(self, "placements", tuple(found))
        object.__setattr__(self, "text", "".join(text))
        object.__setattr__(self, "context", (self,))

    @staticmethod
    def make(mesh_ndim: int, dims: tuple[tuple[int, ...], ...], partial: tuple[tuple[int, str], ...]) -> "Layout":
        """The interned layout with these attributes."""
        key = (mesh_ndim, dims, partial)
        found = _interned.get(key)
        if found is None:
            found = _interned.setdefault(key, Layout(mesh_ndim, dims, partial))
        return found

    @staticmethod
    def of(placements: tuple[Placement, ...], ndim: int) -> "Layout":
        """The layout of checked placements (`as_placements`) of an `ndim`-dimensional tensor."""
        dims: list[list[tuple[int, int]]] = [[] for _ in range(ndim)]
        partial: list[tuple[int, str]] = []
        for axis, p in enumerate(placements):
            if isinstance(p, Shard):
                dims[p.dim].append((axis if p.cut is None else p.cut, axis))
            elif isinstance(p, Partial):
                partial.append((axis, p.reduce_op))
        return Layout.make(len(placements), _in_order(dims), tuple(partial))

    @staticmethod
    def parse(text: str, ndim: int) -> "Layout":
        """The layout of an `ndim`-dimensional tensor that prints as `text`.

        Raises:
            PlacementError: `text` is not the text of a layout.
        """
        found = _parsed.get((text, ndim))
        if found is None:
            found = _parsed[text, ndim] = _parse(text, ndim)
        return found

    @property
    def is_replicated(self) -> bool:
        """Whether every rank holds the whole, final value."""
        return not self.partial and not any(self.dims)

    @property
    def sharded_axes(self) -> tuple[int, ...]:
        """The mesh axes that shard some dimension, dimension by dimension."""
        return tuple(axis for axes in self.dims for axis in axes)

    def local_shape(self, shape: Any, mesh_shape: tuple[int, ...], coordinate: Any) -> tuple[Any, ...]:
        """Shape of the shard at `coordinate` (one index per mesh axis) of a tensor of global `shape`."""
        local = list(shape)
        for dim, axes in enumerate(self.dims):
            for axis in axes:
                local[dim] = chunk_length(local[dim], mesh_shape[axis], coordinate[axis])
        return tuple(local)

    def local_box(self, shape: Any, mesh_shape: tuple[int, ...], coordinate: Any) -> tuple[tuple[int, int], ...]:
        """Where the shard at `coordinate` begins and ends along each dimension of a tensor of global `shape`."""
        box: list[tuple[int, int]] = []
        for length, axes in zip(shape, self.dims):
            begin = 0
            for axis in axes:
                step = -(-length // mesh_shape[axis])
                offset = min(coordinate[axis] * step, length)
                begin, length = begin + offset, min(step, length - offset)
            box.append((begin, begin + length))
        return tuple(box)

    def without_partial(self) -> "Layout":
        """The same layout with every partial axis replicated: where gradients of this layout live."""
        return Layout.make(self.mesh_ndim, self.dims, ()) if self.partial else self

    def moved(self, axis: int, dim: int | None = None, reduce_op: str | None = None) -> "Layout":
        """This layout with `axis` taken off and, if given, put innermost on `dim` or made partial."""
        dims = [tuple(a for a in axes if a != axis) for axes in self.dims]
        partial = [(a, r) for a, r in self.partial if a != axis]
        if dim is not None:
            dims[dim] = (*dims[dim], axis)
        if reduce_op is not None:
            partial = sorted([*partial, (axis, reduce_op)])
        return Layout.make(self.mesh_ndim, tuple(dims), tuple(partial))

    def __eq__(self, other: Any) -> bool:
        return self is other

    __hash__: Any = object.__hash__

    def __copy__(self) -> "Layout":
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> "Layout":
        return self

    def __reduce__(self) -> Any:
        return Layout.make, (self.mesh_ndim, self.dims, self.partial)

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"Layout.parse({self.text!r}, {len(self.dims)})"

    def __fx_repr__(self) -> Any:
        return repr(self), {"Layout": Layout}


def _parse(text: str, ndim: int) -> Layout:
    dims: list[list[tuple[int, int]]] = [[] for _ in range(ndim)]
    partial: list[tuple[int, str]] = []
    axis = end = 0
    for token in _TOKEN.finditer(text):
        if token.start() != end:
            break
        dim, rank, replicate, reduce_op = token.groups()
        if dim is not None:
            if int(dim) >= ndim:
                break
            dims[int(dim)].append((int(rank or axis), axis))
        elif not replicate:
            partial.append((axis, reduce_op or "sum"))
        axis, end = axis + 1, token.end()
    if end != len(text):
        raise PlacementError(f"{text!r} is not a layout of a {ndim}-dimensional tensor; write for example 'S(0)R'")
    return Layout.make(axis, _in_order(dims), tuple(partial))


def _in_order(dims: list[list[tuple[int, int]]]) -> tuple[tuple[int, ...], ...]:
    """The axes of each dimension, from pairs of a cut and its axis."""
    return tuple([tuple([axis for _, axis in sorted(cuts)]) for cuts in dims])


register_value_type(
    Layout,
    (
        "mesh_ndim",
        "dims",
        "partial",
        "placements",
        "text",
        "is_replicated",
        "without_partial",
        "__eq__",
        "__hash__",
    ),
)

__all__ = ["Layout"]
