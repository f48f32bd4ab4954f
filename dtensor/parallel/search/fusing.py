"""What compilers fuse: how long memory is needed, and what a step reads, writes and computes."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

from ...prices import operators
from ...prices.kernels import Call, Memory, Share, shares
from .steps import Step, Steps, is_free
from .tape import Op, Value


def is_fused(step: Step) -> bool:
    """Whether compilers fuse it with its neighbours, and compute it again rather than keep what it makes."""
    return not step.border and operators.is_fused(step.like.func)


def lifetimes(steps: Steps) -> tuple[dict[int, int], list[Op]]:
    """Memory -> the index of the last operator that needs it; and the operators that the backward computes again.

    What an operator that is fused makes is computed again in the backward, from what it read, so that this stays. It
    stays itself if that takes less memory, or if the backward reads it in full, as products do. That is about what
    torch's partitioner does by default.
    """
    ops = steps.tape.ops
    last: dict[int, int] = {}
    later: dict[int, int] = {}
    whole: set[int] = set()
    repeated: list[Op] = []
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
                repeated += [op] if later.get(storage, -1) >= 0 and op not in repeated[-1:] else []
    own |= _never_in_memory(steps, last)
    return {storage: index for storage, index in last.items() if storage not in own}, repeated[::-1]


def _never_in_memory(steps: Steps, last: dict[int, int]) -> set[int]:
    """Memory of what fused operators make for each other, with nothing between them that is not fused."""
    found: set[int] = set()
    of_each = [steps.of[op] for op in steps.tape.ops]
    opaque = list(accumulate([not (is_free(step) or is_fused(step)) for step in of_each]))
    for index, (op, step) in enumerate(zip(steps.tape.ops, of_each)):
        if is_fused(step):
            found.update([v.storage for v in op.outputs if v and opaque[last.get(v.storage, index)] == opaque[index]])
    return found


def price(steps: Steps, repeated: Sequence[Op]) -> None:
    """Note of each step what one rank alone would compute, and read and write as its share of kernels.

    Args:
        steps: the steps.
        repeated: operators of the forward that the backward computes again.
    """
    made: dict[Step, list[Share]] = {}
    halves: dict[bool, list[Op]] = {True: [*repeated], False: []}
    tape, loss = steps.tape, [v for v in (steps.tape.loss,) if v is not None]
    own = {v.storage for v in tape.values.values()}
    sizes: dict[Memory, float] = {}
    for op in tape.ops:
        results = [v for v in op.outputs if v is not None]
        for v in (*op.operands, *results):
            sizes.setdefault(v.storage, float(v.bytes))
        if results and not is_free(steps.of[op]):
            halves[op.backward].append(op)
    kept = {v.storage for v in tape.gradients.values()}
    for _, ops in sorted(halves.items(), reverse=True):
        read = {v.storage for op in ops for v in op.operands}
        for op, share in zip(ops, _shares(ops, kept | own, sizes)):
            made.setdefault(steps.of[op], []).append(share)
        kept = read - {v.storage for op in ops for v in op.outputs if v is not None}
        kept |= {v.storage for v in (*tape.results, *loss)}
    for step, found in made.items():
        step.flops = flops(step.like)
        step.moved = _mean([s.read for s in found], step.count), _mean([s.written for s in found], step.count)
        step.launches = sum([s.launches for s in found]) / step.count


def _mean(found: Sequence[Sequence[float]], count: int) -> list[float]:
    return [sum(column) / count for column in zip(*found)]


def _shares(ops: Sequence[Op], kept: set[int], sizes: dict[Memory, float]) -> list[Share]:
    def memory(values: Sequence[Value | None]) -> list[Any]:
        return [None if v is None else (v.storage, float(v.bytes)) for v in values]

    return shares([Call.of(op.func, memory(op.operands), memory(op.outputs)) for op in ops], kept, sizes)


def flops(op: Op) -> float:
    """Floating-point operations of one rank alone, of products and attention; 0.0 for others."""

    def shape(a: Any) -> Any:
        if isinstance(a, Value):
            return torch.Size(a.shape)
        return [shape(item) for item in a] if isinstance(a, (list, tuple)) else a

    out = [shape(v) for v in op.outputs]
    return operators.flops(
        op.func, shape(op.args), {k: shape(v) for k, v in op.kwargs.items()}, out if op.many else out[0]
    )


__all__ = ["is_fused", "lifetimes", "price"]
