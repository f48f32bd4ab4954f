"""How process groups relate: which group spans the axes of two others, and what a collective over it costs.

A graph holds only the names of groups. The members that one rank finds under these names do not determine what another
rank finds there, and ranks that rewrote their graphs differently would hang. Mesh axes are the same on all ranks, so
every question here is about axes. `run` is given the meshes, and they are known while its passes run (`known`). Nothing
is known of a group that belongs to none of them, and no rewrite that needs such knowledge fires.

Costs of collectives are compared in seconds per byte over the links of their axes. Where lengths do not divide evenly,
sizes may differ between ranks, so no decision may depend on sizes.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from dtensor.job.groups import group_size
from dtensor.prices import links
from dtensor.prices.links import Network
from dtensor.prices.machine import MACHINES, Machine

Axes = tuple[int, ...]


@dataclass(frozen=True)
class MeshGroups:
    """The groups of one mesh.

    Attributes:
        names: pairs of axes and the name of this rank's group over them. The axes ascend, and the group numbers its
            ranks with the last axis varying fastest.
        network: sizes and links of the axes (`dtensor.prices.links`).
        machine: what a rank computes with, if it was measured.
    """

    names: tuple[tuple[Axes, str], ...]
    network: Network
    machine: Machine | None = None


@dataclass(frozen=True)
class Product:
    """Two groups without a common axis, and the group over the axes of both.

    Attributes:
        whole: name of the group over the axes of both.
        first: name of the first group.
        second: name of the second group.
        nested: whether `whole` numbers its ranks with those of `second` varying fastest.
        covers: whether every other axis of the mesh has a single rank. Only then does a tensor gathered or reduced over
            `whole` have the same length on all ranks.
    """

    whole: str
    first: str
    second: str
    nested: bool
    covers: bool
    _network: Network
    _axes: Mapping[str, Axes]

    def seconds(self, op: str, group: str) -> float:
        """Return the seconds per byte of `op` over `group`, one of the three; bytes are those of `links.wire_bytes`."""
        return self._network.terms(op, self._axes[group])[1]


_meshes: ContextVar[tuple[MeshGroups, ...]] = ContextVar("dtensor_mesh_groups", default=())


@contextmanager
def known(meshes: Iterable[MeshGroups]) -> Iterator[None]:
    """Make `meshes` known to the passes that run inside this context. All ranks must give the same meshes."""
    token = _meshes.set(tuple(meshes))
    try:
        yield
    finally:
        _meshes.reset(token)


def _places(*groups: str) -> Iterator[tuple[MeshGroups, list[Axes]]]:
    """Yield the known meshes that have all of `groups`, with the axes of each group."""
    for mesh in _meshes.get():
        axes = {name: axes for axes, name in mesh.names}
        if all(name in axes for name in groups):
            yield mesh, [axes[name] for name in groups]


def disjoint(a: str, b: str) -> bool:
    """Whether two groups are known to have no axis in common. Then all ranks of one group have the same position within
    their groups of the other."""
    return any(not set(p) & set(q) for _, (p, q) in _places(a, b))


def within(part: str, wide: str) -> bool:
    """Whether on every rank the ranks of group `part` are known to be among those of group `wide`."""
    return part == wide or any(set(p) <= set(w) for _, (p, w) in _places(part, wide))


def product(first: str, second: str) -> Product | None:
    """Return the product of two groups that have no axis in common; None if no group over the axes of both is known."""
    found = [_product(mesh, p, q) for mesh, (p, q) in _places(first, second)]
    return min(filter(None, found), key=lambda f: f.covers, default=None)


def quotient(whole: str, first: str) -> Product | None:
    """Return the product given its whole and its first group; the second group is over the remaining axes. None if
    unknown."""
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
    """Estimate the time of `op` over `group` in seconds. `size` is in bytes as in `links.wire_bytes`; the link is the
    default one if none is known."""
    for mesh, (axes,) in _places(group):
        fixed, per_byte = mesh.network.terms(op, axes)
        return fixed + per_byte * size
    return links.seconds(op, size, group_size(group))


def machine(device: str) -> Machine:
    """Return what a rank computes with: as measured for the first known mesh that was, or else the usual one."""
    return next((mesh.machine for mesh in _meshes.get() if mesh.machine is not None), MACHINES[device])


def link(group: str) -> links.Link:
    """Return the link of a group; the default one if none is known."""
    return next((mesh.network.link(axes) for mesh, (axes,) in _places(group)), links.DEFAULT)


def falls(before: float, after: float) -> bool:
    """Whether `after` is less than `before`, apart from rounding."""
    return after < before * (1 - 1e-9)


def grows(before: float, after: float) -> bool:
    """Whether `after` is more than `before`, apart from rounding."""
    return falls(after, before)


__all__ = [
    "MeshGroups",
    "Product",
    "disjoint",
    "falls",
    "grows",
    "known",
    "link",
    "machine",
    "product",
    "quotient",
    "seconds",
    "within",
]
