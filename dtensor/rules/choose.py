"""Chooses the layouts in which an operator runs, from its rule and the operands' layouts.

On each mesh axis the cheapest candidate wins, the one whose operands cost least to redistribute. Ties go to
replication, then to candidates that fit any size, then to the rule's order. The choice is the same on every rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, prod
from typing import Any

from ..layout.layout import Layout
from ..mesh.mesh import facts
from ..mesh.tensor_spec import Spec
from ..prices.links import Network, seconds
from ..torch_private.symbolic_sizes import hint
from .rule import TIMES, Candidate, Factor, Inside, Rule, State, candidates, shares_dim


@dataclass(frozen=True)
class Choice:
    """The layouts an operator runs in.

    Attributes:
        inputs: target layout of each operand.
        outputs: layout of each output, None where an output is not a tensor.
        axes: factor -> the mesh axes that shard it, outermost first.
    """

    inputs: tuple[Layout, ...]
    outputs: tuple[Layout | None, ...]
    axes: dict[Factor, tuple[int, ...]]


def choose(rule: Rule, operands: list[Spec], in_place: bool = False, network: Network | None = None) -> Choice:
    """Choose the cheapest layouts for `operands`.

    Args:
        rule: the rule of the call.
        operands: specs of the tensor operands, all on one mesh.
        in_place: whether output 0 is operand 0, so that both get the same layout and the price includes moving it back.
        network: the description of their mesh; None looks it up.

    Returns:
        The layouts of operands and outputs, and the mesh axes that shard each factor.
    """
    network = network or _network(operands)
    table = candidates(rule)
    picked: list[Candidate] = []
    shared: dict[Factor, int] = {}
    for axis in range(len(network.sizes)):
        picked.append(_cheapest(rule, table, operands, in_place, axis, network, shared))
    return _assemble(rule, picked, operands, in_place)


def choose_as(
    rule: Rule,
    operands: list[Spec],
    inputs: Sequence[State | None],
    outputs: Sequence[State | None],
    in_place: bool = False,
) -> Choice | None:
    """The layouts for `operands` that were decided elsewhere.

    Args:
        rule, operands, in_place: as in `choose`.
        inputs: for each operand the state in which it is taken; None for any.
        outputs: for each output the state in which it is made; None where it is no tensor.

    Returns:
        The layouts; None if the rule does not allow them for these sizes.
    """
    sizes, table = _network(operands).sizes, candidates(rule)
    if len(inputs) != len(rule.inputs) or len(outputs) != len(rule.outputs):
        return None
    picked: list[Candidate] = []
    shared: dict[Factor, int] = {}
    for axis, n in enumerate(sizes):
        for c in table:
            asked = [(s, x) for some, have in ((inputs, c.inputs), (outputs, c.outputs)) for s, x in zip(some, have)]
            if any(s is not None and s[axis] != x for s, x in asked) or (in_place and not _keeps(rule, c)):
                continue
            if _fits(rule, c, n, shared):
                picked.append(c)
                _count(c, n, shared)
                break
        else:
            return None
    return _assemble(rule, picked, operands, in_place)


def _network(operands: list[Spec]) -> Network:
    first, *_ = operands
    return facts(first.mesh).network


def _cheapest(
    rule: Any, table: Any, operands: Any, in_place: bool, axis: int, network: Network, shared: dict[Factor, int]
) -> Candidate:
    """The cheapest candidate on `axis`. The number of shards of its factor is recorded in `shared`.

    `_fits` is checked last and only for a candidate that would win, because on a symbolic size it adds a guard.
    """
    best, least, n = None, inf, network.sizes[axis]
    for c in sorted(table, key=lambda c: any(shares_dim(rule, f) for f in c.factors)):
        if in_place and not _keeps(rule, c):
            continue
        price = _price(rule, c, operands, axis, network, least, in_place)
        if price < least and _fits(rule, c, n, shared):
            best, least = c, price
    assert best is not None, "replication is always possible"
    _count(best, n, shared)
    return best


def _count(c: Candidate, n: int, shared: dict[Factor, int]) -> None:
    """Note that each factor of the candidate is split `n` ways more."""
    for f in c.factors:
        shared[f] = shared.get(f, 1) * n


@dataclass(frozen=True)
class Weighed:
    """A candidate on one mesh axis as `choose` sees it.

    Attributes:
        candidate: the combination of placements.
        seconds: estimated time of its redistributions; None if it is refused.
        refused: why it is refused, else "".
        chosen: whether it was chosen.
    """

    candidate: Candidate
    seconds: float | None
    refused: str
    chosen: bool


def weigh(rule: Rule, operands: list[Spec], in_place: bool = False) -> list[list[Weighed]]:
    """All candidates that `choose` compares, for each mesh axis, in the rule's order."""
    network = _network(operands)
    table = candidates(rule)
    shared: dict[Factor, int] = {}
    found: list[list[Weighed]] = []
    for axis, n in enumerate(network.sizes):
        before = dict(shared)
        best = _cheapest(rule, table, operands, in_place, axis, network, shared)
        rows: list[Weighed] = []
        for c in table:
            why = _refusal(rule, c, n, before, in_place)
            price = None if why else _price(rule, c, operands, axis, network, inf, in_place)
            rows.append(Weighed(c, price, why, c is best))
        found.append(rows)
    return found


