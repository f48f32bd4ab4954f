"""What repeats in a tape counts once: operators and values of layers that are alike are one step, and one tensor.

Two operators are alike if they are the same one, on the same sizes, at the same place of modules whose names differ in
numbers only. A plan treats them in the same way.
"""

import re
from collections import Counter
from dataclasses import dataclass, field
from itertools import accumulate
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
        ahead: parameters, and what is a view or a cast of one; their moves need wait for nothing.
        late: gradients, and what only becomes one by views and casts; nothing in the backward waits for their moves.
        decided: border -> the one that stands for all at which a plan says the same: those of the same modules, be it
            in another call of them, for gradients that come back, or where the backward runs a forward again.
        places: each of these -> the names of its modules.
        first: step of a forward that the backward runs again -> the same step of the forward, with the same choices.
        in_passing: what the backward reads only to compute gradients of parameters, for which nothing else waits.
    """

    tape: Tape
    steps: list[Step] = field(default_factory=list[Step])
    tensors: list[Tensor] = field(default_factory=list[Tensor])
    of: dict[Op, Step] = field(default_factory=dict[Op, Step])
    which: dict[Value, Tensor] = field(default_factory=dict[Value, Tensor])
    gradients: Counter[tuple[Tensor, Tensor]] = field(default_factory=Counter[tuple[Tensor, Tensor]])
    last: dict[int, int] = field(default_factory=dict[int, int])
    ahead: set[Tensor] = field(default_factory=set[Tensor])
    late: set[Tensor] = field(default_factory=set[Tensor])
    in_passing: set[Tensor] = field(default_factory=set[Tensor])
    decided: dict[Step, Step] = field(default_factory=dict[Step, Step])
    places: dict[Step, list[str]] = field(default_factory=dict[Step, list[str]])
    first: dict[Step, Step] = field(default_factory=dict[Step, Step])

    def beside(self, t: Tensor, backward: bool) -> bool:
        """Whether nothing waits for moves of a tensor to where the forward or the backward reads it."""
        return t in self.ahead or t in self.late or (backward and t in self.in_passing)

    def of_kind(self, kind: str) -> list[Tensor]:
        return [t for t in self.tensors if t.kind == kind]

    def batch(self) -> list[Tensor]:
        """The inputs that hold the batch: the first that has dims, and others of its length."""
        inputs = [t for t in self.of_kind(INPUT) if t.like.ndim]
        return [t for t in inputs if t.like.shape[0] == inputs[0].like.shape[0]]


def steps_of(tape: Tape, *, alike: bool = True) -> Steps:
    """Find what repeats in a tape; unless `alike`, only within modules of one name."""

    def named(name: str) -> str:
        return pattern(name) if alike else name

    made = Steps(tape)
    tensors: dict[Any, Tensor] = {}
    steps: dict[Any, Step] = {}
    places: Counter[Any] = Counter()

    def tensor(v: Value) -> Tensor:
        found = made.which.get(v)
        if found is None:
            key = v.kind, named(v.name) if v.kind != INPUT else v.name, v.shape, v.dtype
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
        at = (op.path, op.backward, op.again)
        number = places[at]
        places[at] += 1
        place = named(op.path), number, normal(op)
        key = *place, op.backward, op.again
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
            if op.again and (*place, False, False) in steps:
                made.first[step] = steps[*place, False, False]
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
    _beside(made)
    _decided(made)
    made.last = _lifetimes(made)
    turn = next((k for k, op in enumerate(tape.ops) if op.backward), len(tape.ops))
    seen: set[int] = set()
    for v, t in made.which.items():
        forward = t.step is not None and not t.step.backward and not t.plain
        if forward and made.last.get(v.storage, 0) >= turn and v.storage not in seen:
            seen.add(v.storage)
            t.saved += 1
    for step in made.steps:
        step.moved, step.flops = _moved(step), _flops(step.like)
    return made


def _beside(made: Steps) -> None:
    """Find the tensors that are `ahead`, `late`, and read `in_passing`."""
    made.ahead.update(made.of_kind(PARAMETER))
    for step in made.steps:
        if _hands_on(step) and all(t in made.ahead for t in step.sources[0]):
            made.ahead.update([t for t in step.outputs if t is not None])
    gradients = {g for g, _ in made.gradients}
    only: set[Tensor] = set()
    for t in reversed(made.tensors):
        given = [u for u, _ in t.users]
        if t in gradients if not given else all(u.backward and _all_in(u, only) for u in given):
            only.add(t)
        if t in gradients if not given else all(_hands_on(u) and _all_in(u, made.late) for u in given):
            made.late.add(t)
    for t in made.tensors:
        users = [u for u, _ in t.users if u.backward]
        if users and all(_all_in(u, only) for u in users):
            made.in_passing.add(t)


def _decided(made: Steps) -> None:
    """Find the borders of the forward that decide what happens at each border, and the modules at which they are."""
    first: dict[tuple[str, str], Step] = {}
    joined: dict[Step, Step] = {}

    def root(step: Step) -> Step:
        while joined[step] is not step:
            step = joined[step]
        return step

    for op in made.tape.ops:
        if op.func == BORDER and op.forward is None:
            step = made.of[op]
            joined.setdefault(step, step)
            joined[root(step)] = root(first.setdefault((op.path, op.what), step))
    for (path, _), step in first.items():
        made.places.setdefault(root(step), []).append(path)
    for step in made.steps:
        if step.border:
            forward = step.like.forward
            made.decided[step] = root(step if forward is None else made.of[forward])


def _hands_on(step: Step) -> bool:
    """Whether it is a view or a cast of one tensor."""
    return len(step.sources) == 1 and (is_free(step) or step.like.func is torch.ops.aten._to_copy.default)


def _all_in(step: Step, found: set[Tensor]) -> bool:
    return all(t is None or t in found for t in step.outputs)


def _lifetimes(steps: Steps) -> dict[int, int]:
    """Memory -> the index of the last operator that needs it.

    What an operator that is fused makes is computed again in the backward, from what it read, so that this stays. It
    stays itself if that takes less memory, or if the backward reads it in full, as products do. That is about what
    torch's partitioner does by default.
    """
    ops = steps.tape.ops
    last: dict[int, int] = {}
    later: dict[int, int] = {}
    whole: set[int] = set()
    own = {v.storage for v in (*steps.tape.values.values(), *steps.tape.gradients.values())}
    for index in reversed(range(len(ops))):
        op, step = ops[index], steps.of[ops[index]]
        fused = is_fused(step)
        if op.backward:
            for v in (*op.operands, *[v for v in op.outputs if v is not None]):
                last.setdefault(v.storage, index)
                later.setdefault(v.storage, index)
            whole.update([v.storage for v in op.operands if not fused and not is_free(step)])
            continue
        made = [v.storage for v in op.outputs if v is not None]
        again = max([later.get(s, -1) for s in made if s not in whole], default=-1)
        if fused and again >= 0:
            sources = {v.storage: v.bytes for v in op.operands if v.storage not in later and v.storage not in own}
            if sum(sources.values()) > sum([v.bytes for v in op.outputs if v is not None]):
                whole.update(made)
                again = -1
        for v in op.operands:
            if fused:
                later[v.storage] = max(later.get(v.storage, -1), again)
            last[v.storage] = max(last.get(v.storage, -1), index)
        for storage in made if not is_free(step) else ():
            end = last.get(storage, index)
            if not fused or storage in whole:
                last[storage] = max(end, later.get(storage, -1))
            else:
                last[storage] = index if ops[end].backward else end
    own |= _never_in_memory(steps, last)
    return {storage: index for storage, index in last.items() if storage not in own}


def _never_in_memory(steps: Steps, last: dict[int, int]) -> set[int]:
    """Memory of what fused operators make for each other, with nothing between them that is not fused."""
    found: set[int] = set()
    of_each = [steps.of[op] for op in steps.tape.ops]
    opaque = list(accumulate([not (is_free(step) or is_fused(step)) for step in of_each]))
    for index, (op, step) in enumerate(zip(steps.tape.ops, of_each)):
        if is_fused(step):
            found.update([v.storage for v in op.outputs if v and opaque[last.get(v.storage, index)] == opaque[index]])
    return found


def is_pointwise(step: Step) -> bool:
    """Whether compilers fuse it with its neighbours."""
    func = step.like.func
    return isinstance(func, OpOverload) and (
        torch.Tag.pointwise in func.tags or func is torch.ops.aten._to_copy.default
    )


FUSED = {
    f"aten::{name}"
    for name in (
        "_log_softmax",
        "_log_softmax_backward_data",
        "_softmax",
        "_softmax_backward_data",
        "nll_loss_forward",
        "nll_loss_backward",
        "native_layer_norm",
        "native_layer_norm_backward",
        "_fused_rms_norm",
        "_fused_rms_norm_backward",
        "sum",
        "mean",
        "cat",
        "slice_backward",
        "clone",
    )
}
"""Operators that compilers take apart into pointwise operators, and reductions with small results."""


def is_fused(step: Step) -> bool:
    """Whether compilers fuse it with its neighbours, and compute it again rather than keep what it makes."""
    return not step.border and (is_pointwise(step) or step.like.func._schema.name in FUSED)


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
    return root.step is not None and is_fused(root.step)


def _read_in_full(t: Tensor) -> bool:
    """Whether some user of a tensor, or of a view of it, is not fused; or nothing uses it."""
    todo, seen = [t], {t}
    while todo:
        at = todo.pop()
        if not at.users:
            return True
        for user, _ in at.users:
            if not is_free(user):
                if not is_fused(user):
                    return True
                continue
            more = [out for out in user.outputs if out is not None and out not in seen]
            seen.update(more)
            todo += more
    return False


def _moved(step: Step) -> tuple[list[float], list[float]]:
    if is_free(step):
        return [0.0] * len(step.sources), [0.0] * len(step.outputs)
    fused = is_fused(step)
    read = [
        0.0 if fused and all(_fused(t) for t in source) else float(next(iter(source)).like.bytes)
        for source in step.sources
    ]
    written = [
        0.0 if t is None or (fused and not _read_in_full(t) and not t.saved) else float(t.like.bytes)
        for t in step.outputs
    ]
    return read, written


ATTENTION = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": (0, 2),
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": (1, 5),
}
"""Name of an operator -> the place of the queries among its operands, followed by the keys; and its number of products.
Half of each is skipped if it is causal (Dao, "FlashAttention-2", 2023)."""


def _flops(op: Op) -> float:
    from torch.utils.flop_counter import flop_registry  # it takes long to import

    name = "" if op.func == BORDER else op.func._schema.name
    if (attention := ATTENTION.get(name)) is not None:
        first, products = attention
        (*_, sent, width), (*_, read, _) = (v.shape for v in op.operands[first : first + 2])
        causal = any(a is True for a in op.args) or op.kwargs.get("is_causal") is True
        batch = op.operands[first].numel / sent / width
        return products * 2 * batch * sent * read * width * (0.5 if causal and sent > 1 else 1.0)
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
