"""The cost of a collective as a formula in the sizes of mesh axes, and in symbolic sizes where a graph has them.

A collective made by tracing a DTensor records the global lengths of the buffer that determines its cost, and the axes
that shard them (`dtensor.mesh.provenance.Moved`). Bytes and seconds for other meshes follow from these. Passes may have
turned it into another collective, so a formula is given only if it yields the bytes that are really sent on the mesh at
hand.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import sympy

from dtensor.mesh.provenance import Moved
from dtensor.passes.graph import groups
from dtensor.prices.links import WORK, wire_bytes
from dtensor.torch_private.symbolic_sizes import hint, size_formula

from .traffic import Sent


@dataclass(frozen=True)
class Formula:
    """The cost of a collective. Symbols are the names of mesh axes and of sizes of inputs.

    Attributes:
        bytes: bytes that each rank sends.
        seconds: estimated time in seconds.
    """

    bytes: sympy.Expr
    seconds: sympy.Expr


def formula(s: Sent, moves: Sequence[Moved | None]) -> Formula | None:
    """Return the formula for `s`, which implements the steps `moves`; None if it does not follow from them."""
    known = [m for m in moves if m is not None]
    if not known or len(known) < len(moves) or s.op not in WORK:
        return None
    now = wire_bytes(s.op, sum([_size(m, _length, m.sizes.__getitem__) for m in known]), len(s.ranks))
    if round(now) != s.bytes or prod([known[0].sizes[a] for a in known[0].axes]) != len(s.ranks):
        return None
    n = prod([_axis(known[0])(a) for a in known[0].axes])
    sent = wire_bytes(s.op, sum([_size(m, _symbolic, _axis(m)) for m in known]), n)
    link = groups.link(s.group)
    time = link.start + link.alpha * WORK[s.op][0](n, _log2) + sent / link.bandwidth
    return Formula(_factored(sympy.sympify(sent)), time)


@lru_cache(1 << 10)
def _factored(x: sympy.Expr) -> sympy.Expr:
    return sympy.factor(x)  # pyright: ignore[reportReturnType]


def _size(m: Moved, length: Callable[[Any, Any, bool], Any], axis: Callable[[int], Any]) -> Any:
    """Bytes of the buffer that determines a step's cost; `axis` gives the size of an axis, `length` that of a sharded
    dim."""
    found = m.itemsize * prod([axis(a) for a in m.count])
    for whole, axes in m.lengths:
        even = hint(whole) % prod([m.sizes[a] for a in axes]) == 0
        found = found * length(whole, prod([axis(a) for a in axes]), even)
    return found


def _length(whole: Any, parts: int, even: bool) -> int:
    return -(-hint(whole) // parts)


def _symbolic(whole: Any, parts: Any, even: bool) -> Any:
    cut = size_formula(whole) / sympy.sympify(parts)
    return cut if even else sympy.ceiling(cut)


def _axis(m: Moved) -> Callable[[int], sympy.Symbol]:
    return lambda a: sympy.Symbol(m.names[a], positive=True, integer=True)


def _log2(n: Any) -> Any:
    return sympy.ceiling(sympy.log(n, 2))


__all__ = ["Formula", "formula"]