def _refusal(rule: Rule, c: Candidate, n: int, shared: dict[Factor, int], in_place: bool) -> str:
    if not _fits(rule, c, n, shared):
        f = next(f for f in c.factors if not _splits(rule, f, n, shared))
        parts = n * shared.get(f, 1)
        return f"uneven: {parts} does not divide {rule.sizes[f]}, and the dimension is merged or split"
    return "in place: the result would have another layout than the operand" if in_place and not _keeps(rule, c) else ""


def _fits(rule: Rule, c: Candidate, n: int, shared: dict[Factor, int]) -> bool:
    """Whether the candidate's factors may be split `n` ways more."""
    return all(_splits(rule, f, n, shared) for f in c.factors)


def _splits(rule: Rule, factor: Factor, n: int, shared: dict[Factor, int]) -> bool:
    """Whether a factor may be split `n` ways more; one that shares a dim must split evenly."""
    return not shares_dim(rule, factor) or rule.sizes[factor] % (n * shared.get(factor, 1)) == 0


def _keeps(rule: Rule, c: Candidate) -> bool:
    return 0 in rule.unread or c.inputs[0] == c.outputs[0]


def _state(layout: Layout, axis: int) -> int | str | None:
    p = layout.placements[axis]
    return getattr(p, "dim", None) if p.is_shard() else getattr(p, "reduce_op", None)


def _price(
    rule: Rule, c: Candidate, operands: list[Spec], axis: int, network: Network, limit: float, in_place: bool
) -> float:
    """Seconds to redistribute all operands to the candidate's placements on `axis`; may stop early past `limit`."""
    total = 0.0
    for i, (spec, want) in enumerate(zip(operands, c.inputs)):
        have = _state(spec.layout, axis)
        if in_place and i == 0:
            want = c.outputs[0]
            if have != want:
                total += _move(spec, have, want, axis, network) + _move(spec, want, have, axis, network)
            continue
        if have == want or _stays(rule, i, isinstance(have, int) or isinstance(want, int)):
            continue
        total += _move(spec, have, want, axis, network)
        if i in rule.written:
            total += _move(spec, want, have, axis, network)
        if total > limit:
            break
    return total + sum([_inside(c, found, operands, axis, network) for found in rule.inside.get(c.factors, ())])


def _inside(c: Candidate, found: Inside, operands: list[Spec], axis: int, network: Network) -> float:
    """Seconds of a collective that runs inside of the operator."""
    (op, sent, often), n = found, network.sizes[axis]
    parts = [_bytes(operands[k], axis, network) / (n if isinstance(c.inputs[k], int) else 1) for k in sent]
    return TIMES[often](n) * seconds(op, sum(parts), n, network.links[axis])


