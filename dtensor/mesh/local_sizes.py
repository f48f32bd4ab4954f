"""Sizes of local tensors while a graph with symbolic sizes is traced: the same symbols, values and guards on all ranks.

If a dimension of symbolic global length is sharded, its local length is a symbol of its own. Compiled code reads it
from its input tensors, so one graph is correct for every length, divisible or not, and for shards of length 1 and 0.
During the trace, all ranks take the value of the symbol to be that of the first rank, the length of the longest shard.
So nothing in a trace depends on this rank's own length, and all ranks trace the same graph.

What a trace concludes about local lengths must hold on every rank, and all ranks must evaluate it equally when they
choose a graph. A guard is therefore rewritten in terms of the global length: it must hold on the first rank, on the
rank with the last non-empty shard, and on the last rank. All shards in between are as long as the first. A condition
that would hold on some ranks only is never assumed: the lengths in it become numbers, on all ranks.

    length of a shard of s:  c = ceil(s / n);  rank i has min(c, s - i c), but no less than 0          (torch.chunk)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import product
from typing import Any

import torch

from ..job.groups import group_rank, group_size
from ..layout.chunks import chunk_length, own_length
from ..torch_private.on_demand import size_functions as sizes
from ..torch_private.on_demand import symbolic_shapes, sympy
from ..torch_private.symbolic_sizes import (
    around_guards,
    assumed_size,
    evaluated,
    guards_written_by,
    has_hint,
    hint,
    is_traced,
    is_written,
    known_true,
    on_replaced_sizes,
    replace_size,
    size_of,
    traced_size,
)
from .operator_library import library

ATTRIBUTE = "dtensor_lengths"
"""Attribute of a trace's ShapeEnv that holds its `_Lengths`, so that they live as long as it."""


_guarded: ContextVar[bool] = ContextVar("guarded", default=False)


@contextmanager
def divisibility_guarded() -> Iterator[None]:
    """Context in which a trace guards whether a group divides a length.

    For programs that must not contain `dtensor::*` operators, which local lengths need if the group does not divide.
    """
    before = _guarded.set(True)
    try:
        yield
    finally:
        _guarded.reset(before)


