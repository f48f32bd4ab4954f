"""Tensor parallelism as one writes it by hand, read off the sharding rules of a step's operators.

After Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism" (2019): a
weight that meets a whole activation is cut so that each rank makes a part of its result, and what follows runs on that
part, up to the next weight, which is cut along what it sums over. Tables are cut so that results are sums. After
Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022), the activations in between
may be cut along the sequence.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from ...rules.rule import Candidate, candidates
from .choices import Choices
from .steps import Step, Steps, Tensor, is_free
from .tape import PARAMETER


@dataclass
class Cuts:
    """What is cut over one mesh axis.

    Attributes:
        parameters: parameter -> the dim along which it is cut.
        entering: borders at which a whole activation is handed to weights that are cut, and to nothing else.
        leaving: borders at which a sum over the axis is handed on.
    """

    parameters: dict[Tensor, int] = field(default_factory=dict[Tensor, int])
    entering: list[Step] = field(default_factory=list[Step])
    leaving: list[Step] = field(default_factory=list[Step])


def tensor_parallel(steps: Steps, choices: Choices, axis: int) -> Cuts:
    """Cut the weights of a step over one axis of the mesh; those that it does not divide stay whole."""
    return _Walk(steps, choices, choices.network.sizes[axis]).cuts


class _Walk:
    """Goes through the forward in order."""

    def __init__(self, steps: Steps, choices: Choices, ranks: int) -> None:
        self.choices, self.ranks, self.cuts = choices, ranks, Cuts()
        read: dict[Step, list[Tensor]] = {}
        summed: list[Step] = []
        self.read, self.summed = read, summed
        self.at: dict[Tensor, int | None] = {}
        self.from_weight: dict[Tensor, tuple[Tensor, list[Step]]] = {t: (t, []) for t in steps.of_kind(PARAMETER)}
        for step in steps.steps:
            if not step.backward and not step.plain and step.sources:
                self._meet(step, [self._met(source) for source in step.sources])
        entering = [_first_before(t, read) for given in read.values() for t in given]
        leaving = [border for step in summed for border in _behind(step)]
        self.cuts.entering = list(dict.fromkeys([steps.decided[b] for b in entering if b is not None]))
        self.cuts.leaving = list(dict.fromkeys([steps.decided[b] for b in leaving]))

    def _met(self, source: Sequence[Tensor] | dict[Tensor, int]) -> Tensor:
        """Of the tensors that an operand is in layers that are alike, one that was met."""
        return next((t for t in source if t in self.at or t in self.from_weight), next(iter(source)))

    def _meet(self, step: Step, given: list[Tensor]) -> None:
        out = step.outputs[0]
        if step.border:
            if out is not None:
                self.at[out] = self.at.get(given[0])
            return
        if len(given) == 1 and given[0] in self.from_weight and (is_free(step) or len(step.outputs) == 1):
            weight, way = self.from_weight[given[0]]
            if out is not None:
                self.from_weight[out] = weight, [*way, step]
            if is_free(step):
                return
        found = self._weighted(step, given) or self._follows(step, given)
        for k, t in enumerate(step.outputs):
            if t is not None:
                made = found.outputs[k] if found is not None else None
                self.at[t] = made if isinstance(made, int) else None

    def _weighted(self, step: Step, given: list[Tensor]) -> Candidate | None:
        """Cut the weight that meets an activation here."""
        weights = [k for k, t in enumerate(given) if t in self.from_weight and self.from_weight[t][0].like.ndim > 1]
        others = [k for k, t in enumerate(given) if t not in self.from_weight and not t.plain]
        if len(weights) != 1 or not others:
            return None
        k = weights[0]
        weight = self.from_weight[given[k]][0]
        ways: list[tuple[int, Candidate]] = []
        for dim in range(weight.like.ndim):
            there = self._moved(given[k], dim)
            if there is None or self.cuts.parameters.get(weight, dim) != dim:
                continue
            for c in self._candidates(step):
                if c.inputs[k] == there and all(c.inputs[j] == self.at.get(given[j]) for j in others):
                    ways.append((dim, c))
        if not ways:
            return None
        dim, c = next((way for way in ways if way[1].outputs[0] == "sum"), ways[0])
        self.cuts.parameters[weight] = dim
        for j, t in enumerate(given):
            if t in self.from_weight and j != k and isinstance(c.inputs[j], int):
                added = self.from_weight[t][0]
                dims = [d for d in range(added.like.ndim) if self._moved(t, d) == c.inputs[j]]
                if dims:
                    self.cuts.parameters[added] = dims[0]
        if c.outputs[0] == "sum":
            self.summed.append(step)
        else:
            self.read[step] = [given[j] for j in others]
        return c

    def _follows(self, step: Step, given: list[Tensor]) -> Candidate | None:
        """How it runs on what is cut; None if on whole tensors."""
        have = [self.at.get(t) for t in given]
        for c in self._candidates(step):
            kept = [a == b for a, b in zip(c.inputs, have) if b is not None]
            if kept and all(kept) and not any(isinstance(x, str) for x in c.inputs):
                return c
        return None

    def _candidates(self, step: Step) -> list[Candidate]:
        rule = self.choices.rule(step)
        return [c for c in candidates(rule) if c.factors and not any(rule.sizes[f] % self.ranks for f in c.factors)]

    def _moved(self, t: Tensor, dim: int) -> int | None:
        """Along which dim a view of a weight is cut, if the weight is along `dim`; None if it cannot be."""
        weight, way = self.from_weight[t]
        if weight.like.shape[dim] % self.ranks:
            return None
        for step in way:
            outs = [c.outputs[0] for c in self._candidates(step) if c.inputs[0] == dim]
            if not outs or not isinstance(outs[0], int):
                return None
            dim = outs[0]
        return dim


def _first_before(t: Tensor, read: Collection[Step]) -> Step | None:
    """The first border that hands on a tensor, behind nothing but views, to nothing but these readers."""
    found: Step | None = None
    seen: set[Tensor] = set()
    while t.step is not None and is_free(t.step) and t not in seen and _readers([t]) <= set(read):
        seen.add(t)
        found = t.step if t.step.border else found
        t = next(iter(t.step.sources[0]))
    return found


def _readers(tensors: Sequence[Tensor]) -> set[Step]:
    """What the forward computes from tensors, or from views of them."""
    users = _through_views(tensors)
    return {u for u in users if not is_free(u)}


def _behind(step: Step) -> list[Step]:
    """Borders at which the result of a step is handed on, behind nothing but views."""
    users = _through_views([t for t in step.outputs[:1] if t is not None], past_borders=False)
    return [u for u in users if u.border]


def _through_views(tensors: Sequence[Tensor], past_borders: bool = True) -> list[Step]:
    """The users in the forward of tensors and of views of them, in the order in which they are met."""
    found: dict[Step, None] = {}
    todo = [*tensors]
    while todo:
        for user, _ in todo.pop().users:
            if user.backward or user in found:
                continue
            found[user] = None
            if is_free(user) and (past_borders or not user.border):
                todo += [t for t in user.outputs if t is not None]
    return list(found)


__all__ = ["Cuts", "tensor_parallel"]
