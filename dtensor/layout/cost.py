"""Cost of a redistribution step: alpha-beta, seconds from bytes and ranks, for each link of a mesh.

    time = start + alpha * rounds + bytes on the wire per rank / bandwidth

with the algorithms of Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH"
(2005): all_gather and reduce_scatter send (n-1)/n of the full buffer in ceil(log2 n) rounds (recursive doubling and
halving), all_reduce twice that, all_to_all (n-1)/n of the local buffer in ceil(log2 n) rounds (Bruck's algorithm for
short messages, of which rounds are the cost; for long ones, sent pairwise, bytes are), collective_permute the local
buffer in one round. `shard` and `partial` send nothing and cost a copy. `start` is what a collective costs before its
first byte; it is why one collective over two axes is cheaper than two.

The table `WORK` holds for numbers and for sympy expressions alike. Nothing here differs between ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from typing import Any


@dataclass(frozen=True)
class Link:
    """What a wire and a memory cost.

    Attributes:
        alpha: seconds per message round.
        bandwidth: bytes per second on the wire.
        memory: bytes per second of a local copy.
        launch: seconds to start a local copy.
        start: seconds to start a collective.
    """

    alpha: float = 5e-6
    bandwidth: float = 10e9
    memory: float = 100e9
    launch: float = 1e-6
    start: float = 5e-6

    def and_(self, other: "Link") -> "Link":
        """The link of a group that spans both: the slower of the two in everything."""
        return Link(
            max(self.alpha, other.alpha),
            min(self.bandwidth, other.bandwidth),
            min(self.memory, other.memory),
            max(self.launch, other.launch),
            max(self.start, other.start),
        )


INTRA = DEFAULT = Link()
"""Between the ranks of one host. Orders of magnitude; what was measured is given to `dtensor.prepare`. A round costs as
much as a start, so that reducing more than is kept never pays, however small the tensor."""
INTER = Link(alpha=10e-6, bandwidth=2.5e9, start=10e-6)
"""Between hosts."""


def log2_ceil(n: int) -> int:
    """Rounds of recursive doubling over `n` ranks."""
    return (n - 1).bit_length()


Rounds = Callable[[Any, Callable[[Any], Any]], Any]

WORK: dict[str, tuple[Rounds, Callable[[Any], Any]]] = {
    "all_gather": (lambda n, log2: log2(n), lambda n: (n - 1) / n),
    "reduce_scatter": (lambda n, log2: log2(n), lambda n: (n - 1) / n),
    "all_reduce": (lambda n, log2: 2 * log2(n), lambda n: 2 * (n - 1) / n),
    "all_to_all": (lambda n, log2: log2(n), lambda n: (n - 1) / n),
    "collective_permute": (lambda n, log2: 1, lambda n: 1),
}
"""Collective -> its rounds over n ranks, and the part of the buffer that each rank sends."""


def wire_bytes(op: str, size: Any, n: Any) -> Any:
    """Bytes each rank sends in `op` over `n` ranks; numbers or sympy expressions.

    `size` in bytes: the gathered result of all_gather, the input of every other operator.
    """
    return WORK[op][1](n) * size if op in WORK else 0.0


def terms(op: str, n: int, link: Link = DEFAULT) -> tuple[float, float]:
    """Seconds that `op` over `n` ranks takes whatever the size, and seconds per byte of `size` as in `wire_bytes`."""
    if n == 1:
        return 0.0, 0.0
    if op not in WORK:
        return link.launch, 1 / link.memory
    return link.start + link.alpha * WORK[op][0](n, log2_ceil), wire_bytes(op, 1.0, n) / link.bandwidth


def seconds(op: str, size: float, n: int, link: Link = DEFAULT) -> float:
    """Estimated time of `op` over `n` ranks; `size` as in `wire_bytes`, of `shard` and `partial` what is written."""
    fixed, per_byte = terms(op, n, link)
    return fixed + per_byte * size


@dataclass(frozen=True, eq=False)
class Network:
    """What a plan has to know of a mesh. Build with `Network.of`, which interns: equal networks are one object.

    Attributes:
        sizes: sizes of the mesh axes.
        links: the link along each axis.
        merged: the sets of two or more axes, each ascending and of sizes above one, that have a process group of
            their own, whose ranks are numbered with the last axis fastest.
    """

    sizes: tuple[int, ...]
    links: tuple[Link, ...]
    merged: frozenset[tuple[int, ...]]
    _known: dict[Any, Any] = field(default_factory=dict[Any, Any], init=False, repr=False)

    @staticmethod
    def of(sizes: tuple[int, ...], links: tuple[Link, ...] | Link = DEFAULT, merged: Any = ()) -> "Network":
        """The network with these attributes; one link stands for all axes.

        Raises:
            ValueError: there is not one link for each axis.
        """
        links = (links,) * len(sizes) if isinstance(links, Link) else tuple(links)
        if len(links) != len(sizes):
            raise ValueError(f"the mesh has {len(sizes)} axes but {len(links)} links were given; write one for each")
        key = (tuple(sizes), links, frozenset([tuple(axes) for axes in merged]))
        found = _networks.get(key)
        if found is None:
            found = _networks.setdefault(key, Network(*key))
        return found

    def size(self, axes: tuple[int, ...]) -> int:
        """Number of ranks of the group over `axes`."""
        found = self._known.get(axes)
        if found is None:
            found = self._known[axes] = prod([self.sizes[a] for a in axes])
        return found

    def terms(self, op: str, axes: tuple[int, ...]) -> tuple[float, float]:
        """As the function `terms`, of `op` over the group over `axes`."""
        found = self._known.get((op, axes))
        if found is None:
            found = self._known[op, axes] = terms(op, self.size(axes), self.link(axes))
        return found

    def link(self, axes: tuple[int, ...]) -> Link:
        """The link of the group over `axes`: its slowest."""
        found = self.links[axes[0]]
        for a in axes[1:]:
            found = found.and_(self.links[a])
        return found


_networks: dict[tuple[Any, ...], Network] = {}

__all__ = ["DEFAULT", "INTER", "INTRA", "WORK", "Link", "Network", "log2_ceil", "seconds", "terms", "wire_bytes"]
