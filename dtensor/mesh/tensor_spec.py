"""Specs: everything about a distributed tensor except its values, that is mesh, layout, global shape, stride and dtype.

Specs with static sizes are interned, so the dispatch cache compares them by identity. While a graph is traced, sizes
can be symbols, and each input of the graph has a stand-in for its mesh. Such specs exist only during the trace and are
not kept. Decisions use the spec on the mesh itself, `Spec.real`.
"""

import functools
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from ..errors import PlacementError
from ..layout.chunks import note_place
from ..layout.layout import Layout
from ..torch_private.core import real_object
from ..torch_private.symbolic_sizes import define_strides, hint, keep_first_definitions, number_if_guarded
from .caches import cache
from .local_sizes import define_local_length, local_length, written
from .mesh import facts, mesh_shape
from .provenance import Cut, Shards

_interned: dict[tuple[Any, ...], "Spec"] = cache()


class Spec:
    """The description of a distributed tensor. Build with `Spec.make`.

    Attributes:
        mesh: The torch DeviceMesh.
        layout: The distribution of the tensor over the mesh.
        shape: Global sizes.
        stride: Strides of the global tensor, in elements.
        dtype: Element type.
        real: If `mesh` is a stand-in, the same spec on the mesh itself; otherwise None.
        static: Whether all sizes are plain ints.
        unusual_stride: The stride; None if it is contiguous, which torch computes faster than it reads a given stride.
    """

    __slots__ = ("dtype", "layout", "mesh", "real", "shape", "static", "stride", "unusual_stride")

    def __init__(
        self,
        mesh: DeviceMesh,
        layout: Layout,
        shape: tuple[Any, ...],
        stride: tuple[Any, ...],
        dtype: torch.dtype,
        static: bool,
    ) -> None:
        real = real_object(mesh)
        self.real: Spec | None = None if real is mesh else Spec.make(real, layout, shape, stride, dtype)
        self.mesh: DeviceMesh = mesh
        self.layout: Layout = layout
        self.shape: tuple[Any, ...] = shape
        self.stride: tuple[Any, ...] = stride
        self.dtype: torch.dtype = dtype
        self.static: bool = static
        self.unusual_stride: tuple[Any, ...] | None = None if static and stride == contiguous_stride(shape) else stride

    @staticmethod
    def make(mesh: DeviceMesh, layout: Layout, shape: Any, stride: Any, dtype: torch.dtype) -> "Spec":
        """The spec with these attributes; interned if all sizes are ints and the mesh is not a stand-in."""
        shape, stride = tuple(shape), tuple(stride)
        for size in shape + stride:
            if type(size) is not int:
                return Spec(mesh, layout, shape, stride, dtype, False)
        key = (id(mesh), layout, shape, stride, dtype)
        found = _interned.get(key)
        if found is None:
            found = Spec(mesh, layout, shape, stride, dtype, True)
            if found.real is None:
                return _interned.setdefault(key, found)
        return found

    @property
    def ndim(self) -> int:
        """Number of tensor dimensions."""
        return len(self.shape)

    @property
    def coordinate(self) -> tuple[int, ...] | None:
        """This rank's index along each mesh axis; None on a rank outside the mesh."""
        return facts(self.mesh).coordinate

    def local_shape(self) -> tuple[Any, ...]:
        """Shape of this rank's shard; `(0,)` on a rank outside the mesh."""
        coordinate = self.coordinate
        if coordinate is None:
            return (0,)
        known = facts(self.mesh)
        if self.static:
            return self.layout.own_shape(self.shape, known.shape, coordinate, known.groups)
        shape = list(self.shape)
        for dim, axes in enumerate(self.layout.dims):
            for axis in axes:
                shape[dim] = local_length(shape[dim], known.groups[(axis,)])
        return tuple(shape)

    def shards(self) -> Shards:
        """The shapes of the shards of all ranks.

        For symbolic sizes, as far as the trace knows them now. It may still find that a size is a number; its local
        lengths then are numbers, too, and may differ between ranks.
        """
        sizes = facts(self.mesh).shape
        if self.static:
            return _static_shards(self.layout, sizes, self.shape)
        return _shards(self.layout, sizes, tuple(map(number_if_guarded, self.shape)))

    def with_layout(self, layout: Layout) -> "Spec":
        """This spec in another layout."""
        return Spec.make(self.mesh, layout, self.shape, self.stride, self.dtype)

    def on(self, mesh: DeviceMesh) -> "Spec":
        """This spec on `mesh`, which is the same mesh or a stand-in for it."""
        return self if mesh is self.mesh else Spec.make(mesh, self.layout, self.shape, self.stride, self.dtype)

    def traced(self) -> "Spec":
        """This spec with sizes that the graph being traced, if any, can compute."""
        if self.static:
            return self
        shape, stride = ([written(n) for n in sizes] for sizes in (self.shape, self.stride))
        return Spec.make(self.mesh, self.layout, shape, stride, self.dtype)

    def __repr__(self) -> str:
        return f"{self.dtype}{list(self.shape)} {self.layout}"


