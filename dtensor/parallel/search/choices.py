"""The options that each step has on a mesh, by the rule of its operator, and how long each computes."""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

import torch

from ...dispatch.decision import COMPOSITES, FOREACH, replicated
from ...layout.layout import Layout
from ...mesh.tensor_spec import Spec
from ...prices.links import Network
from ...prices.links import seconds as collective_seconds
from ...prices.machine import Machine
from ...rules import Call, rule_of
from ...rules.rule import TIMES, Candidate, Rule, candidates
from .states import Moves, State, bucket_bytes
from .steps import Step, is_free
from .tape import Op, Value


@dataclass(frozen=True)
class Option:
    """One way to run a step: a state of each operand and output.

    Attributes:
        inputs: for each operand; None if it may be in any.
        outputs: for each output; None where that is no tensor.
        split: what the work is divided by on the busiest rank.
        extra: seconds of communication inside of the operator.
    """

    inputs: tuple[State | None, ...]
    outputs: tuple[State | None, ...]
    split: float
    extra: float = 0.0


class Choices:
    """Which options each step has on a mesh.

    Args:
        mesh: the mesh; a device, for one that is not there.
        network: its description, by which moves are priced.
        machine: what a rank computes with.
        choosing: its description as the engine knows it, by which it chooses; None for the same.

    Attributes:
        gathered: operators that have no rule, so that all their operands are gathered.
    """

    def __init__(self, mesh: Any, network: Network, machine: Machine, choosing: Network | None = None) -> None:
        self.mesh: Any = mesh
        self.network: Network = network
        self.machine: Machine = machine
        self.choosing: Network = choosing or network
        self.gathered: set[str] = set()
        self._rules: dict[Step, tuple[Call, Rule]] = {}
        self._options: dict[tuple[Step, frozenset[str]], list[Option]] = {}
        self._alike: dict[Any, list[Option]] = {}
        self._full = tuple([bucket_bytes(link) for link in self.choosing.links])
        self._moves: dict[tuple[tuple[int, ...], int, bool], Moves] = {}

    @property
    def bucket(self) -> float:
        """Bytes of a full bucket of the passes, which are as large as the slowest link requires."""
        return max(self._full)

    def moves(self, shape: tuple[int, ...], itemsize: int, shared: bool) -> Moves:
        """The prices of moves of a tensor, sent with so many bytes for an element; `shared`: in buckets."""
        found = self._moves.get((shape, itemsize, shared))
        if found is None:
            full, memory = self._full if shared else None, self.machine.memory
            found = self._moves[shape, itemsize, shared] = Moves(
                self.network, shape, itemsize, memory=memory, full=full
            )
        return found

    def spec(self, v: Value, layout: Layout | None = None) -> Spec:
        """The spec of a value in a layout; replicated if none is given."""
        layout = layout or Layout.make(len(self.network.sizes), ((),) * v.ndim, ())
        return Spec.make(self.mesh, layout, v.shape, v.stride, v.dtype)

    def call(self, op: Op, specs: list[Spec]) -> Call:
        """The call of an operator on operands of these specs."""
        supply = iter(specs)

        def put(a: Any) -> Any:
            if isinstance(a, Value):
                return next(supply)
            return [put(item) for item in a] if isinstance(a, (list, tuple)) else a

        args, kwargs = tuple([put(a) for a in op.args]), {k: put(a) for k, a in op.kwargs.items()}
        return Call(op.func, args, kwargs, specs, op.described, op.many)

    def rule(self, step: Step) -> Rule:
        """The rule of a step."""
        found = self._rules.get(step)
        if found is None:
            call = self.call(step.like, [self.spec(v) for v in step.like.operands])
            found = self._rules[step] = call, self._rule(step, call)
        return found[1]

    def _rule(self, step: Step, call: Call) -> Rule:
        func = step.like.func
        name = func._schema.name
        make = None if name.startswith(FOREACH) or name in COMPOSITES else rule_of(func)
        if make is None:
            if call.operands:
                self.gathered.add(str(func))
            return replicated(call)
        return make(call)

    def made(self, steps: Sequence[Step]) -> set[str]:
        """Reduce ops of partial tensors that some step makes of what is not partial, or of what others make; and "sum".

        To take a tensor in another partial state would be to make it partial first, which saves nothing. What an
        operator makes for its backward alone does not count.
        """
        ways = [
            tuple([{x for x in side if isinstance(x, str)} for side in shared_terms(rule, c)])
            for step in steps
            if not step.plain and not step.border and step.sources
            for rule in [self.rule(step)]
            for c in candidates(rule)
        ]
        found, before = {"sum"}, 0
        while before < len(found):
            before = len(found)
            found.update(*[outs for ins, outs in ways if ins <= found])
        return found - {"avg"}

    def options(self, step: Step, partial: AbstractSet[str] = frozenset(["sum"])) -> list[Option]:
        """All ways to run a step, with operands and results that are whole, cut, or partial by these reduce ops."""
        key = step, frozenset(partial)
        found = self._options.get(key)
        if found is None:
            found = self._options[key] = self._all(step, partial)
        return found

    def _all(self, step: Step, partial: AbstractSet[str]) -> list[Option]:
        axes = len(self.network.sizes)
        whole: State = (None,) * axes
        if step.plain or not step.sources:
            return [Option((None,) * len(step.sources), tuple([v and whole for v in step.outputs]), 1)]
        if step.border:
            raise AssertionError("a border has no options of its own")
        rule = self.rule(step)
        table = [
            c for c in candidates(rule) if not (step.in_place and 0 not in rule.unread and c.inputs[0] != c.outputs[0])
        ]
        table = [
            c
            for c in table
            if all(not isinstance(x, str) or x in partial for side in shared_terms(rule, c) for x in side)
        ]
        free = tuple([all(t.plain for t in source) for source in step.sources])
        unread = tuple([k in rule.unread and not any(rule.inputs[k]) for k in range(len(step.sources))])
        results = tuple([v is not None for v in step.outputs])
        inside: list[Any] = [(tuple(rule.all_reduces.items()), _size(step))] if rule.all_reduces else []
        if rule.inside:
            inside.append((rule.busiest, *[v.bytes for v in step.like.operands]))
        key = tuple(table), tuple(rule.sizes.items()), free, unread, results, *inside
        known = self._alike.get(key)
        if known is None:
            found: dict[Any, Option] = {}
            for picked in product(table, repeat=axes):
                made = self._option(step, rule, picked, free, unread)
                if made is not None:
                    same = made.inputs, made.outputs
                    if same not in found or found[same].split < made.split:
                        found[same] = made
            known = self._alike[key] = list(found.values())
        return known

    def _option(
        self, step: Step, rule: Rule, picked: tuple[Candidate, ...], free: Sequence[bool], unread: Sequence[bool]
    ) -> Option | None:
        sizes = self.network.sizes
        ways: dict[str, int] = {}
        cut: dict[tuple[str, ...], int] = {}
        axes: dict[str, tuple[int, ...]] = {}
        for a, (c, n) in enumerate(zip(picked, sizes)):
            if n == 1 and (c.factors or any(c.inputs)):
                return None
            cut[c.factors] = cut.get(c.factors, 1) * n
            for f in c.factors:
                ways[f] = ways.get(f, 1) * n
                if len(c.factors) == 1:
                    axes[f] = (*axes.get(f, ()), a)
        for factor, n in ways.items():
            if rule.sizes[factor] % n:
                return None
        ins: list[State | None] = []
        for k in range(len(step.sources)):
            if free[k] and any(isinstance(c.inputs[k], str) for c in picked):
                return None
            ins.append(None if free[k] or unread[k] else tuple([c.inputs[k] for c in picked]))
        outs = tuple([None if v is None else tuple([c.outputs[k] for c in picked]) for k, v in enumerate(step.outputs)])
        split = prod([n for c, n in zip(picked, sizes) if c.factors]) / (rule.busiest(cut) if rule.busiest else 1)
        inside = self.across(step, rule, axes) + self.passing(step, rule, picked)
        return Option(tuple(ins), outs, split, inside)

    def passing(self, step: Step, rule: Rule, picked: Sequence[Candidate]) -> float:
        """Seconds of the collectives inside of an operator that are of the size of operands."""
        sizes, total, before = self.network.sizes, 0.0, 1
        for a, (c, n) in enumerate(zip(picked, sizes)):
            for op, sent, often in rule.inside.get(c.factors, ()):
                size = 0.0
                for k in sent:
                    cut = [m for d, m in zip(picked, sizes) if isinstance(d.inputs[k], int)]
                    size += step.like.operands[k].bytes / prod(cut)
                total += before * TIMES[often](n) * collective_seconds(op, size, n, self.network.links[a])
            before *= n if len(c.factors) > 1 else 1  # a ring along one axis runs in each step along those before
        return total

    def across(self, step: Step, rule: Rule, axes: Mapping[str, tuple[int, ...]]) -> float:
        """Seconds of the all-reduces inside of an operator that works across the shards of a factor, which `axes` cut
        alone: of results about as large as the first one without that factor."""
        if not rule.all_reduces:
            return 0.0
        sizes, total, bytes_ = self.network.sizes, 0.0, _size(step)
        for f, count in rule.all_reduces.items():
            others = prod([sizes[a] for g, over in axes.items() if g != f for a in over])
            for a in axes.get(f, ()):
                size = bytes_ / max(1, rule.sizes[f]) / others
                total += count * collective_seconds("all_reduce", size, sizes[a], self.network.links[a])
        return total

    def seconds(self, step: Step, option: Option, parts: int = 1) -> float:
        """Seconds of computation of one operator, on microbatches one by one if there are several `parts`."""
        if is_free(step):
            return 0.0
        sizes = self.network.sizes
        moved = 0.0
        for amounts, states in zip(step.moved, (option.inputs, option.outputs)):
            for amount, state in zip(amounts, states):
                moved += amount / prod([n for s, n in zip(state or (), sizes) if isinstance(s, int)])
        first = next((v for v in step.outputs if v is not None), None)
        dtype = first.like.dtype if first is not None else torch.float32
        return parts * self.machine.seconds(step.flops / option.split / parts, moved / parts, dtype, step.launches)


def shared_terms(rule: Rule, c: Candidate) -> tuple[list[Any], list[Any]]:
    """The states of operands and outputs, without those that an operator makes for its backward alone."""
    ins = [x for k, x in enumerate(c.inputs) if k not in rule.own_inputs]
    return ins, [x for k, x in enumerate(c.outputs) if k not in rule.own_outputs]


def _size(step: Step) -> int:
    """Bytes of the first result of a step."""
    return next((v.like.bytes for v in step.outputs if v is not None), 0)


def seconds_of_optimizer(bytes_: float, machine: Machine, states: float) -> float:
    """Seconds of an elementwise update: parameter, gradient and states are read, and all but the gradient written."""
    return (3 + 2 * states) * bytes_ / machine.memory / machine.efficiency


__all__ = ["Choices", "Option", "seconds_of_optimizer"]
