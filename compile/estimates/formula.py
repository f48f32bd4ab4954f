"""What a collective costs as a formula in the sizes of mesh axes, and of symbolic sizes where a graph has them.

A collective that tracing a DTensor made knows the global lengths of the buffer that it is priced by, and which axes
cut them (`dtensor.mesh.provenance.Moved`). From these follow bytes and seconds for other meshes. Passes may have made
another collective of it: a formula is given only if it says, for the mesh at hand, what is really sent.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import sympy

from dtensor.layout.cost import WORK, wire_bytes
from dtensor.mesh.provenance import Moved
from dtensor.passes.graph import groups
from dtensor.torch_private.symbolic_sizes import hint, size_formula

from .traffic import Sent


@dataclass(frozen=True)
class Formula:
    """Bytes that each rank sends, and estimated seconds. Symbols are names of axes, and of sizes of inputs."""

    bytes: sympy.Expr
    seconds: sympy.Expr


def formula(s: Sent, moves: Sequence[Moved | None]) -> Formula | None:
    """The formula of what is sent, which stands for the steps `moves`; None if they do not give it."""
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
    """Bytes of the buffer that prices a step; `axis` gives the size of an axis, `length` that of a cut dimension."""
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
