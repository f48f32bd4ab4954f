"""Turns one line of text, such as `"n(gi)~, (go)i~, (go) -> n(go)~"`, into the rule of an operator.

The text has one word for each tensor: the arguments in the order of the schema, then the outputs. Each item of a word
stands for one dim, except `*` and `~`, which stand for all remaining ones:

    a letter      a dim that is this factor
    (ab)          a dim of several factors, major to minor
    _             a dim that is never sharded
    *             leading (batch) dims, which broadcast between the tensors; at most once in a word
    ~             any number of dims that are never sharded

If an argument is None, its word is skipped. If the tensors do not have the dims that the words name, everything is
replicated.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import chain, repeat
from typing import Any

import torch

from ..errors import ArgumentError
from ..layout.placements import REDUCE_OPS
from ..torch_private.symbolic_sizes import same_size
from .call import Call, rule_for
from .local_calls import unless_empty
from .rule import Dims, Rule

ITEM = re.compile(r"\([A-Za-z]+\)|[A-Za-z_*~]")
"""An item of a word."""

Item = str | tuple[str, ...]
Word = tuple[Item, ...]


@dataclass(frozen=True)
class Pattern:
    """The rule of an operator as text; see the module docstring.

    Attributes:
        text: the words.
        linear: sets of word indices (from 0) in which the operator is jointly linear.
        rounds: whether the operator rounds integers, and so is linear only in other numbers.
        reduce: factor (`*` for all leading dims) that some output lacks -> reduce op.
        sizes: factor -> the argument that gives its size; a factor of size 1 is left out.
        blocked: factors that may not be sharded, `*` for all leading dims.
        addends, unread: word indices, otherwise as in `Rule`.
        whole, local, shape_arg: as in `Rule`.

    Raises:
        ValueError: the text cannot be parsed, or factors or indices in the other arguments are not in it.
    """

    text: str
    linear: tuple[set[int], ...] = ()
    rounds: bool = False
    reduce: Mapping[str, str] = field(default_factory=dict[str, str])
    sizes: Mapping[str, str] = field(default_factory=dict[str, str])
    blocked: str = ""
    addends: tuple[int, ...] = ()
    unread: tuple[int, ...] = ()
    whole: tuple[int | tuple[int, str], ...] = ()
    local: Callable[[Any], Any] | None = unless_empty
    shape_arg: str | None = None

    def __post_init__(self) -> None:
        ins, outs = words(self.text)
        known = _factors(ins) | set(self.sizes)
        major = {item[0] for word in outs for item in word} - {"_", "~"}  # im2col makes a minor factor of its own
        for what, factors in (("an output", major), ("reduce", self.reduce), ("blocked", self.blocked)):
            if unknown := sorted(set(factors) - known):
                raise ArgumentError(f"{self.text!r}: {what} names {unknown[0]!r}, which no argument has")
        for factor, op in self.reduce.items():
            if op not in REDUCE_OPS:
                raise ArgumentError(f"{self.text!r}: {factor!r} reduces by one of {', '.join(REDUCE_OPS)}; got {op!r}")
            if outs and all(factor in _factors((word,)) for word in outs):
                raise ArgumentError(f"{self.text!r}: {factor!r} is in every output, so it is not reduced")
        for what, indices in (("linear", chain(*self.linear)), ("addends", self.addends), ("unread", self.unread)):
            if wrong := [i for i in indices if i not in range(len(ins))]:
                raise ArgumentError(f"{self.text!r}: {what} has {wrong[0]}; the arguments are 0 to {len(ins) - 1}")


@cache
def words(text: str) -> tuple[tuple[Word, ...], tuple[Word, ...]]:
    """The words of the arguments and of the outputs."""
    ins, arrow, outs = text.partition("->")
    if not arrow or "->" in outs:
        raise ArgumentError(f"a pattern reads 'arguments -> outputs'; got {text!r}")
    return tuple(_word(w) for w in ins.split(",")), tuple(_word(w) for w in outs.split(",") if outs.strip())


def _word(text: str) -> Word:
    found = ITEM.findall(text.strip())
    if "".join(found) != text.strip():
        raise ArgumentError(f"the items of a word are letters, (ab), _, * and ~; got {text.strip()!r}")
    if sum(item in ("*", "~") for item in found) > 1:
        raise ArgumentError(f"a word has one item for any number of dims, * or ~; got {text.strip()!r}")
    return tuple([tuple(item[1:-1]) if item[0] == "(" else item for item in found])


def _factors(some: tuple[Word, ...]) -> set[str]:
    return {f for word in some for item in word for f in item} - {"_", "~"}


def bind(pattern: Pattern, call: Call) -> Rule:
    """Apply `pattern` to `call` and return its rule."""
    ins, outs = words(pattern.text)
    outputs = call.wanted
    named = _tensor_arguments(call.func._schema)
    present = [i for i, name in enumerate(named) if hasattr(call[name], "layout")]
    if len(present) != len(call.operands) or len(ins) != len(named):
        return whole_rule(call)
    sizes = {f: call[a] for f, a in pattern.sizes.items() if not same_size(call[a], 1)}
    gone = set(pattern.sizes) - set(sizes)
    spread = [_spread(ins[i], o.ndim, gone) for i, o in zip(present, call.operands)]
    made = [None if o is None else _spread(w, o.ndim, gone) for w, o in zip(chain(outs, repeat(("~",))), outputs)]
    empty = {i for i, (d, o) in enumerate(zip(made, outputs)) if o is not None and d is None and o.shape == (0,)}
    made = [((),) if i in empty else d for i, d in enumerate(made)]
    if None in spread or any(d is None and o is not None for d, o in zip(made, outputs)):
        return whole_rule(call)
    shapes = [o.shape for o in call.operands] + [() if o is None else o.shape for o in outputs]
    clash = _sizes([*spread, *[d or () for d in made]], shapes, sizes)  # pyright: ignore[reportArgumentType]
    every = [f for f in sizes if f.startswith("*")]
    index = {word: i for i, word in enumerate(present)}
    real = all(o.dtype.is_floating_point or o.dtype.is_complex for o in call.operands)
    linear = pattern.linear if real or not pattern.rounds else ()
    return Rule(
        tuple(_thinned(d or (), o.shape, sizes) for d, o in zip(spread, call.operands)),
        tuple(None if o is None else _thinned(d or (), o.shape, sizes) for d, o in zip(made, outputs)),
        sizes,
        reduce={g: op for f, op in pattern.reduce.items() for g in (every if f == "*" else [f])},
        linear=tuple(g for g in (frozenset(index[w] for w in s if w in index) for s in linear) if g),
        blocked=frozenset(clash) | frozenset(pattern.blocked) | frozenset(every if "*" in pattern.blocked else ()),
        addends=frozenset(index[w] for w in pattern.addends if w in index),
        unread=frozenset(index[w] for w in pattern.unread if w in index),
        whole=frozenset(pattern.whole) | empty,
        local=pattern.local,
        shape_arg=pattern.shape_arg,
    )


def _spread(word: Word, ndim: int, gone: set[str]) -> Dims | None:
    """The factors of each of `ndim` dims, without regard to sizes; None if the word does not fit."""
    left = ndim - sum(item not in ("*", "~") for item in word)
    if left < 0 or (left > 0 and not {"*", "~"} & set(word)):
        return None
    dims: list[tuple[str, ...]] = []
    for item in word:
        if item == "*":
            dims += [(f"*{k}",) for k in range(left, 0, -1)]
        elif item == "~":
            dims += [()] * left
        elif item == "_":
            dims.append(())
        else:
            dims.append(tuple(f for f in item if f not in gone))
    return tuple(dims)


def _sizes(spread: list[Dims], shapes: list[tuple[Any, ...]], sizes: dict[str, Any]) -> set[str]:
    """Fill in the factors' sizes, as far as dims tell them; return the factors whose dims disagree."""
    clash: set[str] = set()
    shared: list[tuple[Sequence[str], Any]] = []
    for dims, shape in zip(spread, shapes):
        for factors, size in zip(dims, shape):
            if len(factors) > 1:
                shared.append((factors, size))
            elif factors:
                (f,) = factors
                if f not in sizes or (f.startswith("*") and same_size(sizes[f], 1)):
                    sizes[f] = size
                elif sizes[f] != size and not (f.startswith("*") and same_size(size, 1)):
                    clash.add(f)
    for factors, size in shared:
        unknown = [f for f in factors if f not in sizes]
        for f in factors:
            size = size // sizes[f] if f in sizes else size
        if len(unknown) == 1:
            sizes.update(dict.fromkeys(unknown, size))
    return clash


