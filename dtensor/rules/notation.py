"""The notation of sharding rules, the library's own and users': a line of text, as in an einsum, and its properties.

    "mk,kn->mn"  ->  Rule: terms and properties, parsed and checked  ->  `bind` applies it to the tensors of a call

A term stands for a tensor. Each of its items stands for one dim, except for `...` and `*`:

    m       a dim that is the factor m; dims of the same factor are sharded together
    (gk)    a dim of several factors, major to minor
    1       a dim that is never sharded
    ...     any number of dims, the same ones in every term, counted from the last
    *       any number of dims that are never sharded

A text is parsed once. What cannot be meant is an error where the rule is written: a factor or an argument that does not
exist, and a factor that would never be sharded.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache, lru_cache
from typing import Any

from ..errors import ArgumentError, ArgumentTypeError
from ..layout.placements import REDUCE_OPS

Item = str | tuple[str, ...]
"""The factors of a dim, none if it is never sharded; or an item of `MANY`."""

Term = tuple[Item, ...]

Argument = str | int
"""A tensor argument of an operator: its name, or its place among the terms, from 0."""

MANY = ("...", "*")
"""Items that stand for any number of dims."""

ITEM = re.compile(r"\.\.\.|\([^()]*\)|.")

LETTERS = "abcdefghjklmnopqrstuwxyzABCDEFGHIJKLMNOPQRSTUVWXYZαβγδεζηθικλμνξοπρστυφχψω"
"""Factors for dims that a call counts. Left out are i and v, which stand for an index and for what it looks up."""


@dataclass(frozen=True)
class Text:
    """A parsed text.

    Attributes:
        inputs, outputs: the terms.
        factors: each factor -> the outputs that lack it, or None if it is not the first of a dim everywhere.
        twice: factors of several dims of one tensor.
        alone: factors that some dim has alone, which tells their size.
        shared: the dims of several factors.
    """

    inputs: tuple[Term, ...]
    outputs: tuple[Term, ...]
    factors: Mapping[str, tuple[int, ...] | None]
    twice: frozenset[str]
    alone: frozenset[str]
    shared: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Rule:
    """Describes how the dims of an operator's tensors correspond, and so how the operator may run on shards.

    Args:
        text: an einsum-like rule such as `"mk,kn->mn"`: one term for each tensor argument of the schema, in order, and
            after `->` one for each tensor returned. A term has one letter per dim. Dims with the same letter, called a
            factor, are sharded together. `1` is a dim that is never sharded, `*` any number of them; `...` stands for
            any number of dims, the same ones in every term. `(gk)` is a dim of several factors, such as g groups of k
            channels, of which only the first is sharded, and only evenly. An empty term is a 0-dim tensor. A list of
            tensors, passed or returned, has one term for all its items. Spaces are ignored. A dim of length 1 is
            broadcast where other operands have another length.
        reduce: the factors over which the operator reduces, which some output lacks: `"k"` for a sum, or
            `{"k": "max"}` with "sum", "avg", "max", "min" or "product". If such a factor is sharded, the output is
            Partial; for averages, maxima and minima it is sharded only if it divides evenly.
        linear: the arguments in which the operator is linear, so that they may be Partial: `("x", "w")` means linear
            in each with the other fixed, `[("x", "y")]` jointly linear, as in x + y. An argument is given by its name
            or, here and below, by its place among the terms, from 0.
        added: arguments that are added to the reduced result, such as a bias, and so count once, not once per rank.
        blocked: factors that may not be sharded although the text would allow it.
        sizes: factor -> its size, or the name of the argument that gives it, where no dim has this factor alone.

    Raises:
        ValueError: the text cannot be parsed; names in it or in the keywords are unknown or contradictory; or a factor
            would never be sharded, as it is missing in an output and in `reduce`, or twice in a term.
        TypeError: an argument has the wrong type.

    For `x @ w.T + bias`, which is linear in x together with the bias, but not in x alone:

    >>> rule = dtensor.Rule("mk,nk,n->mn", reduce="k", linear=[("x", "bias"), ("w", "bias")], added="bias")
    """

    text: str
    reduce: str | Mapping[str, str] = field(default="", kw_only=True)
    linear: Argument | Sequence[Argument | Sequence[Argument]] = field(default=(), kw_only=True)
    added: Argument | Sequence[Argument] = field(default=(), kw_only=True)
    blocked: str | Iterable[str] = field(default="", kw_only=True)
    sizes: Mapping[str, Any] = field(default_factory=dict[str, Any], kw_only=True, hash=False)
    parsed: Text = field(init=False, repr=False, compare=False)
    reductions: Mapping[str, str] = field(init=False, repr=False, compare=False)
    groups: tuple[tuple[Argument, ...], ...] = field(init=False, repr=False, compare=False)
    plans: dict[Any, Any] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._check_types()
        reduce, linear = self.reduce, self.linear
        groups = [linear] if isinstance(linear, (str, int)) else linear
        derived: dict[str, Any] = {
            "parsed": parse(self.text),
            "reductions": dict(reduce) if isinstance(reduce, Mapping) else dict.fromkeys(factors_of(reduce), "sum"),
            "groups": tuple([several(g) for g in groups]),
            "plans": {},
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)
        self._check_factors()
        self._check_arguments()

    def __repr__(self) -> str:
        said = [f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if f.repr and getattr(self, f.name)]
        return f"{type(self).__name__}({', '.join(said)})"

    def _check_types(self) -> None:
        if not isinstance(self.text, str):
            raise ArgumentTypeError(f"a rule is a string such as 'mk,kn->mn'; got {self.text!r}")
        if not isinstance(self.reduce, (str, Mapping)):
            raise ArgumentTypeError(f"reduce takes factors, 'k', or a dict such as {{'k': 'max'}}; got {self.reduce!r}")
        if not isinstance(self.sizes, Mapping):
            raise ArgumentTypeError(f"sizes takes a dict such as {{'g': 'groups'}}; got {self.sizes!r}")
        for name in ("linear", "added"):
            given = getattr(self, name)
            items = given if isinstance(given, (list, tuple)) else [given]
            flat = [i for g in items for i in (g if name == "linear" and isinstance(g, (list, tuple)) else [g])]
            if not all(isinstance(i, (str, int)) for i in flat):
                raise ArgumentTypeError(f"{name} takes names of arguments; got {given!r}")
        if not isinstance(self.blocked, Iterable) or not all(isinstance(f, str) for f in self.blocked):
            raise ArgumentTypeError(f"blocked takes factors; got {self.blocked!r}")

    def _check_factors(self) -> None:
        for name, named in self._named_factors().items():
            if unknown := [f for f in named if f not in self.parsed.factors]:
                letters = [f for f in sorted(self.parsed.factors) if f != "..."] or ["a"]
                such = f"{name}='{letters[0]}'" + (f" or {{'{letters[0]}': 'max'}}" if name == "reduce" else "")
                raise ArgumentError(
                    f"{self.text!r} has no factor {unknown[0]!r}, which {name}={getattr(self, name)!r} names; its "
                    f"factors are {', '.join(sorted(self.parsed.factors))}; write such as {such}"
                )
        for factor, op in self.reductions.items():
            if op not in REDUCE_OPS:
                raise ArgumentError(f"factor {factor!r} reduces by one of {', '.join(REDUCE_OPS)}; got {op!r}")
            if self.parsed.factors[factor] == ():
                raise ArgumentError(f"{self.text!r}: factor {factor!r} is in every output, so it is not reduced")
        known = {*self.parsed.alone, *self.sizes}
        for dim in self.parsed.shared:
            unknown = [f for f in dim if f not in known]
            if len(unknown) > 1:
                raise ArgumentError(
                    f"{self.text!r}: nothing tells the sizes of both {unknown[0]!r} and {unknown[1]!r}; write "
                    f"sizes={{{unknown[0]!r}: 'groups'}} with the argument that tells one of them"
                )
            known.update(unknown)
        blocked = factors_of(self.blocked)
        for factor, lacking in self.parsed.factors.items():
            if factor in blocked or lacking is None:
                continue
            if factor in self.parsed.twice:
                raise ArgumentError(
                    f"{self.text!r}: factor {factor!r} stands twice in a term, so it could never be sharded; write 1 "
                    "for these dimensions"
                )
            missing = [i for i in lacking if factor not in self.reductions and not self._combines(i, factor)]
            if missing:
                raise ArgumentError(
                    f"{self.text!r}: output {missing[0]} lacks factor {factor!r}, so it could never be sharded; write "
                    f"reduce={factor!r} if the operator sums over it, else 1 for that dimension"
                )

    def _named_factors(self) -> dict[str, Iterable[str]]:
        """The keywords that name factors, with these."""
        return {"reduce": self.reductions, "blocked": factors_of(self.blocked), "sizes": self.sizes}

    def _combines(self, output: int, factor: str) -> bool:
        """Whether the operator itself combines the ranks' results in this output where the factor is sharded."""
        return False

    def arguments(self) -> list[Argument]:
        """The arguments that the keywords name."""
        return [*(a for group in self.groups for a in group), *several(self.added)]

    def _check_arguments(self) -> None:
        count = len(self.parsed.inputs)
        if wrong := [a for a in self.arguments() if isinstance(a, int) and a not in range(count)]:
            raise ArgumentError(f"{self.text!r} has no argument {wrong[0]}; its terms are 0 to {count - 1}")
        for group in self.groups:
            if not group or len(set(group)) != len(group):
                raise ArgumentError(
                    f"linear takes arguments in which the operator is jointly linear, each once; got {group}"
                )
        if len({frozenset(g) for g in self.groups}) != len(self.groups):
            raise ArgumentError(f"linear names the same arguments twice: {self.groups}")
        added = several(self.added)
        if added and not self.reductions:
            raise ArgumentError(
                f"{self.text!r}: {', '.join(map(str, added))} cannot be added to a reduced result, as nothing is "
                "reduced; write reduce=, or leave added out"
            )


