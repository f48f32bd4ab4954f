"""Finds by brute force the right ways to shard a call that its rule does not offer ("refuses").

    call -> every combination of operand states -> the plain operator on each rank's pieces -> right?  offered?

`candidates` checks that everything a rule offers is right; `refused` finds what is right and not offered. It runs
nothing of the library: it splits the operands, calls torch's operator on the pieces of each rank, and compares the
outputs with every possible placement of the expected result. One mesh axis is enough, as a rule treats each axis
separately.
"""

import itertools
import random
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ...dispatch.decision import COMPOSITES, FOREACH
from ...rules.rule import candidates
from .candidates import (
    REDUCE,
    Case,
    OneAxis,
    State,
    as_list,
    call_and_rule,
    cut,
    is_real,
    is_right,
    layout_of,
    mapped,
    tensors,
)

MOST = 700
"""The most combinations that are tried for one call."""
DRAWS = 5
"""Sets of values with which each call runs; a combination may be right by chance with one of them, but not with all."""
TINY = 1e-6
"""Results below this may compare equal to any others."""
UNCHECKED = ("native_batch_norm", "max_pool", "fractional_max_pool", "max_unpool")
"""Parts of the names of operators whose kernels do not check their arguments; on pieces that do not fit they write out
of bounds."""
SIZES = ("size", "input_sizes", "normalized_shape")
"""Names of arguments that hold a shape, of which a rank may need a localized version."""

Localized = tuple[()] | tuple[int, list[Any]]
"""Index of an argument and the value that replaces it; empty to replace none."""


@dataclass(frozen=True)
class Refusal:
    """A right combination that a rule does not offer.

    Attributes:
        operator: name of the operator, such as "aten.mm.default".
        shapes: global shapes of the operands.
        inputs: states of the operands.
        outputs: states of the outputs, the first that were found to be right.
        n: number of ranks on the axis.
    """

    operator: str
    shapes: tuple[tuple[int, ...], ...]
    inputs: tuple[State, ...]
    outputs: tuple[State, ...]
    n: int

    @property
    def pattern(self) -> str:
        """States of the operands, such as "R S(1) P"; documented reasons refer to this text."""
        return " ".join(_text(s) for s in self.inputs)

    def __str__(self) -> Any:
        outs = " ".join(_text(s) for s in self.outputs)
        return f"{self.operator} {[list(s) for s in self.shapes]} on {self.n}: {self.pattern} -> {outs}"


def _text(state: State) -> str:
    return layout_of(state, 9).text


def axis_sizes(case: Case) -> list[int]:
    """Return the numbers of ranks to try: 2, and 3 and 5 if they divide a dim that 2 does not divide."""
    lengths = {s for x in tensors((case.args, case.kwargs)) for s in x.shape if s > 1}
    return [2, *(n for n in (3, 5) if any(s % n == 0 and s % 2 for s in lengths))]


def is_tried(case: Case) -> bool:
    """Return whether the operator should be tried on pieces of any kind.

    Excluded are operators that write to their arguments, which have the rule of the one that does not; operators on
    lists, which run item by item; composite operators; and operators whose kernels are not safe (`UNCHECKED`).
    """
    name = case.func._schema.name
    left = case.func._schema.is_mutable or name.startswith(FOREACH) or name in COMPOSITES
    return not left and not any(part in name for part in UNCHECKED)


def refused(case: Case, n: int) -> list[Refusal]:
    """Return the right combinations that the rule of `case` does not offer on an axis of `n` ranks.

    An operand is Replicate, Shard of a dim that `n` divides, or Partial(sum) if it is floating-point or complex. The
    state of an operand that the rule declares unread does not matter. At most `MOST` combinations are tried, the same
    ones every time. Outputs that hold the same value everywhere prove nothing, so nothing is returned for them.
    """
    _, rule = call_and_rule(case, OneAxis(n))
    operands = tensors((case.args, case.kwargs))
    offered = {_masked(c.inputs, rule.unread) for c in candidates(rule)}
    found = []
    draws = draws_of(case) if any(x.numel() > 1 for x in operands) else []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # for the partial values
        for states in combinations(case, n) if draws else ():
            if _masked(states, rule.unread) not in offered and (outs := _right(draws, states, n)) is not None:
                shapes = tuple(tuple(x.shape) for x in operands)
                found.append(Refusal(str(case.func), shapes, states, outs, n))
    return found


def _masked(states: tuple[State, ...], unread: frozenset[int]) -> tuple[State, ...]:
    return tuple(None if i in unread else s for i, s in enumerate(states))


def combinations(case: Case, n: int) -> list[tuple[State, ...]]:
    """Return the combinations of operand states to try: all, or `MOST` of them, those with few operands that are not
    replicated first."""
    each = [list(_states(x, n)) for x in tensors((case.args, case.kwargs))]
    total = 1
    for states in each:
        total *= len(states)
    if total <= MOST:
        return list(itertools.product(*each))
    chance = random.Random(zlib.crc32(f"{case.func} {each}".encode()))
    few = [
        tuple(dict(where).get(i) for i in range(len(each)))
        for pair in itertools.combinations(range(len(each)), 2)
        for where in itertools.product(*([(i, s) for s in each[i]] for i in pair))
    ]
    drawn = [tuple(map(chance.choice, each)) for _ in range(MOST)]
    return list(dict.fromkeys([*few, *drawn]))[:MOST]


def _states(x: torch.Tensor, n: int) -> Iterator[State]:
    yield None
    yield from (d for d, size in enumerate(x.shape) if size and size % n == 0)
    if x.dtype.is_floating_point or x.dtype.is_complex:
        yield "sum"