def _thinned(dims: Dims, shape: tuple[Any, ...], sizes: Mapping[str, Any]) -> Dims:
    """Remove the factors of broadcast leading dims of length 1, and of dims with a factor of unknown size."""

    def stays_whole(factors: tuple[str, ...], size: Any) -> bool:
        if any(f not in sizes for f in factors):
            return True
        return same_size(size, 1) and any(f.startswith("*") and not same_size(sizes[f], 1) for f in factors)

    return tuple(() if stays_whole(d, s) else d for d, s in zip(dims, shape))


def whole_rule(call: Call) -> Rule:
    """The rule that replicates everything."""
    outs = tuple(None if o is None else ((),) * o.ndim for o in call.wanted)
    return Rule(tuple(((),) * o.ndim for o in call.operands), outs, {})


def pattern_rules(table: Mapping[str, Pattern | str]) -> None:
    """Register a table from operator to pattern; an entry for an overload takes precedence over one without.

    Raises:
        ValueError: no overload of an operator has as many tensor arguments and outputs as its pattern has words.
    """
    patterns = {name: Pattern(p) if isinstance(p, str) else p for name, p in table.items()}
    for name, pattern in patterns.items():
        _check_words(name, pattern)

    @rule_for(*{name.partition(".")[0] for name in patterns})
    def by_pattern(call: Call) -> Rule:
        found = patterns.get(f"{call.name}.{call.func._overloadname}") or patterns.get(call.name)
        return whole_rule(call) if found is None else bind(found, call)


def _check_words(name: str, pattern: Pattern) -> None:
    packet, _, overload = name.partition(".")
    operator = getattr(torch.ops.aten, packet, None)
    if operator is None:
        return  # of another version of torch
    wanted = tuple(map(len, words(pattern.text)))
    counts = [_tensors(getattr(operator, o)._schema) for o in ([overload] if overload else operator.overloads())]
    if not any(ins == wanted[0] and outs >= wanted[1] for ins, outs in counts):
        raise ArgumentError(
            f"{name}: {pattern.text!r} has words for {wanted[0]} tensor arguments and {wanted[1]} outputs; "
            f"the operator has {' or '.join(f'{ins} and {outs}' for ins, outs in dict.fromkeys(counts))}"
        )


def _tensors(schema: Any) -> tuple[int, int]:
    """The number of tensor arguments and of outputs."""
    return len(_tensor_arguments(schema)), len(schema.returns)


def _tensor_arguments(schema: Any) -> list[str]:
    return [a.name for a in schema.arguments if str(a.type) in ("Tensor", "Optional[Tensor]")]


__all__ = ["Pattern", "bind", "pattern_rules", "whole_rule", "words"]