def _stays(rule: Rule, operand: int, sharded: bool) -> bool:
    """Whether an operand is unread and so keeps its layout; it does not if its shard determines the local shape."""
    return operand in rule.unread and not (sharded and any(rule.inputs[operand]))


MOVES: dict[tuple[type, type], str] = {
    (int, type(None)): "all_gather",
    (int, int): "all_to_all",
    (str, type(None)): "all_reduce",
    (str, int): "reduce_scatter",
    (type(None), int): "shard",
    (type(None), str): "partial",
}
"""Types of what an axis has and wants (a dim, a reduce op, or None) -> the step between them."""


def _move(spec: Spec, have: Any, want: Any, axis: int, network: Network) -> float:
    n, link = network.sizes[axis], network.links[axis]
    padding = [_padding(spec, d, axis, network) for d in (have, want) if isinstance(d, int)]
    whole = _bytes(spec, axis, network)
    size = whole * max(padding, default=1.0)
    op = MOVES.get((type(have), type(want)))
    if op is None:
        gather = "all_gather" if isinstance(have, int) else "all_reduce"
        return seconds(gather, size, n, link) + seconds("partial", whole, n, link)
    return seconds(op, size / n if op == "all_to_all" else size, n, link)


def _bytes(spec: Spec, axis: int, network: Network) -> float:
    """Bytes of an operand on a rank, if it were whole along the axis."""
    others = prod(network.sizes[a] for a in spec.layout.sharded_axes if a != axis)
    return spec.dtype.itemsize * prod(map(hint, spec.shape)) / others


def _padding(spec: Spec, dim: int, axis: int, network: Network) -> float:
    """How much longer a dim is with the padding that uneven shards are moved with. A graph for any length is not made
    for the one at hand: a rank that compiles again, alone, at another one has to choose what the others did."""
    length = spec.shape[dim]
    if not isinstance(length, int):
        return 1.0
    parts = prod([network.sizes[a] for a in {axis, *spec.layout.dims[dim]}])
    return -(-length // parts) * parts / length if length else 1.0


def _assemble(rule: Rule, picked: list[Candidate], operands: list[Spec], in_place: bool) -> Choice:
    """The layouts from one candidate per axis. Axes that share a factor keep the order that an operand has already."""
    axes = {f: _order(rule, f, picked, operands) for f in {f for c in picked for f in c.factors}}

    def layout(which: str, index: int, ndim: int) -> Layout:
        states = [getattr(c, which)[index] for c in picked]
        dims: Any = getattr(rule, which)[index]
        cut: list[tuple[int, ...]] = [()] * ndim
        for factor, order in axes.items():
            for d in {states[a] for a in order if isinstance(states[a], int)}:
                if factor in dims[d]:
                    cut[d] = tuple([a for a in order if states[a] == d])
        partial = tuple((a, s) for a, s in enumerate(states) if isinstance(s, str))
        return Layout.make(len(picked), tuple(cut), partial)

    ins: list[Layout] = []
    for i, spec in enumerate(operands):
        target = layout("inputs", i, spec.ndim)
        ins.append(spec.layout if _stays(rule, i, spec.layout.dims != target.dims) else target)
    outs = tuple(None if d is None else layout("outputs", i, len(d)) for i, d in enumerate(rule.outputs))
    if in_place:
        assert outs[0] is not None, "an in-place operator gives a tensor"
        ins[0] = outs[0]
    return Choice(tuple(ins), outs, axes)


def _order(rule: Rule, factor: Factor, picked: list[Candidate], operands: list[Spec]) -> tuple[int, ...]:
    wanted = [axis for axis, c in enumerate(picked) if factor in c.factors]
    first: list[int] = []
    for i, spec in enumerate(operands):
        where = picked[wanted[0]].inputs[i]
        if isinstance(where, int) and factor in rule.inputs[i][where]:
            have = [a for a in spec.layout.dims[where] if a in wanted]
            if len(have) > len(first):
                first = have
    return tuple(first + [a for a in wanted if a not in first])


__all__ = ["MOVES", "Choice", "Weighed", "choose", "choose_as", "weigh"]
