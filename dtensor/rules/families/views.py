"""Views and data movement: which output dim holds which factor of the input.

A view consists of groups: consecutive input dims whose sizes have the same product as some output dims. Merging and
splitting keep only the shards of the major factor, and only if it divides evenly. Tests prove what is kept by comparing
index maps.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import gcd
from typing import Any

import torch

from ...torch_private.symbolic_sizes import same_size
from ..call import Call, LocalCall, rule_for
from ..rule import Dim, Dims, Rule
from .pointwise import broadcast

LINEAR = (frozenset({0}),)


def groups(before: tuple[Any, ...], after: tuple[Any, ...]) -> list[tuple[list[int], list[int]]]:
    """Divide two shapes of equal product into the smallest groups of consecutive dims of equal product.

    Dims of length 1 are in no group.
    """
    ins = [i for i, s in enumerate(before) if not same_size(s, 1)]
    outs = [i for i, s in enumerate(after) if not same_size(s, 1)]
    found: list[tuple[list[int], list[int]]] = []
    i = o = 0
    while i < len(ins) and o < len(outs):
        a, b = [ins[i]], [outs[o]]
        x, y = before[ins[i]], after[outs[o]]
        i, o = i + 1, o + 1
        while x != y:
            if (x < y and i < len(ins)) or o == len(outs):
                if i == len(ins):
                    return []
                a.append(ins[i])
                x, i = x * before[ins[i]], i + 1
            else:
                b.append(outs[o])
                y, o = y * after[outs[o]], o + 1
        found.append((a, b))
    return found


def view_factors(before: tuple[Any, ...], after: tuple[Any, ...]) -> tuple[Dims, Dims, dict[str, Any]]:
    """Factors of a tensor of shape `before`, those of its view as shape `after`, and the factors' sizes."""
    ins: list[Dim] = [()] * len(before)
    outs: list[Dim] = [()] * len(after)
    sizes: dict[str, Any] = {}
    if any(isinstance(s, int) and s == 0 for s in before):
        return tuple(ins), tuple(outs), sizes
    for a, b in groups(before, after):
        if len(a) > 1 and len(b) > 1:
            _share_major(a, b, before, after, ins, outs, sizes)
            continue
        finer, shape = (a, before) if len(a) >= len(b) else (b, after)
        names = tuple(f"d{a[0]}.{k}" for k in range(len(finer)))
        sizes.update(zip(names, [shape[i] for i in finer]))
        for side, index in ((ins, a), (outs, b)):
            for i, factors in zip(index, [names] if len(index) == 1 else [(name,) for name in names]):
                side[i] = factors
    return tuple(ins), tuple(outs), sizes


def _common(x: Any, y: Any) -> Any:
    """The greatest common divisor; for symbolic sizes it is found only if one divides the other, else 1."""
    if isinstance(x, int) and isinstance(y, int):
        return gcd(x, y)
    return x if y % x == 0 else y if x % y == 0 else 1


