"""Sizes of local tensors while a graph of symbolic sizes is traced: the same symbols, values and guards on every rank.

A dimension of symbolic global length that an axis cuts has a local length that is a symbol of its own. Compiled code
reads it from the tensors that it is given, so one graph is right for every length, whether the axis divides it or not,
and for shards of length 1 and 0. While the graph is traced, all ranks take the symbol to be what the first rank has,
the length of the longest shard. So nothing in a trace follows from what this rank has, and all ranks trace alike.

What the trace found out about local lengths has to hold on every rank, and all ranks have to see it alike when they
choose a graph. So a guard is asked of the global length: it holds where it holds on the first rank, on the one with the
last shard that is not empty, and on the last. All shards between these are as long as the first. What would hold on
some ranks only is never taken for granted: the lengths it is about become numbers, on all ranks.

    length of a shard of s:  c = ceil(s / n);  rank i has min(c, s - i c), but no less than 0          (torch.chunk)
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import product
from typing import Any

import sympy
import torch

from ..layout.chunks import chunk_length
from ..torch_private.symbolic_sizes import (
    CeilDiv,
    FloorDiv,
    Max,
    Min,
    Mod,
    ShapeEnv,
    assumed_size,
    before_guards,
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
from .groups import group_rank, group_size
from .operator_library import library

ATTRIBUTE = "dtensor_lengths"
"""Attribute of the environment in which a trace keeps its symbols: its `_Lengths`, which go with it."""


_guarded: ContextVar[bool] = ContextVar("guarded", default=False)


@contextmanager
def divisibility_guarded() -> Iterator[None]:
    """Context in which a trace guards whether groups divide lengths: for programs that are to hold no operators of
    ours, which lengths of parts need where a group does not."""
    before = _guarded.set(True)
    try:
        yield
    finally:
        _guarded.reset(before)


class _Lengths:
    """The local lengths of one trace.

    Attributes:
        found: (global length, group, whether of the first rank) -> local length.
        made_of: symbol of a local length -> the same.
    """

    def __init__(self, env: ShapeEnv) -> None:
        self.env = env
        self.found: dict[tuple[sympy.Expr, str, bool], torch.SymInt] = {}
        self.made_of: dict[sympy.Symbol, tuple[sympy.Expr, str, bool]] = {}
        before_guards(env, self.made_of.keys(), self.hold_on_all_ranks)
        guards_written_by(env, self.on_all_ranks, self.made_of.keys())
        on_replaced_sizes(env, check=self.hold_on_all_ranks, number=self.settle, other=self.unite)

    def of(self, size: torch.SymInt, group: str, first: bool) -> torch.SymInt:
        """The length of this rank's part of `size`, or of the first rank's."""
        key = size.node.expr, group, first
        found = self.found.get(key)
        if found is None:  # a guard may have replaced symbols since
            found = next((x for (e, *k), x in self.found.items() if (self.env.replace(e), *k) == key), None)
        if found is None:
            whole, n = hint(size), group_size(group)
            # Where ranks have parts of 1 and 0, neither is to be taken for what all have.
            least = 1 if whole == n and self._is_even(size) else 2
            found = assumed_size(self.env, f"part of {key}", max(chunk_length(whole, n, 0), least), least)
            self.made_of[found.node.expr] = key
        self.found[key] = found
        return found

    def _is_even(self, size: torch.SymInt) -> bool:
        """Whether all ranks have what `size` is taken to be: the local lengths that it is made of are all even."""
        wholes = [self.made_of[s] for s in self._parts_in(size.node.expr)]
        return all(hint(size_of(size, whole)) % group_size(group) == 0 for whole, group, _ in wholes)

    def unite(self) -> None:
        """Let the trace know parts as one whose wholes it has learnt to be equal. (Parts stand after their wholes.)"""
        parts: dict[tuple[sympy.Expr, str, bool], torch.SymInt] = {}
        for (expr, group, first), part in list(self.found.items()):
            one = parts.setdefault((self.env.replace(expr), group, first), part)
            if one.node.expr != part.node.expr:
                replace_size(part, one)

    def settle(self) -> None:
        """Let the trace know parts by their whole where it has learnt that the group divides it, or its number."""
        for (expr, group, first), part in list(self.found.items()):
            whole = size_of(part, self.env.replace(expr))
            if _is_number(whole):
                replace_size(part, local_length(hint(whole), group, first=first))
            elif divides(group_size(group), whole):
                quotient: Any = FloorDiv(whole.node.expr, group_size(group))
                replace_size(part, size_of(part, quotient))

    def on_all_ranks(self, guard: sympy.Basic) -> sympy.Basic:
        """A condition that local lengths occur in, as one on global lengths: that it holds on every rank."""
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
        """Have the trace be for the present sizes alone if a condition on local lengths, which holds for what the trace
        takes them to be, does not hold on every rank: each rank then goes by its own."""
        example = self.env.backed_var_to_val
        if (
            guard.free_symbols.isdisjoint(self.made_of.keys())
            or self.on_all_ranks(guard).xreplace(example) == sympy.true
        ):
            return
        for s in sorted(self._wholes(guard), key=str):
            self.env.evaluate_expr(sympy.Eq(s, example[s]))

    def _wholes(self, expr: sympy.Basic) -> set[Any]:
        """The symbols that the local lengths in `expr` are made of, as far as the trace knows, and are no such."""
        wholes: set[Any] = set()
        todo: list[Any] = self._parts_in(expr)
        while todo:
            symbols = self.env.replace(self.made_of[todo.pop()][0]).free_symbols
            todo += symbols & self.made_of.keys()
            wholes |= symbols - self.made_of.keys()
        return wholes

    def _parts_in(self, expr: sympy.Basic) -> list[sympy.Symbol]:
        """The local lengths that occur in `expr`, and what they are parts of, later ones first."""
        used: set[Any] = set()
        todo: list[Any] = list(expr.free_symbols)
        while todo:
            s = todo.pop()
            if s in self.made_of and s not in used:
                used.add(s)
                todo += self.made_of[s][0].free_symbols
        return [s for s in reversed(self.made_of) if s in used]

    def _places(self, group: str, used: list[sympy.Symbol], before: list[str]) -> list[sympy.Expr]:
        """The ranks of the group that are asked: the first, the last, and those with a last shard that is not empty.

        Where parts over the groups `before` are cut again, that follows from the places in those. Of parts of what is a
        part over this group or a later one already, all are asked: each rank cuts another length."""
        n = group_size(group)
        ends = []
        for s in used:
            size, cut_by, first = self.made_of[s]
            if cut_by != group or first or known_true(self.env, sympy.Eq(Mod(size, n), 0)):
                continue
            wholes = [self.made_of[whole] for whole in self._parts_in(size)]
            if any(not alike and over not in before for _, over, alike in wholes):
                return [sympy.Integer(rank) for rank in range(n)]
            ends.append(Max(FloorDiv(size - 1, Max(CeilDiv(size, n), 1)), 0))
        return list(dict.fromkeys([sympy.Integer(0), *ends, sympy.Integer(n - 1)]))

    def _at(self, guard: sympy.Basic, used: list[sympy.Symbol], at: dict[str, sympy.Expr]) -> sympy.Basic:
        while parts := [s for s in used if s in guard.free_symbols]:
            for s in parts:
                size, group, first = self.made_of[s]
                step, place = CeilDiv(size, group_size(group)), at[group]
                length = step if first or place == 0 else Max(Min(step, size - place * step), 0)
                guard = guard.xreplace({s: length})
        return guard


def _lengths(env: ShapeEnv) -> _Lengths:
    found = vars(env).get(ATTRIBUTE)
    if found is None:
        found = _Lengths(env)
        setattr(env, ATTRIBUTE, found)
    return found


def divides(n: int, size: Any) -> bool:
    """Whether `n` divides `size`; of a symbolic size, whether the trace knows that."""
    if isinstance(size, torch.SymInt) and not _guarded.get():
        return known_true(size.node.shape_env, sympy.Eq(Mod(size.node.expr, n), 0))
    return bool(size % n == 0)


def require_nonempty(size: torch.SymInt, group_sizes: Iterable[int]) -> None:
    """Let what is traced hold only for such a length that every rank has a part of it, where groups of these sizes cut
    it one after the other. It holds for the present one."""
    last: Any = size.node.expr
    for n in group_sizes:
        step: Any = CeilDiv(last, n)
        last = last - (n - 1) * step
    evaluated(size, last >= 1)


def _is_number(size: torch.SymInt) -> bool:
    """Whether a trace knows that a size can only be what it is now. (To compare sizes would be a part of the trace.)"""
    expr = size.node.expr
    return expr.is_number or (has_hint(size) and known_true(size.node.shape_env, sympy.Eq(expr, hint(size))))


def local_length(size: Any, group: str, *, first: bool = False) -> Any:
    """The length of this rank's part of `size` elements that the ranks of `group` cut as `torch.chunk` does, or of the
    first rank's, which is the longest.

    Of a symbolic size a symbol, unless the group is known to divide it. A size that is known to be a number, as one is
    that was compared with another tensor's, is that number, and a part of it is what this rank has.
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
        return chunk_length(size, n, 0 if first else group_rank(group))
    length = _lengths(size.node.shape_env).of(size, group, first)
    if not is_written(length.node.expr):
        torch.ops.dtensor.local_length(traced_size(size), group, first)
    return traced_size(length)


