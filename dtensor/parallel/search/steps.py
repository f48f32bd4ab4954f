"""What repeats in a tape counts once: operators and values of layers that are alike are one step, and one tensor.

Two operators are alike if they are the same one, on the same sizes, at the same place of modules whose names differ in
numbers only. A plan treats them in the same way.
"""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import Any

import torch

from ...dispatch.decision import COMPOSITES, FOREACH, replicated
from ...layout.cost import Network
from ...layout.cost import seconds as collective_seconds
from ...layout.layout import Layout
from ...layout.machine import Machine
from ...mesh.tensor_spec import Spec
from ...rules import Call, is_in_place, rule_of
from ...rules.rule import Candidate, Rule, candidates
from ...torch_private.core import OpOverload
from .states import State
from .tape import BORDER, CONSTANT, INPUT, PARAMETER, Op, Tape, Value

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)")


def pattern(name: str) -> str:
    """The name of a module or parameter with `*` for the numbers in it."""
    return _NUMBER.sub("*", name)


@dataclass(eq=False)
class Tensor:
    """Values that are alike.

    Attributes:
        like: one of them.
        kind: as of a `Value`.
        name: of a parameter, buffer or input, as a pattern.
        count: how many there are.
        step, index: what makes them, as which output; None for parameters, buffers and inputs.
        users: (step, operand) that take them, and how many times.
        saved: how many of them stay until the backward.
    """

    like: Value
    kind: str
    name: str
    count: int = 0
    step: "Step | None" = None
    index: int = 0
    users: Counter[tuple["Step", int]] = field(default_factory=Counter[tuple["Step", int]])
    saved: int = 0

    @property
    def plain(self) -> bool:
        """Whether code of the model makes it from nothing that is distributed, so that all ranks hold it."""
        return self.kind == CONSTANT


@dataclass(frozen=True)
class Option:
    """One way to run a step: a state of each operand and output.

    Attributes:
        inputs: for each operand; None if it may be in any.
        outputs: for each output; None where that is no tensor.
        split: into how many parts the work is divided.
        extra: seconds of communication inside of the operator.
    """

    inputs: tuple[State | None, ...]
    outputs: tuple[State | None, ...]
    split: int
    extra: float = 0.0


@dataclass(eq=False)
class Step:
    """Operators that are alike.

    Attributes:
        like: one of them.
        count: how many there are.
        sources: for each operand the tensors that it is, and how many times each.
        outputs: what they make.
        moved: for each operand and then each output, the bytes that a compiler that fuses pointwise operators moves.
        flops: floating-point operations of one.
    """

    like: Op
    count: int
    sources: list[Counter[Tensor]]
    outputs: list[Tensor | None]
    moved: tuple[list[float], list[float]] = ((), ())  # type: ignore[assignment]
    flops: float = 0.0

    @property
    def name(self) -> str:
        return str(self.like.func)

    @property
    def backward(self) -> bool:
        return self.like.backward

    @property
    def border(self) -> bool:
        return self.like.func == BORDER

    @property
    def plain(self) -> bool:
        """Whether it runs on plain tensors only, the same on all ranks."""
        return all(v is None or v.plain for v in self.outputs) and not self.border

    @property
    def in_place(self) -> bool:
        return isinstance(self.like.func, OpOverload) and is_in_place(self.like.func)


def normal(op: Op) -> Any:
    """What must be equal for operators to be alike, besides their place."""
    shapes = tuple([(v.shape, v.dtype, v.kind) for v in op.operands])
    made = tuple([v and (v.shape, v.stride, v.kind) for v in op.outputs])
    return op.func, op.what, shapes, made, repr([a for a in (*op.args, *op.kwargs.items()) if not _has_tensor(a)])


def _has_tensor(a: Any) -> bool:
    return isinstance(a, Value) or (isinstance(a, (list, tuple)) and any(map(_has_tensor, a)))


@dataclass
class Steps:
    """A tape in which what repeats counts once.

    Attributes:
        tape: the tape.
        steps: in the order in which each is first met.
        tensors: likewise.
        of: operator -> its step.
        which: value -> its tensor.
        gradients: (tensor of gradients, tensor of parameters) -> how many.
        last: memory -> the index of the last operator that needs it; not of parameters, inputs and gradients.
    """

    tape: Tape
    steps: list[Step] = field(default_factory=list[Step])
    tensors: list[Tensor] = field(default_factory=list[Tensor])
    of: dict[Op, Step] = field(default_factory=dict[Op, Step])
    which: dict[Value, Tensor] = field(default_factory=dict[Value, Tensor])
    gradients: Counter[tuple[Tensor, Tensor]] = field(default_factory=Counter[tuple[Tensor, Tensor]])
    last: dict[int, int] = field(default_factory=dict[int, int])

    def of_kind(self, kind: str) -> list[Tensor]:
        return [t for t in self.tensors if t.kind == kind]


