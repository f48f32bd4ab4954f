"""Matrix products: einsums whose result is Partial(sum) if the contracted factor is sharded."""

from typing import Any

import torch

from ..bind import rule_for, rule_table
from ..call import Call, LocalCall, shape_for
from ..grouped_rows import aligned
from ..local_calls import empty_outputs, has_empty_shard, unless_empty
from ..notation import Rule, library_rule

PRODUCTS = {
    "mm": Rule("mk,kn->mn", reduce="k", linear=(0, 1)),
    "bmm": Rule("bmk,bkn->bmn", reduce="k", linear=(0, 1)),
    "mv": Rule("mk,k->m", reduce="k", linear=(0, 1)),
    "dot": Rule("k,k->", reduce="k", linear=(0, 1)),
    "vdot": Rule("k,k->", reduce="k", linear=(0, 1)),
    "ger": Rule("m,n->mn", linear=(0, 1)),
    "_int_mm": Rule("mk,kn->mn", reduce="k", linear=(0, 1)),
}

rule_table(__name__, PRODUCTS)

TRANSFORMERS = {
    "transformers::grouped_mm_fallback": Rule("1k,1kn,*->1n", reduce="k", linear=(0, 1)),
    "transformers::grouped_mm_fallback_backward": Rule("1k,1kn,*,1n->1k,1kn", reduce="n", linear=3),
}
"""The operators that the transformers library uses in place of `_grouped_mm` in compiled code."""

rule_table(__name__, TRANSFORMERS, local=unless_empty)

ADDED = {
    "addmm": ("mk,kn->mn", "k"),
    "baddbmm": ("bmk,bkn->bmn", "k"),
    "addmv": ("mk,k->m", "k"),
    "addbmm": ("bmk,bkn->mn", "bk"),
    "addr": ("m,n->mn", ""),
}
"""Operator -> the product to which it adds its first operand, and the factors that this reduces."""


@rule_for(*ADDED)
def added_product(call: Call) -> Rule:
    """`beta * input + alpha * (a @ b)`: if the contracted factor is sharded, the input must be partial too."""
    text, reduce = ADDED[call.name]
    out, bias = text.partition("->")[2], call["self"]
    own = out[len(out) - bias.ndim :]
    made = call.outputs[0]
    broadcasts = made is not None and tuple(bias.shape) != tuple(made.shape)
    return library_rule(
        f"{own},{text}",
        reduce=reduce,
        linear=((0, 1), (0, 2)),
        added=0 if reduce else (),
        last="".join([f for f in dict.fromkeys(text) if f.isalpha()]),  # in the order of the product
        local=_with_whole_input if call.name == "addmv" and broadcasts else None,
    )


def _with_whole_input(call: LocalCall) -> Any:
    """Run the operator on the input as it broadcasts: of an empty matrix the kernel returns it without doing so."""
    return call.run(self=call["self"].expand(call["mat"].shape[0]))


@rule_for("_scaled_mm")
def scaled_mm(call: Call) -> Rule:
    """`mm` of 8-bit numbers with a scale for each tensor, or for each row of the first and column of the second.

    The contracted factor may not be sharded: each partial result would be rounded to the few bits of the result.
    """
    by_rows = call["scale_a"].shape and call["scale_a"].shape[0] == call["self"].shape[0]
    return library_rule("m1,1n,m1,1n,n,*->mn" if by_rows else "m1,1n,*,*,*,*->mn", local=unless_empty)


def _of_groups(call: LocalCall) -> Any:
    """The kernel takes rows of a multiple of 16 bytes, which the rows of a shard need not be, so they are padded."""
    if has_empty_shard(call):
        return empty_outputs(call)
    return call.run(self=aligned(call["self"]), mat2=aligned(call["mat2"]))


def _groups(text: str, reduce: str = "") -> Rule:
    return library_rule(text, linear=(0, 1), reduce=reduce, local=_of_groups)


_GROUPS_OF = {
    (2, 3): _groups("1k,1kn,*,*->1n", "k"),
    (3, 2): _groups("1mk,k1,*,*->m1", "k"),
    (2, 2): _groups("m1,1n,*,*->1mn"),
    (3, 3): _groups("gmk,gkn,*,*->gmn", "k"),
}
"""Numbers of dims of both operands -> the rule. The dim that offsets index is not sharded; (3, 3) has no offsets."""


@rule_for("_grouped_mm")
def grouped_product(call: Call) -> Rule:
    """Products of groups: of rows (2, 3), of columns (3, 2), of the contracted dim (2, 2), or of matrices (3, 3)."""
    return _GROUPS_OF[(call["self"].ndim, call["mat2"].ndim)]


@shape_for("_grouped_mm")
def _grouped_shape(x: torch.Tensor, y: torch.Tensor, offs: Any = None, bias: Any = None, out_dtype: Any = None) -> Any:
    """The output; torch's own meta function accepts only bfloat16, although the CPU kernel accepts other dtypes."""
    if x.dtype == torch.bfloat16:
        return torch.ops.aten._grouped_mm.default(x, y, offs, bias, out_dtype)
    rows, columns = (x.shape[0],) if x.dim() == 2 else tuple(x.shape[:2]), (y.shape[-1],)
    if x.dim() == 2 and y.dim() == 2:
        return x.new_empty((offs.numel(), *rows, *columns))
    return x.new_empty((*rows[int(y.dim() == 2) :], *columns))


__all__ = ["ADDED", "PRODUCTS", "TRANSFORMERS"]
