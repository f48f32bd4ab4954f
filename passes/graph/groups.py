"""How process groups are made of each other: which group spans the axes of two, and what a collective costs there.

A graph names groups only, and from the members that one rank sees under these names it cannot be told what another
rank sees: ranks that rewrote differently would hang. The axes of a mesh are the same on all ranks, so everything here
is asked of axes. `run` is given what is known of meshes, and it is known while the passes run (`known`); of groups that
belong to no known mesh nothing is, and no rewrite that needs it fires.

The cost of a collective is compared by its seconds per byte over the links of its axes: sizes may differ between
ranks where lengths do not divide, and must decide nothing.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from dtensor.layout import cost
from dtensor.layout.cost import Network
from dtensor.mesh.groups import group_size

Axes = tuple[int, ...]


@dataclass(frozen=True)
class MeshGroups:
    """The groups of one mesh.

    Attributes:
        names: (axes, name of this rank's group over them); axes ascend, and the group's ranks are numbered with the
            last axis fastest.
        network: sizes and links of the axes (`dtensor.layout.cost`).
    """

    names: tuple[tuple[Axes, str], ...]
    network: Network


@dataclass(frozen=True)
class Product:
    """Two groups without a common axis, and the group over the axes of both.

    Attributes:
        whole, first, second: names of the three.
        nested: whether the ranks of `whole` are numbered with those of `second` fastest.
        covers: whether no other axis of the mesh has more than one rank. Only then is what is gathered over `whole`, or
            reduced over it, of one length on all ranks.
    """

    whole: str
    first: str
    second: str
    nested: bool
    covers: bool
    _network: Network
    _axes: Mapping[str, Axes]

    def seconds(self, op: str, group: str) -> float:
        """What `op` over one of the three costs per byte, of the size that `cost.wire_bytes` names."""
        return self._network.terms(op, self._axes[group])[1]


_meshes: ContextVar[tuple[MeshGroups, ...]] = ContextVar("dtensor_mesh_groups", default=())


@contextmanager
def known(meshes: Iterable[MeshGroups]) -> Iterator[None]:
    """Let the passes that run inside know these meshes; all ranks give the same ones."""
    token = _meshes.set(tuple(meshes))
    try:
        yield
    finally:
        _meshes.reset(token)


def _places(*groups: str) -> Iterator[tuple[MeshGroups, list[Axes]]]:
    """The known meshes that have all of `groups`, with the axes of each."""
    for mesh in _meshes.get():
        axes = {name: axes for axes, name in mesh.names}
        if all(name in axes for name in groups):
            yield mesh, [axes[name] for name in groups]


def disjoint(a: str, b: str) -> bool:
    """Whether two groups are known to have no axis in common: all ranks of one then have the same place in theirs of
    the other."""
    return any(not set(p) & set(q) for _, (p, q) in _places(a, b))


def within(part: str, wide: str) -> bool:
    """Whether the ranks of the group `part` are known to be among those of `wide`, on every rank."""
    return part == wide or any(set(p) <= set(w) for _, (p, w) in _places(part, wide))


def product(first: str, second: str) -> Product | None:
    """The group over the axes of both, which have none in common; None if no such group is known."""
    found = [_product(mesh, p, q) for mesh, (p, q) in _places(first, second)]
    return min(filter(None, found), key=lambda f: f.covers, default=None)


def quotient(whole: str, first: str) -> Product | None:
    """The product whose whole and first part are given, so that `second` is over the other axes; None if unknown."""
    for mesh, (w, p) in _places(whole, first):
        if set(p) < set(w):
            return _product(mesh, p, tuple([a for a in w if a not in p]))
    return None


def _product(mesh: MeshGroups, first: Axes, second: Axes) -> Product | None:
    whole = tuple(sorted(first + second))
    names = dict(mesh.names)
    if set(first) & set(second) or whole not in names or second not in names:
        return None
    w, p, q = names[whole], names[first], names[second]
    others = [n for a, n in enumerate(mesh.network.sizes) if a not in whole]
    covers, axes = all(n == 1 for n in others), {w: whole, p: first, q: second}
    return Product(w, p, q, first + second == whole, covers, mesh.network, axes)


def seconds(op: str, size: float, group: str) -> float:
    """Estimated time of `op` over `group`, `size` as in `cost.wire_bytes`; over the default link if none is known."""
    for mesh, (axes,) in _places(group):
        fixed, per_byte = mesh.network.terms(op, axes)
        return fixed + per_byte * size
    return cost.seconds(op, size, group_size(group))


def link(group: str) -> cost.Link:
    """The link of a group; the default one if none is known."""
    return next((mesh.network.link(axes) for mesh, (axes,) in _places(group)), cost.DEFAULT)


def falls(before: float, after: float) -> bool:
    """Whether a cost is less afterwards, rounding aside."""
    return after < before * (1 - 1e-9)


def grows(before: float, after: float) -> bool:
    """Whether a cost is more afterwards, rounding aside."""
    return falls(after, before)


__all__ = [
    "MeshGroups",
    "Product",
    "disjoint",
    "falls",
    "grows",
    "known",
    "link",
    "product",
    "quotient",
    "seconds",
    "within",
]
