"""Rule: which factors the dimensions of an operator's tensors are made of, and what that allows on a mesh axis.

A factor is a name for something that is looped over, as a letter in an einsum. Each dimension of each operand and
output is a sequence of factors, major to minor: `"mk,kn->mn"` for `mm`; `(h, d)` for a dimension that a view splits in
two. For one mesh axis at a time the table gives every valid combination of placements:

    nothing sharded         every operand and output Replicate
    factor f sharded        Shard where f is the major factor of a dimension, Replicate where f does not occur;
                            an output without f is Partial with `reduce[f]`
    linear in operands L    L all Partial(sum) or all Partial(avg), the rest Replicate, the outputs Partial likewise
    keeps an order          operands all Partial(max) or (min), the rest Replicate, the outputs Partial as the rule says

`candidates` lists them. This module is pure: it knows neither torch operators nor processes.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..torch_private.symbolic_sizes import same_size

Factor = str
Dim = tuple[Factor, ...]
"""Factors of one dimension, major to minor; empty for a dimension that is never sharded (a broadcast one, say)."""
Dims = tuple[Dim, ...]

LINEAR_OPS = ("sum", "avg")


@dataclass(frozen=True)
class Rule:
    """The sharding rule of one call of an operator.

    Attributes:
        inputs: factors of each tensor operand, in the order of the call.
        outputs: factors of each output; None for an output that is not a tensor.
        sizes: global size of each factor.
        reduce: factors that some output lacks -> the reduce op that puts such an output together.
        linear: sets of operands in which the operator is jointly linear.
        keeps: sets of operands whose parts pass by other reductions than sums: the reduce op of all of them -> that of
            the outputs. A rising function of a maximum is the maximum of its values, a falling one the minimum.
        blocked: factors that may not be sharded.
        addends: operands added to a reduced result; they turn Partial where a factor is reduced.
        unread: operands whose values are not read: they are never moved.
        whole: outputs that stay Replicate even if they lack a sharded factor (`local` sees to it); a pair of output and
            factor says so of that factor only.
        written: operands that are written to though the schema does not say so (running statistics).
        home: output -> the operand in whose layout, but never partial, it is put: gradients of parameters.
        local: runs the operator on local tensors in place of the operator itself; gets a `LocalCall`.
        across: the factors for whose sake `local` is there: where none of them is sharded the operator itself will do.
            None: `local` always runs.
        refuses_empty: factors of which `local` refuses to have no part, where a trace does not know that there is none,
            though the operator itself does not refuse; and those without which a kernel ends the process, so that it
            is not asked.
        shape_arg: name of the argument that holds the (global) shape of output 0 and is localised.
    """

    inputs: tuple[Dims, ...]
    outputs: tuple[Dims | None, ...]
    sizes: Mapping[Factor, Any]
    reduce: Mapping[Factor, str] = field(default_factory=dict[Factor, str])
    linear: tuple[frozenset[int], ...] = ()
    keeps: tuple[tuple[frozenset[int], Mapping[str, str]], ...] = ()
    blocked: frozenset[Factor] = frozenset()
    addends: frozenset[int] = frozenset()
    unread: frozenset[int] = frozenset()
    whole: frozenset[int | tuple[int, Factor]] = frozenset()
    written: frozenset[int] = frozenset()
    home: Mapping[int, int] = field(default_factory=dict[int, int])
    local: Callable[[Any], Any] | None = None
    across: frozenset[Factor] | None = None
    refuses_empty: frozenset[Factor] = frozenset()
    shape_arg: str | None = None


@dataclass(frozen=True)
class Candidate:
    """One valid combination on one mesh axis.

    Attributes:
        factor: the sharded factor, or None.
        inputs, outputs: for each tensor None (Replicate), a dim (Shard) or a reduce op (Partial).
    """

    factor: Factor | None
    inputs: tuple[int | str | None, ...]
    outputs: tuple[int | str | None, ...]


def dims(text: str | Iterable[Factor | Dim]) -> Dims:
    """Dims from one factor per dimension; `"1"` stands for a dimension that is never sharded."""
    return tuple([() if d == "1" else (d,) if isinstance(d, str) else tuple(d) for d in text])


def candidates(rule: Rule) -> list[Candidate]:
    """All combinations the rule allows on a mesh axis, replication first; divisibility is checked by the caller."""
    found = [Candidate(None, (None,) * len(rule.inputs), (None,) * len(rule.outputs))]
    found += [c for f in rule.sizes if f not in rule.blocked and (c := _shard(rule, f)) is not None]
    for group, made in (*[(g, dict(zip(LINEAR_OPS, LINEAR_OPS))) for g in rule.linear], *rule.keeps):
        for op, after in made.items():
            ins = tuple(op if i in group else None for i in range(len(rule.inputs)))
            found.append(Candidate(None, ins, (after,) * len(rule.outputs)))
    return found


def _shard(rule: Rule, factor: Factor) -> Candidate | None:
    """The combination with `factor` sharded; None if an operand or output cannot take part."""
    ins: list[int | str | None] = []
    outs: list[int | str | None] = []
    op = rule.reduce.get(factor)
    for i, d in enumerate(rule.inputs):
        where = position(d, factor, rule.sizes)
        if where == -1:
            return None
        ins.append(op if where is None and i in rule.addends else where)
    for i, d in enumerate(rule.outputs):
        where = position(d, factor, rule.sizes) if d is not None else None
        lacks = where is None and d is not None and i not in rule.whole and (i, factor) not in rule.whole
        if where == -1 or (lacks and op is None):
            return None
        outs.append(op if lacks else where)
    return Candidate(factor, tuple(ins), tuple(outs))


def position(where: Dims, factor: Factor, sizes: Mapping[Factor, Any]) -> int | None:
    """The dimension that `factor` leads; None if it does not occur, -1 if it occurs where it cannot be sharded."""
    found = [i for i, d in enumerate(where) if factor in d]
    if not found:
        return None
    if len(found) > 1:
        return -1
    before = where[found[0]][: where[found[0]].index(factor)]
    return found[0] if all(same_size(sizes[f], 1) for f in before) else -1


def shares_dim(rule: Rule, factor: Factor) -> bool:
    """Whether `factor` is one of several in some dimension, so that only even shards of it stay contiguous."""
    tensors = [*rule.inputs, *(d for d in rule.outputs if d is not None)]
    return any(factor in d and len(d) > 1 for t in tensors for d in t)


__all__ = ["Candidate", "Dim", "Dims", "Factor", "Rule", "candidates", "dims", "position", "shares_dim"]
