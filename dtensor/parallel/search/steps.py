"""What repeats in a tape counts once: operators and values of layers that are alike are one step, and one tensor.

Two operators are alike if they are the same one, on the same sizes, at the same place of modules whose names differ in
numbers only. A plan treats them in the same way.
"""

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch

from ...rules import is_in_place
from ...torch_private.core import OpOverload
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


__all__ = ["Step", "Steps", "Tensor", "is_free", "is_pointwise", "pattern", "steps_of"]