def steps_of(tape: Tape) -> Steps:
    """Find what repeats in a tape."""
    made = Steps(tape)
    tensors: dict[Any, Tensor] = {}
    steps: dict[Any, Step] = {}
    places: Counter[Any] = Counter()

    def tensor(v: Value) -> Tensor:
        found = made.which.get(v)
        if found is None:
            key = v.kind, pattern(v.name) if v.kind != INPUT else v.name, v.shape, v.dtype
            found = tensors.get(key)
            if found is None:
                found = tensors[key] = Tensor(v, v.kind, key[1])
                made.tensors.append(found)
            found.count += 1
            made.which[v] = found
        return found

    for v in tape.values.values():
        tensor(v)
    for op in tape.ops:
        at = (op.path, op.backward)
        number = places[at]
        places[at] += 1
        key = pattern(op.path), op.backward, number, normal(op)
        step = steps.get(key)
        operands = [tensor(v) for v in op.operands]
        if step is None:
            outputs = [None if v is None else Tensor(v, v.kind, "", 0, None, k) for k, v in enumerate(op.outputs)]
            step = steps[key] = Step(op, 0, [Counter() for _ in operands], outputs)
            for t in outputs:
                if t is not None:
                    t.step = step
                    made.tensors.append(t)
            made.steps.append(step)
        step.count += 1
        made.of[op] = step
        for k, t in enumerate(operands):
            step.sources[k][t] += 1
            t.users[step, k] += 1
        for v, t in zip(op.outputs, step.outputs):
            if v is not None and t is not None:
                t.count += 1
                made.which[v] = t
    for name, gradient in tape.gradients.items():
        made.gradients[made.which[gradient], made.which[tape.values[PARAMETER, name]]] += 1
    made.last = _lifetimes(made)
    turn = next((k for k, op in enumerate(tape.ops) if op.backward), len(tape.ops))
    seen: set[int] = set()
    for t in made.tensors:
        storage = t.like.storage
        forward = t.step is not None and not t.step.backward and not t.plain
        if forward and made.last.get(storage, 0) >= turn and storage not in seen:
            seen.add(storage)
            t.saved = t.count
    for step in made.steps:
        step.moved, step.flops = _moved(step), _flops(step.like)
    return made


def _lifetimes(steps: Steps) -> dict[int, int]:
    """Memory -> the index of the last operator that needs it.

    What an operator that works element by element makes is computed again in the backward, from what it read, as
    torch's partitioner does; so what it read stays.
    """
    ops = steps.tape.ops
    last: dict[int, int] = {}
    later: dict[int, int] = {}
    for index in reversed(range(len(ops))):
        op, step = ops[index], steps.of[ops[index]]
        if op.backward:
            for v in (*op.operands, *[v for v in op.outputs if v is not None]):
                last.setdefault(v.storage, index)
                later.setdefault(v.storage, index)
            continue
        again = max([later.get(v.storage, -1) for v in op.outputs if v is not None], default=-1)
        for v in op.operands:
            if is_pointwise(step) or is_free(step):
                later[v.storage] = max(later.get(v.storage, -1), again)
            last[v.storage] = max(last.get(v.storage, -1), index)
        for v in op.outputs:
            if v is None or is_free(step):
                continue
            used = max([k for k in (last.get(v.storage, index),) if not ops[k].backward], default=index)
            last[v.storage] = used if is_pointwise(step) else max(last.get(v.storage, index), later.get(v.storage, -1))
    own = {v.storage for v in (*steps.tape.values.values(), *steps.tape.gradients.values())}
    return {storage: index for storage, index in last.items() if storage not in own}


def is_pointwise(step: Step) -> bool:
    """Whether compilers fuse it with its neighbours."""
    func = step.like.func
    return isinstance(func, OpOverload) and (
        torch.Tag.pointwise in func.tags or func is torch.ops.aten._to_copy.default
    )


def is_free(step: Step) -> bool:
    """Whether it only hands memory on."""
    func = step.like.func
    return func == BORDER or func.is_view or func._schema.name in ("aten::_unsafe_view", "aten::detach")


def _root(t: Tensor) -> Tensor:
    seen: set[Tensor] = set()
    while t.step is not None and is_free(t.step) and t.step.sources and t not in seen:
        seen.add(t)
        t = next(iter(t.step.sources[0]))
    return t


def _fused(t: Tensor) -> bool:
    root = _root(t)
    return root.step is not None and is_pointwise(root.step)


def _read_in_full(t: Tensor) -> bool:
    """Whether some user of a tensor, or of a view of it, is no pointwise operator; or nothing uses it."""
    todo, seen = [t], {t}
    while todo:
        at = todo.pop()
        if not at.users:
            return True
        for user, _ in at.users:
            if not is_free(user):
                if not is_pointwise(user):
                    return True
                continue
            more = [out for out in user.outputs if out is not None and out not in seen]
            seen.update(more)
            todo += more
    return False


def _moved(step: Step) -> tuple[list[float], list[float]]:
    if is_free(step):
        return [0.0] * len(step.sources), [0.0] * len(step.outputs)
    fused = is_pointwise(step)
    read = [
        0.0 if fused and all(_fused(t) for t in source) else float(next(iter(source)).like.bytes)
        for source in step.sources
    ]
    written = [
        0.0 if t is None or (fused and not _read_in_full(t) and not t.saved) else float(t.like.bytes)
        for t in step.outputs
    ]
    return read, written


