"""Describes an operator by the factors of its tensors' dims, and derives the placements valid on a mesh axis.

A factor names an index that is looped over, like a letter in an einsum. Each dim of each operand and output is a
sequence of factors, major to minor: `"mk,kn->mn"` for `mm`; `(h, d)` for a dim that a view splits in two. For one mesh
axis at a time, a `Rule` allows these combinations of placements, which `candidates` lists:

    nothing sharded         every operand and output Replicate
    factor f sharded        Shard where f is the major factor of a dim, Replicate where f does not occur;
                            an output without f is Partial with `reduce[f]`
    f and g sharded         both at once, as `together` allows: a tensor that has f as for f, else as for g
    linear in operands L    L all Partial(sum) or all Partial(avg), the rest Replicate, the outputs Partial likewise
    keeps a reduction       the operands of an entry in `keeps` all Partial with one reduce op, the rest Replicate, the
                            outputs Partial with the op that the entry names for it

This module is independent of torch operators and of processes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..torch_private.symbolic_sizes import same_size

Factor = str
Dim = tuple[Factor, ...]
"""Factors of one dim, major to minor; empty for a dim that is never sharded (a broadcast one, for example)."""
Dims = tuple[Dim, ...]

State = tuple[int | str | None, ...]
"""Where a tensor is, by mesh axis: None (replicated), a dim (sharded) or a reduce op (partial)."""

Inside = tuple[str, tuple[int, ...], str]
"""A collective inside of an operator: its name, operands, and one of `TIMES`."""

TIMES: dict[str, Callable[[int], int]] = {"once": lambda n: 1, "ring": lambda n: n - 1, "half ring": lambda n: n // 2}
"""How often a collective inside of an operator runs on n ranks."""

LINEAR_OPS = ("sum", "avg")


@dataclass(frozen=True)
class Rule:
    """The sharding rule of one call of an operator.

    Attributes:
        inputs: factors of each tensor operand, in the order of the call.
        outputs: factors of each output; None for an output that is not a tensor.
        sizes: global size of each factor.
        reduce: factor that some output lacks -> the reduce op that combines such an output.
        linear: sets of operands in which the operator is jointly linear.
        keeps: (set of operands, reduce op of all of them -> reduce op of the outputs), for Partial operands that are
            not sums: an increasing function of a maximum is the maximum of its values, a decreasing one the minimum.
        blocked: factors that may not be sharded.
        addends: operands added to a reduced result; they become Partial where a factor is reduced.
        own_inputs, own_outputs: operands that only the backward of an operator reads, and the outputs in which the
            operator makes them: where they lack a reduced factor, a rank makes and reads what belongs to its own shard.
            They are Partial(max) there, with -inf for what belongs to others; what was whole is whole on every rank.
        unread: operands whose values are not read; they are moved only if their shard determines the local shape.
        whole: outputs that stay Replicate even if they lack a sharded factor, as `local` reduces them; a pair (output,
            factor) applies to that factor only.
        written: operands that are written to although the schema does not state it (running statistics).
        home: output -> the operand whose layout, without its partial axes, the output is redistributed to (gradients of
            parameters).
        local: runs on the local tensors in place of the operator; takes a `LocalCall`.
        across: the factors that need `local`; if none of them is sharded, the operator itself runs, unless `local` is
            for empty shards and one is empty. None: `local` always runs, or if it is for empty shards then for these.
        all_reduces: factor -> how many all-reduces `local` takes over each mesh axis that shards it. That is for
            predictions only; those of Partial outputs do not count.
        together: pairs of factors that one mesh axis may shard at once, because `local` then passes shards around.
        inside: the factors of a candidate -> collectives that `local` then runs, if they are of the size of operands,
            each with the operands of which it sends as much as their shards, and how often it runs (`TIMES`). For
            choices and predictions.
        busiest: takes factors of candidates -> number of shards, and returns how much work the busiest rank has, as a
            multiple of an even part; None where all ranks have as much. For predictions.
        refuses_empty: factors that may not have an empty shard in a trace with symbolic sizes: those for which `local`
            fails although the operator itself does not, and those for which a kernel would end the process, so that it
            cannot be tried.
        shape_arg: name of the argument that holds the global shape of output 0, which is replaced by the local one.
    """

    inputs: tuple[Dims, ...]
    outputs: tuple[Dims | None, ...]
    sizes: Mapping[Factor, Any]
    reduce: Mapping[Factor, str] = field(default_factory=dict[Factor, str])
    linear: tuple[frozenset[int], ...] = ()
    keeps: tuple[tuple[frozenset[int], Mapping[str, str]], ...] = ()
    blocked: frozenset[Factor] = frozenset()
    addends: frozenset[int] = frozenset()
    own_inputs: frozenset[int] = frozenset()
    own_outputs: frozenset[int] = frozenset()
    unread: frozenset[int] = frozenset()
    whole: frozenset[int | tuple[int, Factor]] = frozenset()
    written: frozenset[int] = frozenset()
    home: Mapping[int, int] = field(default_factory=dict[int, int])
    local: Callable[[Any], Any] | None = None
    across: frozenset[Factor] | None = None
    all_reduces: Mapping[Factor, int] = field(default_factory=dict[Factor, int])
    together: tuple[tuple[Factor, Factor], ...] = ()
    inside: Mapping[tuple[Factor, ...], tuple[Inside, ...]] = field(
        default_factory=dict[tuple[Factor, ...], tuple[Inside, ...]]
    )
    busiest: Callable[[Mapping[tuple[Factor, ...], int]], float] | None = None
    refuses_empty: frozenset[Factor] = frozenset()
    shape_arg: str | None = None


@dataclass(frozen=True)
class Candidate:
    """One valid combination of placements on one mesh axis.

    Attributes:
        factors: the sharded factor, or two that are sharded together; none in the other combinations.
        inputs, outputs: for each tensor None (Replicate), a dim (Shard) or a reduce op (Partial).
    """

    factors: tuple[Factor, ...]
    inputs: tuple[int | str | None, ...]
    outputs: tuple[int | str | None, ...]


def candidates(rule: Rule) -> list[Candidate]:
    """All combinations that the rule allows on a mesh axis, replication first; callers check divisibility."""
    found = [Candidate((), (None,) * len(rule.inputs), (None,) * len(rule.outputs))]
    ways = [*((f,) for f in rule.sizes), *(pair for pair in rule.together if rule.sizes.keys() >= {*pair})]
    found += [c for way in ways if rule.blocked.isdisjoint(way) and (c := _shard(rule, way)) is not None]
    for group, made in (*[(g, dict(zip(LINEAR_OPS, LINEAR_OPS))) for g in rule.linear], *rule.keeps):
        for op, after in made.items():
            ins = tuple(op if i in group else None for i in range(len(rule.inputs)))
            found.append(Candidate((), ins, (after,) * len(rule.outputs)))
    return found


def _shard(rule: Rule, factors: tuple[Factor, ...]) -> Candidate | None:
    """The combination with the factors sharded; None if an operand or output cannot take part."""
    ins: list[int | str | None] = []
    outs: list[int | str | None] = []
    factor, *_ = factors
    op = rule.reduce.get(factor)
    for i, d in enumerate(rule.inputs):
        where = _place(d, factors, rule.sizes)
        if where == -1:
            return None
        own = "max" if op is not None and i in rule.own_inputs else None
        ins.append(where if where is not None else op if i in rule.addends else own)
    for i, d in enumerate(rule.outputs):
        where = _place(d, factors, rule.sizes) if d is not None else None
        lacks = where is None and d is not None and i not in rule.whole and (i, factor) not in rule.whole
        if where == -1 or (lacks and op is None):
            return None
        outs.append(("max" if i in rule.own_outputs else op) if lacks else where)
    return Candidate(factors, tuple(ins), tuple(outs))


def _place(where: Dims, factors: tuple[Factor, ...], sizes: Mapping[Factor, Any]) -> int | None:
    """`position` of the first of the factors that occurs."""
    return next((at for f in factors if (at := position(where, f, sizes)) is not None), None)


def position(where: Dims, factor: Factor, sizes: Mapping[Factor, Any]) -> int | None:
    """The dim that `factor` leads; None if it does not occur, -1 if it occurs where it cannot be sharded."""
    found = [i for i, d in enumerate(where) if factor in d]
    if not found:
        return None
    if len(found) > 1:
        return -1
    (at,) = found
    before = where[at][: where[at].index(factor)]
    return at if all(same_size(sizes[f], 1) for f in before) else -1


def shares_dim(rule: Rule, factor: Factor) -> bool:
    """Whether `factor` is one of several in some dim, so that only even shards of it stay contiguous."""
    tensors = [*rule.inputs, *(d for d in rule.outputs if d is not None)]
    return any(factor in d and len(d) > 1 for t in tensors for d in t)


__all__ = [
    "TIMES",
    "Candidate",
    "Dim",
    "Dims",
    "Factor",
    "Inside",
    "Rule",
    "State",
    "candidates",
    "position",
    "shares_dim",
]