def _share_major(a: Any, b: Any, before: Any, after: Any, ins: Any, outs: Any, sizes: Any) -> None:
    """Handle a group of many dims to many: only a major factor that both first dims share can be followed."""
    x, y = before[a[0]], after[b[0]]
    small = _common(x, y)
    if same_size(small, 1):
        return
    major, of_in, of_out = (f"d{a[0]}.{k}" for k in range(3))
    sizes.update({major: small, of_in: x // small, of_out: y // small})
    ins[a[0]], outs[b[0]] = (major, of_in), (major, of_out)


@rule_for("view", "_unsafe_view", "reshape", "_reshape_copy", "view_copy", "_reshape_alias")
def view(call: Call) -> Rule:
    (out,) = call.outputs
    assert out is not None
    if call.has("dtype"):
        return _reinterpreted(call, out)
    ins, outs, sizes = view_factors(call["self"].shape, out.shape)
    return Rule((ins,), (outs,), sizes, linear=LINEAR, shape_arg=_size(call))


def _size(call: Call) -> str:
    return "size" if call.has("size") else "shape"


def _reinterpreted(call: Call, out: Any) -> Rule:
    """`x.view(dtype)`: it is not linear, and the last dim changes its length if the element size changes."""
    resized = out.dtype.itemsize != call["self"].dtype.itemsize
    return replace(follow(call, [*range(out.ndim - 1), None] if resized else list(range(out.ndim))), linear=())


def follow(
    call: Call, source: Sequence[int | None], blocked: frozenset[str] = frozenset(), shape_arg: Any = None
) -> Rule:
    """The rule where output dim i is input dim `source[i]`, or a new dim (None)."""
    shape = call["self"].shape
    (ins,), sizes = broadcast([shape], shape)
    out: Dims = tuple(() if s is None else ins[s] for s in source)
    outs = tuple(out if o is not None else None for o in call.outputs)
    kept = {f for d in out for f in d}
    blocked = blocked | (frozenset(sizes) - kept)
    out_blocked = tuple(tuple(() if blocked & set(d) else d for d in o) if o is not None else None for o in outs)
    return Rule((ins,), out_blocked, sizes, linear=LINEAR, blocked=blocked, shape_arg=shape_arg)


@rule_for("t")
def t(call: Call) -> Rule:
    return follow(call, list(range(call["self"].ndim))[::-1])


@rule_for("transpose", "swapaxes")
def transpose(call: Call) -> Rule:
    ndim = call["self"].ndim
    order: list[int | None] = list(range(ndim))
    if ndim:
        a, b = [call[name] % ndim for name in ("axis0", "axis1", "dim0", "dim1") if call.has(name)]
        order[a], order[b] = order[b], order[a]
    return follow(call, order)


@rule_for("permute")
def permute(call: Call) -> Rule:
    ndim = call["self"].ndim
    return follow(call, [d % ndim for d in call["dims"]])


@rule_for("unsqueeze")
def unsqueeze(call: Call) -> Rule:
    ndim = call["self"].ndim
    order: list[int | None] = list(range(ndim))
    order.insert(call["dim"] % (ndim + 1), None)
    return follow(call, order)


@rule_for("squeeze")
def squeeze(call: Call) -> Rule:
    shape = call["self"].shape
    given = call["dim"] if call.has("dim") else list(range(len(shape)))
    given = given if isinstance(given, (list, tuple)) else [given]
    gone = {d % len(shape) for d in given if same_size(shape[d], 1)} if shape else set()

    def local(call: LocalCall) -> Any:
        # By dimension: a shard may have length 1 where the whole has not.
        return torch.ops.aten.squeeze.dims(call["self"], sorted(gone))

    return replace(follow(call, [i for i in range(len(shape)) if i not in gone]), local=local)


@rule_for("expand")
def expand(call: Call) -> Rule:
    (out,) = call.outputs
    assert out is not None
    shape = call["self"].shape
    new = out.ndim - len(shape)
    source = [None if i < new or (same_size(shape[i - new], 1) and not same_size(s, 1)) else i - new
              for i, s in enumerate(out.shape)]  # fmt: skip
    rule = follow(call, list(source), shape_arg="size")
    return rule


@rule_for("constant_pad_nd")
def pad(call: Call) -> Rule:
    """Padded dims may not be sharded; padding with zeros is linear."""
    ndim, given = call["self"].ndim, call["pad"]
    padded = {f"d{ndim - 1 - i // 2}" for i, p in enumerate(given) if not (isinstance(p, int) and p == 0)}
    rule = follow(call, list(range(ndim)), blocked=frozenset(padded))
    return rule if call["value"] == 0 else replace(rule, linear=())


@rule_for("cat", "stack", "_stack")
def cat(call: Call) -> Rule:
    (out,) = call.outputs
    assert out is not None
    dim = call["dim"] % out.ndim
    stacked = call.name.endswith("stack")
    names = [f"d{i}" for i in range(out.ndim)]
    full: Dims = tuple(() if i == dim else (f,) for i, f in enumerate(names))
    one = full[:dim] + full[dim + 1 :] if stacked else full
    # Legacy: cat skips 1-D empty tensors whatever the shape of the others.
    ins = tuple(one if o.ndim == len(one) else ((),) * o.ndim for o in call.operands)
    sizes = {f: s for i, (f, s) in enumerate(zip(names, out.shape)) if i != dim}
    return Rule(ins, (full,), sizes, linear=(frozenset(range(len(ins))),))


@rule_for("repeat")
def repeat(call: Call) -> Rule:
    """A dim that is repeated may not be sharded."""
    shape, repeats = call["self"].shape, call["repeats"]
    new = len(repeats) - len(shape)
    source = [i - new if i >= new and same_size(r, 1) else None for i, r in enumerate(repeats)]
    return follow(call, source)


@rule_for("view_as_real")
def view_as_real(call: Call) -> Rule:
    return follow(call, [*range(call["self"].ndim), None])


@rule_for("view_as_complex")
def view_as_complex(call: Call) -> Rule:
    return follow(call, list(range(call["self"].ndim - 1)))


__all__ = ["follow", "groups", "view_factors"]
