"""What an operator does, as prices see it: whether compilers fuse it, what it computes, what it reads of an operand.

Shapes and arguments come from whoever asks, be it a node of a graph or an operator of a tape; symbolic sizes are
replaced by their example values before.
"""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch

from ..torch_private.core import OpOverload


def is_pointwise(func: Any) -> bool:
    """Whether torch says of an operator that it computes element by element."""
    return isinstance(func, OpOverload) and torch.Tag.pointwise in func.tags


CASTS = frozenset(("aten::_to_copy", "prims::convert_element_type"))
"""Operators that copy, element by element, to another dtype."""


def is_elementwise(func: Any) -> bool:
    """Whether each element of the result depends on those at its place only."""
    return is_pointwise(func) or (isinstance(func, OpOverload) and func._schema.name in CASTS)


TAKEN_APART = """
    _log_softmax _log_softmax_backward_data _softmax _softmax_backward_data mse_loss mse_loss_backward
    nll_loss_forward nll_loss_backward native_layer_norm native_layer_norm_backward native_group_norm
    native_group_norm_backward _fused_rms_norm _fused_rms_norm_backward
"""
REDUCTIONS = """
    all amax amin any argmax argmin linalg_vector_norm logsumexp max mean min prod std sum var var_mean
"""
COPIES = """
    arange cat clone constant_pad_nd copy embedding empty empty_like full full_like gather index index_select
    lift_fresh_copy new_empty new_full new_ones new_zeros ones ones_like repeat scalar_tensor select_backward
    slice_backward stack tril triu zeros zeros_like
"""
FUSED = frozenset(f"aten::{name}" for name in f"{TAKEN_APART} {REDUCTIONS} {COPIES}".split())
"""Operators that compilers fuse with their neighbours though torch does not say that they are pointwise: those of
pointwise parts and reductions, which compilers take apart; reductions, whose results are small; copies, and what is
made of nothing."""


def is_fused(func: Any) -> bool:
    """Whether compilers fuse an operator with its neighbours, and compute it again rather than keep what it makes."""
    return is_elementwise(func) or (isinstance(func, OpOverload) and func._schema.name in FUSED)


PICKING = frozenset(("aten::embedding", "aten::gather", "aten::index", "aten::index_select", "dtensor::shard"))
"""Operators that read of their first operand no more than they write."""


def is_picking(func: Any) -> bool:
    """Whether an operator reads of its first operand no more than it writes."""
    return isinstance(func, OpOverload) and func._schema.name in PICKING


ATTENTION = "aten::_scaled_dot_product_"
"""How the names of operators begin that compute attention in one kernel."""


def flops(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> float:
    """Return the floating-point operations of products, convolutions and attention; 0.0 for other operators.

    Args:
        func: the operator.
        args, kwargs: its arguments, with a `torch.Size` for each tensor.
        out: what it returns, likewise; a list or tuple if it returns several tensors.
    """
    from torch.utils.flop_counter import flop_registry  # it takes long to import

    if not isinstance(func, OpOverload):
        return 0.0
    if func._schema.name.startswith(ATTENTION):
        return _attention(func, args, kwargs)
    if func._schema.name in GROUPED:
        return _grouped(func, args, kwargs)
    count: Any = flop_registry.get(func.overloadpacket)
    if count is None:
        return 0.0
    try:
        return float(count(*args, **kwargs, out_val=out))
    except (TypeError, ValueError, AssertionError, RuntimeError):  # a formula that does not support this call
        return 0.0


def _named(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {a.name: value for a, value in zip(func._schema.arguments, args)} | dict(kwargs)


GROUPED: Mapping[str, tuple[str, tuple[str, ...], int]] = {
    "dtensor::experts": ("index", ("up", "down"), 1),
    "dtensor::experts_backward": ("index", ("up", "down"), 2),
    "dtensor::rows_by_group": ("x", ("w",), 1),
    "dtensor::rows_within_groups": ("x", ("y",), 1),
    "transformers::grouped_mm_fallback": ("input", ("weight",), 1),
    "transformers::grouped_mm_fallback_backward": ("input", ("weight",), 2),
}
"""Operators that multiply rows by the matrices of their groups -> the operand whose elements or rows are counted, the
matrices, and how many products there are with each."""


def _grouped(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> float:
    """Operations of products of rows with one matrix each. A rank with some of the groups has that part of the rows."""
    named = _named(func, args, kwargs)
    counted, matrices, times = GROUPED[func._schema.name]
    rows = prod(named[counted]) if counted == "index" else named[counted][0]
    if counted == "x":
        groups = named["ends"][0]
        inner = named["x"][1] * named[matrices[0]][-1]
        return 2.0 * rows * inner * groups / max(named["of"], 1)
    return 2.0 * times * rows * sum(prod(named[m][1:]) for m in matrices)


def _attention(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> float:
    """Operations of the products of queries by keys and of what results by values, in the backward of the first again,
    and of two more for each. If it is causal, half of each is skipped (Dao, "FlashAttention-2", 2023)."""
    named = _named(func, args, kwargs)
    query, key, value = (named[name] for name in ("query", "key", "value"))
    sent, read = query[-2], key[-2]
    backward = "_backward" in func._schema.name
    width = 3 * query[-1] + 2 * value[-1] if backward else query[-1] + value[-1]
    causal = named.get("is_causal") is True and sent > 1
    return 2.0 * prod(query[:-2]) * sent * read * width * (0.5 if causal else 1.0)


__all__ = ["CASTS", "FUSED", "PICKING", "flops", "is_elementwise", "is_fused", "is_picking", "is_pointwise"]
