"""Finds what repeats in a tape.

Two operators are alike if they are the same one, on the same sizes, at the same place of modules whose names differ in
numbers only.
"""

from collections import Counter
from typing import Any

import torch

from ...prices.overlap import HELD
from .fusing import lifetimes, price
from .steps import Step, Steps, Tensor, is_free, pattern
from .tape import BORDER, INPUT, PARAMETER, Op, Tape, Value


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
        place = named(op.path), number, _normal(op)
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
    read = {v.storage for op in tape.ops if op.backward for v in op.operands if v.kind != PARAMETER}
    parameters = [v for v in tape.values.values() if v.kind == PARAMETER and v.ndim > 1]
    made.reread = {made.which[v] for v in parameters if v.storage in read}
    made.held = _held(made)
    _beside(made)
    _decided(made)
    made.last, repeated = lifetimes(made)
    turn = next((k for k, op in enumerate(tape.ops) if op.backward), len(tape.ops))
    seen: set[int] = set()
    for v, t in made.which.items():
        forward = t.step is not None and not t.step.backward and not t.plain
        if forward and made.last.get(v.storage, 0) >= turn and v.storage not in seen:
            seen.add(v.storage)
            t.saved += 1
    price(made, repeated)
    return made


def _held(made: Steps) -> set[Value]:
    """The last parameters that the forward gathers, as many as `dtensor.passes` keeps, if the backward reads them first
    and in reverse order."""
    forward, backward = (
        [v.storage for op in made.tape.ops if op.backward == half and not op.again for v in op.operands]
        for half in (False, True)
    )
    read = {v.storage: v for v in made.tape.values.values() if v.kind == PARAMETER and v.storage in {*backward}}
    first, last = ([x for x in dict.fromkeys(half) if x in read] for half in (backward, forward))
    found: set[Value] = set()
    for a, b in list(zip(first, reversed(last)))[:HELD]:
        if a != b:
            break
        found.add(read[a])
    return found


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


def _normal(op: Op) -> Any:
    """What must be equal for operators to be alike, besides their place."""
    shapes = tuple([(v.shape, v.dtype, v.kind) for v in op.operands])
    made = tuple([v and (v.shape, v.stride, v.kind) for v in op.outputs])
    return op.func, op.what, shapes, made, repr([a for a in (*op.args, *op.kwargs.items()) if not _has_tensor(a)])


def _has_tensor(a: Any) -> bool:
    return isinstance(a, Value) or (isinstance(a, (list, tuple)) and any(map(_has_tensor, a)))


def _hands_on(step: Step) -> bool:
    """Whether it is a view or a cast of one tensor."""
    return len(step.sources) == 1 and (is_free(step) or step.like.func is torch.ops.aten._to_copy.default)


def _all_in(step: Step, found: set[Tensor]) -> bool:
    return all(t is None or t in found for t in step.outputs)


__all__ = ["steps_of"]