@dataclass(frozen=True, repr=False)
class LibraryRule(Rule):
    """A rule with what only the library's own operators need. Factors and arguments are given as in `Rule`.

    Attributes:
        keeps: arguments, and pairs of a reduce op of all of them and that of the outputs, as in `rule.Rule`.
        rounds: whether the operator rounds integers, and so is linear only in other numbers.
        last: factors that are tried last, in this order.
        whole: outputs that stay Replicate where they lack a sharded factor, as `local` combines them; a pair (output,
            factor) is about that factor only.
        home: output -> the argument to whose layout it is redistributed.
        all_reduces: factors, and how many all-reduces `local` takes over each mesh axis that shards one of them.
        own_inputs, own_outputs: arguments and outputs, as in `rule.Rule`.
        inside: collectives of `local`, each as factors, its name, arguments, and how often it runs, as in `rule.Rule`.
        unread, written, local, across, refuses_empty, shape_arg, together, busiest: as in `rule.Rule`.
    """

    keeps: Sequence[tuple[Argument | Sequence[Argument], Iterable[tuple[str, str]]]] = field(default=(), kw_only=True)
    rounds: bool = field(default=False, kw_only=True)
    last: str | Iterable[str] = field(default="", kw_only=True)
    unread: Argument | Sequence[Argument] = field(default=(), kw_only=True)
    written: Argument | Sequence[Argument] = field(default=(), kw_only=True)
    own_inputs: Argument | Sequence[Argument] = field(default=(), kw_only=True)
    own_outputs: Sequence[int] = field(default=(), kw_only=True)
    whole: Sequence[int | tuple[int, str]] = field(default=(), kw_only=True)
    home: Mapping[int, Argument] = field(default_factory=dict[int, Argument], kw_only=True)
    local: Callable[[Any], Any] | None = field(default=None, kw_only=True)
    across: str | Iterable[str] | None = field(default=None, kw_only=True)
    all_reduces: tuple[str, int] = field(default=("", 0), kw_only=True)
    refuses_empty: str | Iterable[str] = field(default="", kw_only=True)
    shape_arg: str | None = field(default=None, kw_only=True)
    together: Sequence[tuple[str, str]] = field(default=(), kw_only=True)
    inside: Sequence[tuple[str, str, Sequence[Argument], str]] = field(default=(), kw_only=True)
    busiest: Callable[[Mapping[tuple[str, ...], int]], float] | None = field(default=None, kw_only=True)

    def _named_factors(self) -> dict[str, Iterable[str]]:
        return {
            **super()._named_factors(),
            "last": factors_of(self.last),
            "whole": [w[1] for w in self.whole if isinstance(w, tuple)],
            "across": factors_of(self.across or ""),
            "all_reduces": factors_of(self.all_reduces[0]),
            "refuses_empty": factors_of(self.refuses_empty),
            "together": [f for pair in self.together for f in pair],
            "inside": [f for factors, *_ in self.inside for f in factors_of(factors)],
        }

    def _combines(self, output: int, factor: str) -> bool:
        return output in self.whole or (output, factor) in self.whole

    def arguments(self) -> list[Argument]:
        kept = [a for group, _ in self.keeps for a in several(group)]
        inside = [argument for *_, arguments, _ in self.inside for argument in arguments]
        named = [*several(self.unread), *several(self.written), *several(self.own_inputs), *self.home.values(), *inside]
        return [*super().arguments(), *kept, *named]

    def _check_arguments(self) -> None:
        super()._check_arguments()
        count = len(self.parsed.outputs)
        outputs = [*(w[0] if isinstance(w, tuple) else w for w in self.whole), *self.home, *self.own_outputs]
        if wrong := [i for i in outputs if i not in range(count)]:
            raise ArgumentError(f"{self.text!r} has no output {wrong[0]}; its outputs are 0 to {count - 1}")


