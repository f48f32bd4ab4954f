"""Parses and checks the einsum-like text in which users write sharding rules.

    "mk,kn->mn"  ->  Rule: the terms of operands and outputs, and the properties of their factors from its keywords

`dtensor.dispatch.registration` checks whether a rule fits an operator's schema and the tensors of a call.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ..errors import ArgumentError, ArgumentTypeError
from ..layout.placements import REDUCE_OPS

Term = tuple[str, ...]
"""One letter per dim, "" for a dim that is never sharded, "..." for any number of dims."""


@dataclass(frozen=True)
class Rule:
    """Describes how the dims of an operator's tensors correspond, and so how the operator may run on shards.

    Args:
        text: an einsum-like rule such as `"mk,kn->mn"`: one term for each tensor argument of the schema, in order, and
            after `->` one for each tensor returned. A term has one letter per dim. Dims with the same letter, called a
            factor, are sharded together. `1` is a dim that is never sharded; `...` stands for any number of dims, the
            same ones in every term. An empty term is a 0-dim tensor. A list of tensors, passed or returned, has one
            term for all its items. Spaces are ignored. A dim of length 1 is broadcast where other operands have
            another length.
        reduce: the factors over which the operator reduces, which some output lacks: `"k"` for a sum, or
            `{"k": "max"}` with "sum", "avg", "max", "min" or "product". If such a factor is sharded, the output is
            Partial; for reductions other than sums it is sharded only if it divides evenly. A factor that is neither
            in all outputs nor in `reduce` is never sharded.
        linear: the arguments in which the operator is linear, so that they may be Partial: `("x", "w")` means linear
            in each with the other fixed, `[("x", "y")]` jointly linear, as in x + y.
        added: arguments that are added to the reduced result, such as a bias, and so count once, not once per rank.
        blocked: factors that may not be sharded although the text would allow it.

    Raises:
        ValueError: the text cannot be parsed, or names in it or in the keywords are unknown or contradictory.
        TypeError: an argument has the wrong type.

    For `x @ w.T + bias`, which is linear in x together with the bias, but not in x alone:

    >>> rule = dtensor.Rule("mk,nk,n->mn", reduce="k", linear=[("x", "bias"), ("w", "bias")], added="bias")
    """

    text: str
    reduce: str | Mapping[str, str] = field(default="", kw_only=True)
    linear: str | Sequence[str | Sequence[str]] = field(default=(), kw_only=True)
    added: str | Sequence[str] = field(default=(), kw_only=True)
    blocked: str | Iterable[str] = field(default="", kw_only=True)
    reductions: Mapping[str, str] = field(init=False, repr=False, compare=False)
    linear_sets: tuple[tuple[str, ...], ...] = field(init=False, repr=False, compare=False)
    addends: tuple[str, ...] = field(init=False, repr=False, compare=False)
    whole: frozenset[str] = field(init=False, repr=False, compare=False)
    inputs: tuple[Term, ...] = field(init=False, repr=False, compare=False)
    outputs: tuple[Term, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._check_types()
        left, arrow, right = self.text.partition("->")
        if not arrow or "->" in right:
            raise ArgumentError(f"a rule reads 'operands->outputs', such as 'mk,kn->mn'; got {self.text!r}")
        linear = [self.linear] if isinstance(self.linear, str) else self.linear
        parsed = {
            "reductions": dict.fromkeys(self.reduce, "sum") if isinstance(self.reduce, str) else dict(self.reduce),
            "linear_sets": tuple((g,) if isinstance(g, str) else tuple(g) for g in linear),
            "addends": (self.added,) if isinstance(self.added, str) else tuple(self.added),
            "whole": frozenset(self.blocked),
            "inputs": tuple(_term(t, self.text) for t in left.split(",")),
            "outputs": tuple(_term(t, self.text) for t in right.split(",")),
        }
        for name, value in parsed.items():
            object.__setattr__(self, name, value)
        self._check_factors()
        self._check_arguments()

    def _check_types(self) -> None:
        if not isinstance(self.text, str):
            raise ArgumentTypeError(f"a rule is a string such as 'mk,kn->mn'; got {self.text!r}")
        if not isinstance(self.reduce, (str, Mapping)):
            raise ArgumentTypeError(f"reduce takes factors, 'k', or a dict such as {{'k': 'max'}}; got {self.reduce!r}")
        for name, wanted in (("linear", "names of arguments"), ("added", "names of arguments"), ("blocked", "factors")):
            given = getattr(self, name)
            items = given if isinstance(given, Iterable) else [given]
            flat = [i for g in items for i in (g if name == "linear" and isinstance(g, (list, tuple)) else [g])]
            if not all(isinstance(i, str) for i in flat):
                raise ArgumentTypeError(f"{name} takes {wanted}; got {given!r}")

    def _check_arguments(self) -> None:
        """Raise ValueError for entries of `linear` or `added` that are empty, repeated or have no effect."""
        for group in self.linear_sets:
            if not group or len(set(group)) != len(group):
                raise ArgumentError(
                    f"linear takes arguments in which the operator is jointly linear, each once; got {group}"
                )
        if len({frozenset(g) for g in self.linear_sets}) != len(self.linear_sets):
            raise ArgumentError(f"linear names the same arguments twice: {self.linear_sets}")
        if self.addends and not self.reductions:
            raise ArgumentError(
                f"{self.text!r}: {', '.join(self.addends)} cannot be added to a reduced result, as nothing is reduced; "
                "write reduce=, or leave added out"
            )

    def _check_factors(self) -> None:
        taken = {f for t in self.inputs for f in t if f}
        for term in self.outputs:
            if new := [f for f in term if f and f not in taken]:
                raise ArgumentError(
                    f"{self.text!r}: factor {new[0]!r} of an output is in no operand, so no shard of it could be "
                    "computed; write 1 for that dimension"
                )
        if missing := [f for f in (*self.reductions, *self.whole) if f not in taken or f == "..."]:
            named = "reduce" if any(f in self.reductions for f in missing) else "blocked"
            letters = sorted(f for f in taken if f != "...") or ["a"]
            such = f"{named}='{letters[0]}'" + (f" or {{'{letters[0]}': 'max'}}" if named == "reduce" else "")
            raise ArgumentError(
                f"{self.text!r} has no factor {missing[0]!r}, which {named}={getattr(self, named)!r} names; its "
                f"factors are {', '.join(sorted(taken))}; write such as {such}"
            )
        for factor, op in self.reductions.items():
            if op not in REDUCE_OPS:
                raise ArgumentError(f"factor {factor!r} reduces by one of {', '.join(REDUCE_OPS)}; got {op!r}")
            if all(factor in term for term in self.outputs):
                raise ArgumentError(f"{self.text!r}: factor {factor!r} is in every output, so it is not reduced")


def _term(text: str, rule: str) -> Term:
    """Parse one term into its dims."""
    found: list[str] = []
    rest = text.replace(" ", "")
    while rest:
        part = "..." if rest.startswith("...") else rest[0]
        if part != "..." and part != "1" and not part.isalpha():
            raise ArgumentError(f"{rule!r}: a dimension is a letter, 1, or ... for several; got {part!r} in {text!r}")
        if part == "..." and part in found:
            raise ArgumentError(f"{rule!r}: ... may occur only once in a term; got {text!r}")
        found.append("" if part == "1" else part)
        rest = rest[len(part) :]
    return tuple(found)


__all__ = ["Rule", "Term"]