class _Lengths:
    """The local lengths of one trace.

    Attributes:
        env: The ShapeEnv of the trace.
        found: (global length, group, whether it is the first rank's) -> local length.
        made_of: Symbol of a local length -> that key.
    """

    def __init__(self, env: symbolic_shapes.ShapeEnv) -> None:
        self.env = env
        self.found: dict[tuple[sympy.Expr, str, bool], torch.SymInt] = {}
        self.made_of: dict[sympy.Symbol, tuple[sympy.Expr, str, bool]] = {}
        around_guards(env, self.made_of.keys(), self.hold_on_all_ranks, self.compared)
        guards_written_by(env, self.on_all_ranks, self.made_of.keys())
        on_replaced_sizes(env, check=self.hold_on_all_ranks, number=self.settle, other=self.unite)

    def of(self, size: torch.SymInt, group: str, first: bool) -> torch.SymInt:
        """The length of this rank's shard of `size`, or of the first rank's."""
        key = size.node.expr, group, first
        found = self.found.get(key)
        if found is None:  # a guard may have replaced symbols since
            found = next((x for (e, *k), x in self.found.items() if (self.env.replace(e), *k) == key), None)
        if found is None:
            whole, n = hint(size), group_size(group)
            # If ranks have shards of 1 and 0, the trace must not assume either for all ranks.
            least = 1 if whole == n and self._is_even(size) else 2
            found = assumed_size(self.env, f"part of {key}", max(chunk_length(whole, n, 0), least), least)
            self.made_of[found.node.expr] = key
        self.found[key] = found
        return found

    def _is_even(self, size: torch.SymInt) -> bool:
        """Whether all ranks have the assumed value of `size`: every local length in it comes from an even split."""
        wholes = [self.made_of[s] for s in self._parts_in(size.node.expr)]
        return all(hint(size_of(size, whole)) % group_size(group) == 0 for whole, group, _ in wholes)

    def unite(self) -> None:
        """Unify the local lengths of global lengths that have proved equal. (They are listed after these.)"""
        parts: dict[tuple[sympy.Expr, str, bool], torch.SymInt] = {}
        for (expr, group, first), part in list(self.found.items()):
            one = parts.setdefault((self.env.replace(expr), group, first), part)
            if one.node.expr != part.node.expr:
                replace_size(part, one)

    def compared(self, condition: sympy.Basic) -> None:
        """Settle local lengths if their global length has been compared: it may have proved to be a number, which
        replaces no symbol if it is one of several symbols, or a half of one."""
        if not {self.env.replace(expr) for expr, *_ in self.found}.isdisjoint(condition.args):
            self.settle()

    def settle(self) -> None:
        """Replace local lengths whose global length has proved divisible by the group, or to be a number."""
        for (expr, group, first), part in list(self.found.items()):
            whole = size_of(part, self.env.replace(expr))
            if _is_number(whole):
                replace_size(part, local_length(hint(whole), group, first=first))
            elif divides(group_size(group), whole):
                quotient: Any = sizes.FloorDiv(whole.node.expr, group_size(group))
                replace_size(part, size_of(part, quotient))

    def on_all_ranks(self, guard: sympy.Basic) -> sympy.Basic:
        """Rewrite a condition on local lengths as one on global lengths: that it holds on every rank."""
        used = self._parts_in(guard)
        if not used:
            return guard
        groups = list(dict.fromkeys(self.made_of[s][1] for s in reversed(used)))
        held = []
        for places in product(*[self._places(group, used, groups[:k]) for k, group in enumerate(groups)]):
            at = dict(zip(groups, places))
            held.append(self._at(guard, used, at))
        return sympy.And(*held)

    def hold_on_all_ranks(self, guard: sympy.Basic) -> None:
        """Specialize the trace to the present sizes if a condition on local lengths does not hold on every rank.

        The condition holds for the values that the trace assumes. Once specialized, each rank uses its own lengths.
        """
        example = self.env.backed_var_to_val
        if (
            guard.free_symbols.isdisjoint(self.made_of.keys())
            or self.on_all_ranks(guard).xreplace(example) == sympy.true
        ):
            return
        for s in sorted(self._wholes(guard), key=str):
            self.env.evaluate_expr(sympy.Eq(s, example[s]))

    def _wholes(self, expr: sympy.Basic) -> set[Any]:
        """The symbols that the local lengths in `expr` are computed from and that are not local lengths themselves."""
        wholes: set[Any] = set()
        todo: list[Any] = self._parts_in(expr)
        while todo:
            symbols = self.env.replace(self.made_of[todo.pop()][0]).free_symbols
            todo += symbols & self.made_of.keys()
            wholes |= symbols - self.made_of.keys()
        return wholes

    def _parts_in(self, expr: sympy.Basic) -> list[sympy.Symbol]:
        """The local lengths in `expr`, and those that they are in turn computed from, later ones first."""
        used: set[Any] = set()
        todo: list[Any] = list(expr.free_symbols)
        while todo:
            s = todo.pop()
            if s in self.made_of and s not in used:
                used.add(s)
                todo += self.made_of[s][0].free_symbols
        return [s for s in reversed(self.made_of) if s in used]

    def _places(self, group: str, used: list[sympy.Symbol], before: list[str]) -> list[sympy.Expr]:
        """The ranks of the group to check: the first, the last, and those with the last non-empty shard.

        If shards over the groups `before` are split again, the last non-empty shard depends on the ranks chosen there.
        If shards over this group or a later one are split again, all ranks are checked: each splits another length.
        """
        n = group_size(group)
        ends = []
        for s in used:
            size, cut_by, first = self.made_of[s]
            if cut_by != group or first or known_true(self.env, sympy.Eq(sizes.Mod(size, n), 0)):
                continue
            wholes = [self.made_of[whole] for whole in self._parts_in(size)]
            if any(not alike and over not in before for _, over, alike in wholes):
                return [sympy.Integer(rank) for rank in range(n)]
            ends.append(sizes.Max(sizes.FloorDiv(size - 1, sizes.Max(sizes.CeilDiv(size, n), 1)), 0))
        return list(dict.fromkeys([sympy.Integer(0), *ends, sympy.Integer(n - 1)]))

    def _at(self, guard: sympy.Basic, used: list[sympy.Symbol], at: dict[str, sympy.Expr]) -> sympy.Basic:
        while parts := [s for s in used if s in guard.free_symbols]:
            for s in parts:
                size, group, first = self.made_of[s]
                step, place = sizes.CeilDiv(size, group_size(group)), at[group]
                length = step if first or place == 0 else sizes.Max(sizes.Min(step, size - place * step), 0)
                guard = guard.xreplace({s: length})
        return guard


