"""The cost model: an alpha-beta estimate of the seconds that a redistribution step takes, for each link of a mesh.

    time = start + alpha * rounds + bytes on the wire per rank / bandwidth

The counts are those of Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH"
(2005). All-gather and reduce-scatter send (n-1)/n of the full buffer in ceil(log2 n) rounds (recursive doubling and
halving), and all-reduce takes twice that. All-to-all sends (n-1)/n of the local buffer in ceil(log2 n) rounds: that is
Bruck's algorithm for short messages, where rounds dominate; long messages are sent pairwise, where bytes dominate.
`collective_permute` sends the local buffer in one round. `shard` and `partial` send nothing and cost one copy. `start`
is the cost of a collective before its first byte; it makes one collective over two axes cheaper than two collectives.

The table `WORK` works for numbers and for sympy expressions. Nothing here differs between ranks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from ..errors import ArgumentError


@dataclass(frozen=True)
class Link:
    """The cost constants of a network link and of local memory.

    Attributes:
        alpha: Seconds per message round.
        bandwidth: Bytes per second on the wire.
        memory: Bytes per second of a local copy.
        launch: Seconds to start a local copy.
        start: Seconds to start a collective.
    """

    alpha: float = 5e-6
    bandwidth: float = 10e9
    memory: float = 100e9
    launch: float = 1e-6
    start: float = 5e-6

    def and_(self, other: "Link") -> "Link":
        """The link of a group that spans both: the slower of the two in every constant."""
        return Link(
            max(self.alpha, other.alpha),
            min(self.bandwidth, other.bandwidth),
            min(self.memory, other.memory),
            max(self.launch, other.launch),
            max(self.start, other.start),
        )


INTRA = DEFAULT = Link()
"""The default link between the ranks of one host. Only orders of magnitude: pass measured links to `dtensor.prepare`.
A round costs as much as a start, so reducing more than is kept never pays off, however small the tensor."""
INTER = Link(alpha=10e-6, bandwidth=2.5e9, start=10e-6)
"""The default link between hosts."""


def log2_ceil(n: int) -> int:
    """Number of rounds of recursive doubling over `n` ranks."""
    return (n - 1).bit_length()


Rounds = Callable[[Any, Callable[[Any], Any]], Any]

WORK: dict[str, tuple[Rounds, Callable[[Any], Any]]] = {
    "all_gather": (lambda n, log2: log2(n), lambda n: (n - 1) / n),
    "reduce_scatter": (lambda n, log2: log2(n), lambda n: (n - 1) / n),
    "all_reduce": (lambda n, log2: 2 * log2(n), lambda n: 2 * (n - 1) / n),
    "all_to_all": (lambda n, log2: log2(n), lambda n: (n - 1) / n),
    "collective_permute": (lambda n, log2: 1, lambda n: 1),
}
"""Collective -> its number of rounds over n ranks, and the fraction of the buffer that each rank sends."""


def wire_bytes(op: str, size: Any, n: Any) -> Any:
    """Bytes that each rank sends in `op` over `n` ranks.

    Args:
        op: The name of a step. Steps that are not collectives send nothing.
        size: Bytes of the gathered result of `all_gather`, of the input of every other operator. A number or a sympy
            expression.
        n: Number of ranks, a number or a sympy expression.
    """
    return WORK[op][1](n) * size if op in WORK else 0.0


def moved(senders: Sequence[int]) -> float:
    """The part of a group's buffers that a `collective_permute` sends: a rank may keep its own."""
    return sum([sender != rank for rank, sender in enumerate(senders)]) / len(senders)


def terms(op: str, n: int, link: Link = DEFAULT) -> tuple[float, float]:
    """Fixed seconds of `op` over `n` ranks, and seconds per byte of `size` (as in `wire_bytes`)."""
    if n == 1:
        return 0.0, 0.0
    if op not in WORK:
        return link.launch, 1 / link.memory
    return link.start + link.alpha * WORK[op][0](n, log2_ceil), wire_bytes(op, 1.0, n) / link.bandwidth


def seconds(op: str, size: float, n: int, link: Link = DEFAULT) -> float:
    """Estimated seconds of `op` over `n` ranks.

    `size` is as in `wire_bytes`; for `shard` and `partial` it is the bytes written.
    """
    fixed, per_byte = terms(op, n, link)
    return fixed + per_byte * size


@dataclass(frozen=True, eq=False)
class Network:
    """What the planner needs to know about a mesh.

    Build with `Network.of`, which interns: equal networks are the same object.

    Attributes:
        sizes: Sizes of the mesh axes.
        links: The link along each axis.
        merged: Sets of two or more axes that have a process group of their own. The axes of a set ascend and have
            sizes above one; the group's ranks are numbered with the last axis fastest.
    """

    sizes: tuple[int, ...]
    links: tuple[Link, ...]
    merged: frozenset[tuple[int, ...]]
    _known: dict[Any, Any] = field(default_factory=dict[Any, Any], init=False, repr=False)

    @staticmethod
    def of(sizes: tuple[int, ...], links: tuple[Link, ...] | Link = DEFAULT, merged: Any = ()) -> "Network":
        """The interned network with these attributes. A single link applies to all axes.

        Raises:
            ValueError: The number of links is not the number of axes.
        """
        links = (links,) * len(sizes) if isinstance(links, Link) else tuple(links)
        if len(links) != len(sizes):
            raise ArgumentError(f"the mesh has {len(sizes)} axes but {len(links)} links were given; write one for each")
        key = (tuple(sizes), links, frozenset([tuple(axes) for axes in merged]))
        found = _networks.get(key)
        if found is None:
            found = _networks.setdefault(key, Network(*key))
        return found

    def size(self, axes: tuple[int, ...]) -> int:
        """Number of ranks in the group over `axes`."""
        found = self._known.get(axes)
        if found is None:
            found = self._known[axes] = prod([self.sizes[a] for a in axes])
        return found

    def terms(self, op: str, axes: tuple[int, ...]) -> tuple[float, float]:
        """Like the function `terms`, for `op` on the group over `axes`."""
        found = self._known.get((op, axes))
        if found is None:
            found = self._known[op, axes] = terms(op, self.size(axes), self.link(axes))
        return found

    def link(self, axes: tuple[int, ...]) -> Link:
        """The link of the group over `axes`: the slowest of the axes' links in every constant."""
        found = self.links[axes[0]]
        for a in axes[1:]:
            found = found.and_(self.links[a])
        return found


_networks: dict[tuple[Any, ...], Network] = {}

__all__ = [
    "DEFAULT",
    "INTER",
    "INTRA",
    "WORK",
    "Link",
    "Network",
    "log2_ceil",
    "moved",
    "seconds",
    "terms",
    "wire_bytes",
]