def _shards(layout: Layout, sizes: tuple[int, ...], given: tuple[Any, ...]) -> Shards:
    shape = tuple(map(hint, given))
    first, last = (layout.local_shape(shape, sizes, [k * (n - 1) for n in sizes]) for k in (0, 1))
    # The shards of a symbolic length are the same symbol on all ranks.
    alike = [a == b or isinstance(n, torch.SymInt) for n, a, b in zip(given, first, last)]
    cuts = [tuple([sizes[axis] for axis in axes]) for axes in layout.dims]
    lengths = tuple([a if same else Cut(n, cut) for n, cut, a, same in zip(shape, cuts, first, alike)])
    return Shards(first, all(alike), None if any(isinstance(n, torch.SymInt) for n in given) else lengths)


_static_shards = functools.lru_cache(maxsize=4096)(_shards)
"""`_shards` for plain sizes, cached: the layers of a model have the same ones."""


def define_local_sizes(spec: Spec, local: torch.Tensor) -> None:
    """Define the sizes of an input's local tensor by the global sizes, in the graph being traced.

    Torch gives both symbols of their own. See `local_sizes` for what replaces those of the local tensor.
    """
    keep_first_definitions()
    if spec.coordinate is None:
        return
    known = facts(spec.mesh)
    for size, mine, axes in zip(spec.shape, local.shape, spec.layout.dims):
        define_local_length(mine, size, tuple([known.groups[(axis,)] for axis in axes]))
    define_strides(local)


def contiguous_stride(shape: Any) -> tuple[Any, ...]:
    """Strides, in elements, of a contiguous tensor of `shape`."""
    stride, step = [], 1
    for size in reversed(tuple(shape)):
        stride.append(step)
        step = step * (size if not isinstance(size, int) else max(size, 1))
    return tuple(reversed(stride))


def chunk(spec: Spec) -> tuple[torch.Size, torch.Size]:
    """Sizes of this rank's shard and its offsets in the global tensor, in elements per dimension.

    Raises:
        PlacementError: The tensor is partial, so no rank holds final values.
    """
    if spec.layout.partial:
        raise PlacementError(
            f"a tensor in layout {spec.layout} holds no final values to save; "
            "write x.redistribute(placements=[Replicate(), …]) first"
        )
    note_place()
    coordinate = spec.coordinate
    if coordinate is None:
        return torch.Size([0] * spec.ndim), torch.Size(spec.shape)
    box = spec.layout.local_box(spec.shape, mesh_shape(spec.mesh), coordinate)
    return torch.Size([end - begin for begin, end in box]), torch.Size([begin for begin, _ in box])


__all__ = ["Spec", "chunk", "contiguous_stride", "define_local_sizes"]