library_rule = lru_cache(4096)(LibraryRule)
"""A rule that is made once: for functions, which are asked at each call. Options have to be hashable."""


@cache
def parse(text: str) -> Text:
    """Parse the text of a rule.

    Raises:
        ValueError: it cannot be parsed, or an output has a factor that no operand has.
    """
    left, arrow, right = text.partition("->")
    if not arrow or "->" in right:
        raise ArgumentError(f"a rule reads 'operands->outputs', such as 'mk,kn->mn'; got {text!r}")
    inputs, outputs = (tuple([_term(t, text) for t in side.split(",")]) for side in (left, right))
    factors = {f: None for term in inputs for f in _factors(term)}
    for i, term in enumerate(outputs):
        for factor in (item if item == "..." else item[0] for item in term if item and item != "*"):
            if factor not in factors:
                raise ArgumentError(
                    f"{text!r}: factor {factor!r} of an output is in no operand, so no shard of it could be computed; "
                    f"write 1 for that dimension of output {i}"
                )
    terms = (*inputs, *outputs)
    dims = [item for term in terms for item in term if item not in MANY]
    minor = {f for dim in dims for f in dim[1:]}
    twice = {f for term in terms for f in _factors(term) if _factors(term).count(f) > 1}
    lacking = {f: tuple([i for i, term in enumerate(outputs) if f not in _factors(term)]) for f in factors}
    known = {**{f: None if f in minor else lacking[f] for f in factors}, **dict.fromkeys(sorted(minor), None)}
    alone = frozenset([dim[0] for dim in dims if len(dim) == 1])
    shared = tuple([tuple(dim) for dim in dims if len(dim) > 1])
    return Text(inputs, outputs, known, frozenset(twice), alone, shared)


