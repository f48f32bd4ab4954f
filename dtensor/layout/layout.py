"""Layouts: how a tensor is distributed over all axes of a mesh, including the order of axes that share a dimension.

Users see a layout as `placements`, one per mesh axis. Internally, a `Layout` lists for each tensor dimension the mesh
axes that shard it, outermost first, and separately the partial axes. Layouts are interned: equal layouts are the same
object, so a guard or a cache compares them by pointer. Sizes are not part of a layout.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import PlacementError
from ..torch_private.core import register_value_type
from .chunks import chunk_length, own_length
from .placements import Partial, Placement, Replicate, Shard

_TOKEN = re.compile(r"(?:S\((\d+)\)(?:#(\d+))?)|(R)|(?:P(?:\((\w+)\))?)")
_interned: dict[tuple[Any, ...], "Layout"] = {}
_parsed: dict[tuple[str, int], "Layout"] = {}


@dataclass(frozen=True, eq=False)
class Layout:
    """The distribution of a tensor over a mesh.

    Build with `Layout.make`, `Layout.of` or `Layout.parse`, which intern; never directly.

    Attributes:
        mesh_ndim: Number of mesh axes.
        dims: For each tensor dimension, the mesh axes that shard it, outermost first.
        partial: (axis, reduce_op) of each partial axis, ascending.
        placements: One placement per mesh axis.
        text: Canonical text, such as `S(0)R`, or `S(0)#1S(0)#0` where axis 1 shards dimension 0 before axis 0 does.
        context: A tuple that holds only the layout, for guards. Tuples compare their items by identity in C, whereas
            layouts compare in Python, because torch requires that they define `__eq__`.
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
        """The layout with these placements, already checked by `as_placements`, of an `ndim`-dimensional tensor."""
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
        """The layout of an `ndim`-dimensional tensor whose canonical text is `text`.

        Raises:
            PlacementError: `text` is not the text of a layout.
        """
        found = _parsed.get((text, ndim))
        if found is None:
            found = _parsed[text, ndim] = _parse(text, ndim)
        return found

    @property
    def is_replicated(self) -> bool:
        """Whether every rank holds the full, final value."""
        return not self.partial and not any(self.dims)

    @property
    def sharded_axes(self) -> tuple[int, ...]:
        """The mesh axes that shard a dimension, ordered by dimension."""
        return tuple(axis for axes in self.dims for axis in axes)

    def local_shape(self, shape: Any, mesh_shape: tuple[int, ...], coordinate: Any) -> tuple[Any, ...]:
        """Shape of the shard at mesh `coordinate` (one index per mesh axis) of a tensor with global `shape`."""
        local = list(shape)
        for dim, axes in enumerate(self.dims):
            for axis in axes:
                local[dim] = chunk_length(local[dim], mesh_shape[axis], coordinate[axis])
        return tuple(local)

    def own_shape(
        self, shape: Any, mesh_shape: tuple[int, ...], coordinate: Any, groups: Mapping[tuple[int, ...], str]
    ) -> tuple[Any, ...]:
        """`local_shape` of this rank, whose uneven lengths are noted by the names of the mesh's groups."""
        local = list(shape)
        for dim, axes in enumerate(self.dims):
            for axis in axes:
                local[dim] = own_length(local[dim], mesh_shape[axis], coordinate[axis], groups.get((axis,), ""))
        return tuple(local)

    def local_box(self, shape: Any, mesh_shape: tuple[int, ...], coordinate: Any) -> tuple[tuple[int, int], ...]:
        """The (begin, end) range along each dimension of the shard at `coordinate` of a tensor with global `shape`."""
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
        """This layout with every partial axis replicated: the layout of gradients for tensors in this layout."""
        return Layout.make(self.mesh_ndim, self.dims, ()) if self.partial else self

    def moved(self, axis: int, dim: int | None = None, reduce_op: str | None = None) -> "Layout":
        """This layout with `axis` removed and then, if given, made the innermost axis of `dim` or made partial."""
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
        raise PlacementError(f"{text!r} is not a layout of a {ndim}-dimensional tensor; write, for example, 'S(0)R'")
    return Layout.make(axis, _in_order(dims), tuple(partial))


def _in_order(dims: list[list[tuple[int, int]]]) -> tuple[tuple[int, ...], ...]:
    """The axes of each dimension, sorted, from its (cut, axis) pairs."""
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