@dataclass
class Draw:
    """A call with values for its operands, and its outputs.

    Attributes:
        case: the call.
        dense: outputs of the plain call.
        pieces: (operand, state, number of ranks) -> the local tensor of each rank; filled by `piece`.
    """

    case: Case
    dense: list[Any]
    pieces: dict[tuple[int, State, int], list[torch.Tensor]]

    def piece(self, operand: int, state: State, n: int) -> list[torch.Tensor]:
        """Return what each rank holds of an operand; it is split once."""
        key = (operand, state, n)
        if key not in self.pieces:
            self.pieces[key] = cut(tensors((self.case.args, self.case.kwargs))[operand], state, n)
        return self.pieces[key]


def draws_of(case: Case) -> list[Draw]:
    """Return the call with `DRAWS` different sets of values with which wrong pieces would be noticed.

    There are fewer if the operator does not accept some. Random numbers of both signs and positive ones are tried
    first, then slight changes of the given numbers.
    """
    generator = torch.Generator().manual_seed(zlib.crc32(str(case.func).encode()))
    made: list[Draw] = []
    for redraw in (_signed, _positive, _signed, _signed, _positive, *[_near] * 5):
        args, kwargs = mapped((case.args, case.kwargs), lambda x, r=redraw: _redrawn(x, r, generator))
        other = Case(case.func, args, kwargs=kwargs)
        try:
            dense = as_list(_call(other, tensors((args, kwargs)), ()))
        except (RuntimeError, IndexError):
            continue
        if tells(dense) and len(made) < DRAWS:
            made.append(Draw(other, dense, {}))
    return made


def _redrawn(x: torch.Tensor, redraw: Callable[..., Any], generator: torch.Generator) -> torch.Tensor:
    """Return other values for `x`: by `redraw` for floating-point and complex numbers, and random bools.

    Integers are only permuted, as they may be indices.
    """
    if is_real(x):
        return redraw(x, torch.randn(x.shape, generator=generator, dtype=x.dtype))
    if x.dtype == torch.bool:
        return torch.rand(x.shape, generator=generator) < 0.5
    return x.flatten()[torch.randperm(x.numel(), generator=generator)].reshape(x.shape)


def _signed(x: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    return 2 * noise


def _positive(x: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    return (noise.abs() + 0.1).to(x.dtype)


def _near(x: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    return x * (1 + 0.1 * noise.abs()) + 0.01


def tells(dense: list[Any]) -> bool:
    """Return whether wrong pieces would be noticed: no output is a single bool or integer, the same everywhere, not
    finite, or almost 0."""
    outs = [x for x in dense if isinstance(x, torch.Tensor) and x.numel()]
    return bool(outs) and all(map(_varies, outs))


def _varies(x: torch.Tensor) -> bool:
    differs = bool((x != x.flatten()[0]).any())
    if not is_real(x):
        return differs
    return bool(torch.isfinite(x).all()) and bool((x.abs() > TINY).any()) and (differs or x.numel() == 1)


def _right(draws: list[Draw], states: tuple[State, ...], n: int) -> tuple[State, ...] | None:
    """Return the states of the outputs if the combination is right with every draw, else None."""
    found = None
    for draw in draws:
        pieces = [draw.piece(i, s, n) for i, s in enumerate(states)]
        found = next((o for sizes in _sizes(draw.case, n) if (o := _outputs(draw, pieces, sizes, n)) is not None), None)
        if found is None:
            return None
    return found


def _sizes(case: Case, n: int) -> Iterator[tuple[Any, ...]]:
    """Yield ways to localize the arguments that hold shapes: unchanged, or with one number of one divided by `n`."""
    yield ()
    names = [a.name for a in case.func._schema.arguments]
    for position, (name, value) in enumerate(zip(names, case.args)):
        if name in SIZES and isinstance(value, (list, tuple)):
            for i, size in enumerate(value):
                if size and size % n == 0:
                    yield position, [*value[:i], size // n, *value[i + 1 :]]


def _outputs(draw: Draw, pieces: list[list[torch.Tensor]], sizes: tuple[Any, ...], n: int) -> tuple[State, ...] | None:
    try:
        local = [as_list(_call(draw.case, [p[rank] for p in pieces], sizes)) for rank in range(n)]
    except (RuntimeError, IndexError, ValueError):
        return None
    found = []
    if any(len(outs) != len(draw.dense) for outs in local):
        return None
    for i, dense in enumerate(draw.dense):
        if not isinstance(dense, torch.Tensor):
            continue
        made = [outs[i] for outs in local]
        states = (s for s in (None, *range(dense.dim()), *_reductions(dense)) if is_right(made, s, dense))
        state = next(states, "none")
        if state == "none":
            return None
        found.append(state)
    return tuple(found)


def _reductions(dense: torch.Tensor) -> list[str]:
    """Return the reduce ops of this dtype: none for bools, no max and min for complex numbers, no avg for integers."""
    if dense.dtype == torch.bool:
        return []
    without = ("max", "min") if dense.dtype.is_complex else () if dense.dtype.is_floating_point else ("avg",)
    return [op for op in REDUCE if op not in without]


def _call(case: Case, operands: list[torch.Tensor], sizes: tuple[Any, ...]) -> Any:
    supply = iter(operands)
    args, kwargs = mapped((case.args, case.kwargs), lambda _: next(supply).clone())
    if sizes:
        args = (*args[: sizes[0]], sizes[1], *args[sizes[0] + 1 :])
    return case.func(*args, **kwargs)


__all__ = ["UNCHECKED", "Refusal", "axis_sizes", "combinations", "is_tried", "refused"]