def written(size: Any) -> Any:
    """A size as the graph that is traced, if one is, can compute it: local lengths are looked up in it before."""
    if isinstance(size, torch.SymInt) and is_traced():
        made_of = _lengths(size.node.shape_env).made_of
        for symbol in sorted(size.node.expr.free_symbols & made_of.keys(), key=str):
            if not is_written(symbol):
                whole, group, first = made_of[symbol]
                torch.ops.dtensor.local_length(written(size_of(size, whole)), group, first)
    return traced_size(size)


def local_lengths(env: ShapeEnv) -> dict[sympy.Symbol, tuple[sympy.Expr, str, bool]]:
    """The symbols of a trace that are local lengths -> what `dtensor::local_length` computes them from."""
    found = vars(env).get(ATTRIBUTE)
    return {} if found is None else found.made_of


def define_local_length(mine: Any, size: Any, groups: tuple[str, ...]) -> None:
    """Let a trace know that `mine`, a length of an input's local tensor, is this rank's part of `size`.

    `groups` cut it one after the other. What torch made for it is replaced.
    """
    if isinstance(mine, torch.SymInt):
        for group in groups:
            size = local_length(size, group)
        replace_size(mine, size)


library.define("local_length(SymInt size, str group, bool first) -> SymInt")


def _local_length(size: int, group: str, first: bool) -> int:
    return chunk_length(size, group_size(group), 0 if first else group_rank(group))


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