def _lengths(env: symbolic_shapes.ShapeEnv) -> _Lengths:
    found = vars(env).get(ATTRIBUTE)
    if found is None:
        found = _Lengths(env)
        setattr(env, ATTRIBUTE, found)
    return found


def divides(n: int, size: Any) -> bool:
    """Whether `n` divides `size`; for a symbolic size, whether the trace knows that it does."""
    if isinstance(size, torch.SymInt) and not _guarded.get():
        return known_true(size.node.shape_env, sympy.Eq(sizes.Mod(size.node.expr, n), 0))
    return bool(size % n == 0)


def require_nonempty(size: torch.SymInt, group_sizes: Iterable[int]) -> None:
    """Guard that every rank has a non-empty shard of `size` when groups of these sizes split it one after the other.

    This must hold for the present size.
    """
    last: Any = size.node.expr
    for n in group_sizes:
        step: Any = sizes.CeilDiv(last, n)
        last = last - (n - 1) * step
    evaluated(size, last >= 1)


def _is_number(size: torch.SymInt) -> bool:
    """Whether a trace knows that a size can only have its present value. (Comparing sizes would be traced.)"""
    expr = size.node.expr
    return expr.is_number or (has_hint(size) and known_true(size.node.shape_env, sympy.Eq(expr, hint(size))))


def local_length(size: Any, group: str, *, first: bool = False) -> Any:
    """The length of this rank's shard of `size`, split over `group` as by `torch.chunk`.

    A symbolic size gives a symbol, unless the group is known to divide it. If the size is known to be a number, for
    example because it was compared with that of another tensor, the result is this rank's own length as a number.

    Args:
        size: A length in elements, an int or a SymInt.
        group: Name of a process group.
        first: Return the length of the first rank's shard instead, which is the longest.
    """
    n = group_size(group)
    if isinstance(size, torch.SymInt) and _is_number(size):
        _lengths(size.node.shape_env).settle()
        size = hint(size)
    if divides(n, size):
        part = size // n
        if isinstance(size, torch.SymInt):
            _lengths(size.node.shape_env).settle()
            return hint(part) if _is_number(part) else part
        return part
    if not isinstance(size, torch.SymInt):
        return chunk_length(size, n, 0) if first else own_length(size, n, group_rank(group), group)
    length = _lengths(size.node.shape_env).of(size, group, first)
    if not is_written(length.node.expr):
        torch.ops.dtensor.local_length(traced_size(size), group, first)
    return traced_size(length)


def written(size: Any) -> Any:
    """A size in a form that the graph being traced, if any, can compute; local lengths in it are first looked up."""
    if isinstance(size, torch.SymInt) and is_traced():
        made_of = _lengths(size.node.shape_env).made_of
        for symbol in sorted(size.node.expr.free_symbols & made_of.keys(), key=str):
            if not is_written(symbol):
                whole, group, first = made_of[symbol]
                torch.ops.dtensor.local_length(written(size_of(size, whole)), group, first)
    return traced_size(size)


def local_lengths(env: symbolic_shapes.ShapeEnv) -> dict[sympy.Symbol, tuple[sympy.Expr, str, bool]]:
    """The symbols of a trace that are local lengths -> the arguments of `dtensor::local_length` that compute them."""
    found = vars(env).get(ATTRIBUTE)
    return {} if found is None else found.made_of


def define_local_length(mine: Any, size: Any, groups: tuple[str, ...]) -> None:
    """Define `mine`, a length of an input's local tensor, as the length of this rank's shard of `size` in a trace.

    `groups` split `size` one after the other. The symbol that torch made for `mine` is replaced.
    """
    if isinstance(mine, torch.SymInt):
        for group in groups:
            size = local_length(size, group)
        replace_size(mine, size)


library.define("local_length(SymInt size, str group, bool first) -> SymInt")


def _local_length(size: int, group: str, first: bool) -> int:
    n = group_size(group)
    return chunk_length(size, n, 0) if first else own_length(size, n, group_rank(group), group)


def _fake_local_length(size: Any, group: str, first: bool) -> Any:
    if not isinstance(size, torch.SymInt):
        return _local_length(size, group, first)
    return _lengths(size.node.shape_env).of(size, group, first)


library.impl("local_length", _local_length, "CompositeExplicitAutograd")
torch.library.register_fake("dtensor::local_length", _fake_local_length, lib=library)

__all__ = [
    "define_local_length",
    "divides",
    "divisibility_guarded",
    "local_length",
    "local_lengths",
    "require_nonempty",
    "written",
]