def _term(text: str, rule: str) -> Term:
    """Parse one term into its items."""
    items: list[Item] = []
    for part in ITEM.findall(text.replace(" ", "")):
        inner = part[1:-1] if len(part) > 1 and part[0] == "(" else part
        if part not in (*MANY, "1") and not inner.isalpha():
            raise ArgumentError(
                f"{rule!r}: a dimension is a letter, 1, (ab) for several factors, or ... or * for several dimensions; "
                f"got {part!r} in {text!r}"
            )
        items.append(part if part in MANY else () if part == "1" else tuple(inner))
    if sum(item in MANY for item in items) > 1:
        raise ArgumentError(f"{rule!r}: ... or * may occur only once in a term; got {text!r}")
    return tuple(items)


def _factors(term: Term) -> list[str]:
    return [f for item in term if item != "*" for f in ([item] if isinstance(item, str) else item)]


def factors_of(given: str | Iterable[str]) -> list[str]:
    """The factors in a text such as "mk" or "...k"; those of another iterable as they are."""
    if isinstance(given, str):
        return ITEM.findall(given) if given else []
    return list(given)


def several(given: Argument | Sequence[Argument]) -> tuple[Argument, ...]:
    """The arguments, of which one may stand for itself."""
    return (given,) if isinstance(given, (str, int)) else tuple(given)


__all__ = [
    "LETTERS",
    "MANY",
    "Argument",
    "LibraryRule",
    "Rule",
    "Term",
    "Text",
    "factors_of",
    "library_rule",
    "parse",
    "several",
]
