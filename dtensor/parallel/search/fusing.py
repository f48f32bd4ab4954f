"""What compilers fuse: how long memory is needed, and what a step reads, writes and computes."""

from itertools import accumulate
from typing import Any

import torch

from ...torch_private.core import OpOverload
from .steps import Step, Steps, Tensor, is_free
from .tape import BORDER, Op, Value


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


def lifetimes(steps: Steps) -> dict[int, int]:
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


def moved(step: Step) -> tuple[list[float], list[float]]:
    """Bytes of each operand that one rank alone would read from memory, and of each output that it would write."""
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


def flops(op: Op) -> float:
    """Floating-point operations of one rank alone, of products and attention; 0.0 for others."""
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


__all__ = ["flops", "is_fused", "is_pointwise", "lifetimes", "moved"]
