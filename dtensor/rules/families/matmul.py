"""Matrix products: einsums whose result is Partial(sum) if the contracted factor is sharded."""

from typing import Any

import torch
import torch.nn.functional as F

from ...torch_private.symbolic_sizes import same_size
from ..call import Call, LocalCall, rule_for, shape_for
from ..local_calls import empty_outputs, has_empty_shard
from ..pattern import Pattern, bind
from ..rule import Rule, dims

EINSUMS = {
    "mm": ("mk", "kn", "mn"),
    "bmm": ("bmk", "bkn", "bmn"),
    "mv": ("mk", "k", "m"),
    "dot": ("k", "k", ""),
    "vdot": ("k", "k", ""),
    "ger": ("m", "n", "mn"),
    "addbmm": ("bmk", "bkn", "mn"),
    "_int_mm": ("mk", "kn", "mn"),
}
"""Operator -> factors of both operands and of the result."""

ADDED = {"addmm": "mm", "baddbmm": "bmm", "addmv": "mv", "addbmm": "addbmm", "addr": "ger"}
"""Operator -> the product to which it adds its first operand."""


@rule_for(*(name for name in EINSUMS if name not in ADDED))
def product(call: Call) -> Rule:
    a, b, out = EINSUMS[call.name]
    x, y = call.operands
    sizes = {**dict(zip(a, x.shape)), **dict(zip(b, y.shape))}
    return Rule((dims(a), dims(b)), (dims(out),), sizes, reduce={"k": "sum"}, linear=(frozenset({0}), frozenset({1})))


@rule_for(*ADDED)
def added_product(call: Call) -> Rule:
    """`beta * input + alpha * (a @ b)`: if the contracted factor is sharded, the input must be partial too."""
    a, b, out = EINSUMS[ADDED[call.name]]
    bias, x, y = call.operands
    sizes = {**dict(zip(a, x.shape)), **dict(zip(b, y.shape))}
    full = [sizes[f] for f in out]
    own = [
        "1" if same_size(s, 1) and not same_size(o, 1) else f
        for f, s, o in zip(out[len(out) - bias.ndim :], bias.shape, full[len(out) - bias.ndim :])
    ]
    return Rule(
        (dims(own), dims(a), dims(b)),
        (dims(out),),
        sizes,
        reduce={f: "sum" for f in a + b if f not in out},
        linear=(frozenset({0, 1}), frozenset({0, 2})),
        addends=frozenset({0}),
        local=_with_whole_input if call.name == "addmv" and tuple(bias.shape) != tuple(full) else None,
    )


def _with_whole_input(call: LocalCall) -> Any:
    """Run the operator on the input as it broadcasts: of an empty matrix the kernel returns it without doing so."""
    return call.run(self=call["self"].expand(call["mat"].shape[0]))


@rule_for("_scaled_mm")
def scaled_mm(call: Call) -> Rule:
    """`mm` of 8-bit numbers with a scale for each tensor, or for each row of the first and column of the second.

    The contracted factor may not be sharded: each partial result would be rounded to the few bits of the result.
    """
    text = "m_, _n, ~, ~, ~, ~ -> mn"
    if call["scale_a"].shape and call["scale_a"].shape[0] == call["self"].shape[0]:
        text = "m_, _n, m_, _n, n, ~ -> mn"
    return bind(Pattern(text), call)


def _of_groups(call: LocalCall) -> Any:
    """The kernel takes rows of a multiple of 16 bytes, which the rows of a shard need not be, so they are padded."""
    if has_empty_shard(call):
        return empty_outputs(call)
    return call.run(self=_with_long_rows(call["self"]), mat2=_with_long_rows(call["mat2"]))


def _with_long_rows(x: torch.Tensor) -> torch.Tensor:
    """The same matrices, laid out so that each row (or column, if transposed) starts at a multiple of 16 bytes."""
    if x.stride(-1) != 1:
        return _with_long_rows(x.mT).mT if x.stride(-2) == 1 else _with_long_rows(x.contiguous())
    short = -x.shape[-1] % (16 // x.itemsize)
    steps = (*x.stride()[:-1], x.storage_offset())
    if all(isinstance(n, int) and n * x.itemsize % 16 == 0 for n in steps):
        return x
    return F.pad(x, (0, short))[..., : x.shape[-1]]


def _groups(text: str, reduce: str = "") -> Pattern:
    return Pattern(text, linear=({0}, {1}), reduce=dict.fromkeys(reduce, "sum"), local=_of_groups)


_GROUPS_OF = {
    (2, 3): _groups("_k, _kn, ~, ~ -> _n", "k"),
    (3, 2): _groups("_mk, k_, ~, ~ -> m_", "k"),
    (2, 2): _groups("m_, _n, ~, ~ -> _mn"),
    (3, 3): _groups("gmk, gkn, ~, ~ -> gmn", "k"),
}
"""Numbers of dims of both operands -> the pattern. The dim that offsets index is not sharded; (3, 3) has no offsets."""


@rule_for("_grouped_mm")
def grouped_product(call: Call) -> Rule:
    """Products of groups: of rows (2, 3), of columns (3, 2), of the contracted dim (2, 2), or of matrices (3, 3)."""
    return bind(_GROUPS_OF[(call["self"].ndim, call["mat2"].ndim)], call)


@shape_for("_grouped_mm")
def _grouped_shape(x: torch.Tensor, y: torch.Tensor, offs: Any = None, bias: Any = None, out_dtype: Any = None) -> Any:
    """The output; torch's own meta function accepts only bfloat16, although the CPU kernel accepts other dtypes."""
    if x.dtype == torch.bfloat16:
        return torch.ops.aten._grouped_mm.default(x, y, offs, bias, out_dtype)
    rows, columns = (x.shape[0],) if x.dim() == 2 else tuple(x.shape[:2]), (y.shape[-1],)
    if x.dim() == 2 and y.dim() == 2:
        return x.new_empty((offs.numel(), *rows, *columns))
    return x.new_empty((*rows[int(y.dim() == 2) :], *columns))


@rule_for("transformers::grouped_mm_fallback")
def grouped_product_of_transformers(call: Call) -> Rule:
    """The operator that the transformers library uses in place of `_grouped_mm` in compiled code."""
    return bind(Pattern("_k, _kn, ~ -> _n", linear=({0}, {1}), reduce={"k": "sum"}), call)


@rule_for("transformers::grouped_mm_fallback_backward")
def grouped_product_of_transformers_backward(call: Call) -> Rule:
    return bind(Pattern("_k, _kn, ~, _n -> _k, _kn", linear=({3},), reduce={"n": "sum"}), call)


__all__ = ["EINSUMS"]