def _flops(op: Op) -> float:
    from torch.utils.flop_counter import flop_registry  # it takes long to import

    count: Any = flop_registry.get(getattr(op.func, "overloadpacket", None))
    if count is None:
        return 0.0

    def shape(a: Any) -> Any:
        if isinstance(a, Value):
            return torch.Size(a.shape)
        return [shape(item) for item in a] if isinstance(a, (list, tuple)) else a

    out = [None if v is None else torch.Size(v.shape) for v in op.outputs]
    try:
        return float(count(*map(shape, op.args), **{k: shape(v) for k, v in op.kwargs.items()}, out_val=out[0]))
    except (TypeError, ValueError, AssertionError, RuntimeError):  # a formula that does not support this call
        return 0.0


class Choices:
    """Which options each step has on a mesh.

    Args:
        mesh: the mesh.
        network: its description.
        machine: what a rank computes with.

    Attributes:
        gathered: operators that have no rule, so that all their operands are gathered.
    """

    def __init__(self, mesh: Any, network: Network, machine: Machine) -> None:
        self.mesh, self.network, self.machine = mesh, network, machine
        self.gathered: set[str] = set()
        self._rules: dict[Step, tuple[Call, Rule]] = {}
        self._whole: dict[int, Layout] = {}

    def spec(self, v: Value, layout: Layout | None = None) -> Spec:
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

    def options(self, step: Step) -> list[Option]:
        """All ways to run a step."""
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
        table = [c for c in table if "avg" not in (*c.inputs, *c.outputs)]
        found: dict[Any, Option] = {}
        for picked in product(table, repeat=axes):
            made = self._option(step, rule, picked)
            if made is not None:
                key = made.inputs, made.outputs
                if key not in found or found[key].split < made.split:
                    found[key] = made
        return list(found.values())

    def _option(self, step: Step, rule: Rule, picked: tuple[Candidate, ...]) -> Option | None:
        sizes = self.network.sizes
        ways: dict[str, int] = {}
        for c, n in zip(picked, sizes):
            if n == 1 and (c.factor is not None or any(c.inputs)):
                return None
            if c.factor is not None:
                ways[c.factor] = ways.get(c.factor, 1) * n
        for factor, n in ways.items():
            if rule.sizes[factor] % n:
                return None
        ins: list[State | None] = []
        for k, t in enumerate(step.sources):
            if all(s.plain for s in t):
                ins.append(None)
                if any(isinstance(c.inputs[k], str) for c in picked):
                    return None
            elif k in rule.unread and not any(rule.inputs[k]):
                ins.append(None)
            else:
                ins.append(tuple([c.inputs[k] for c in picked]))
        outs = tuple([None if v is None else tuple([c.outputs[k] for c in picked]) for k, v in enumerate(step.outputs)])
        axes: dict[str, tuple[int, ...]] = {}
        for a, c in enumerate(picked):
            if c.factor is not None:
                axes[c.factor] = (*axes.get(c.factor, ()), a)
        return Option(tuple(ins), outs, prod(ways.values()), self.across(step, rule, axes))

    def across(self, step: Step, rule: Rule, axes: Mapping[str, tuple[int, ...]]) -> float:
        """Seconds of communication inside of an operator that works across the shards of a factor, which `axes` cut:
        about two all-reduces of a result without that factor."""
        out = next((v for v in step.outputs if v is not None), None)
        if rule.local is None or rule.across is None or out is None:
            return 0.0
        cut, sizes = [f for f in rule.across if axes.get(f)], self.network.sizes
        total = 0.0
        for f in cut:
            others = prod([sizes[a] for g, over in axes.items() if g != f for a in over])
            for a in axes[f]:
                size = out.like.bytes / max(1, rule.sizes[f]) / others
                total += 2 * collective_seconds("all_reduce", size, sizes[a], self.network.links[a])
        return total

    def seconds(self, step: Step, option: Option) -> float:
        """Seconds of computation of one operator."""
        if is_free(step):
            return 0.0
        sizes = self.network.sizes
        moved = 0.0
        for amounts, states in zip(step.moved, (option.inputs, option.outputs)):
            for amount, state in zip(amounts, states):
                moved += amount / prod([n for s, n in zip(state or (), sizes) if isinstance(s, int)])
        first = next((v for v in step.outputs if v is not None), None)
        dtype = first.like.dtype if first is not None else torch.float32
        took = self.machine.seconds(step.flops / option.split, moved, dtype)
        return took if step.flops or moved else 0.0


def seconds_of_optimizer(bytes_: float, machine: Machine, states: float) -> float:
    """Seconds of an elementwise update: parameter, gradient and states are read, and all but the gradient written."""
    return (3 + 2 * states) * bytes_ / machine.memory


__all__ = ["Choices", "Option", "Step", "Steps", "Tensor", "is_free", "is_pointwise", "pattern", "seconds_of_optimizer"]
__all__ += ["steps_of"]
