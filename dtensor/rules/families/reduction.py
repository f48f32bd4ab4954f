"""Reductions over dims.

A reduced factor may be sharded if a collective can combine the ranks' results; the output is then Partial. Where it
cannot (variance, logsumexp), or where no collective has the reduction (any, all), the operator itself all-reduces small
intermediate values, and its result is replicated.
"""

from collections.abc import Callable
from functools import cache
from math import inf, prod
from typing import Any

import torch

from ..bind import rule_for
from ..call import Call, LocalCall
from ..local_calls import WIDE, all_reduce, has_empty_shard, wide
from ..notation import LETTERS, LibraryRule, Rule, library_rule
from .pointwise import elementwise

REDUCTIONS: dict[str, str | None] = {
    "sum": "sum",
    "nansum": "sum",
    "mean": "sum",
    "amax": "max",
    "amin": "min",
    "max": "max",
    "min": "min",
    "prod": "product",
    "all": None,
    "any": None,
    "argmax": None,
    "argmin": None,
    "logsumexp": None,
    "var": None,
    "std": None,
    "var_mean": None,
    "std_mean": None,
    "linalg_vector_norm": None,
    "median": None,
    "nanmedian": None,
    "mode": None,
    "kthvalue": None,
    "count_nonzero": "sum",
}
"""Operator -> the reduce op that combines the ranks' results; None if no collective can (but see `WITHIN`)."""

LINEAR_REDUCTIONS = ("sum", "mean")


def reduced_dims(call: Call) -> tuple[list[int], bool]:
    """The reduced dims, counted from the front, and whether they are kept with length 1."""
    (x,) = call.operands
    ndim = x.ndim
    given = call["dim"] if call.has("dim") else None
    keep = bool(call["keepdim"]) if call.has("keepdim") else False
    if given is None or (isinstance(given, (list, tuple)) and not given):
        return list(range(ndim)), keep
    given = given if isinstance(given, (list, tuple)) else [given]
    return [d % ndim for d in given] if ndim else [], keep


@rule_for(*REDUCTIONS)
def reduction(call: Call) -> Rule | str:
    """Over sharded dims that are reduced the result is partial, where such partial results can be combined."""
    if len(call.operands) == 2:  # `max(a, b)` and `min(a, b)`
        return elementwise(call)
    (x,), name = call.operands, call.name
    over, keep = reduced_dims(call)
    op, count = REDUCTIONS[name], len(call.outputs)
    within = name in WITHIN and not x.dtype.is_complex
    never = not within and (op is None or count == 2 or (op != "sum" and x.dtype == torch.bool))
    full = "".join(["1" if never and i in over else LETTERS[i] for i in range(x.ndim)])
    out = "".join(["1" if i in over else full[i] for i in range(x.ndim) if keep or i not in over])
    text, reduced = f"{full}->{','.join([out] * count)}", "" if never else "".join([LETTERS[i] for i in over])
    if within:
        local = WITHIN[name]
        return library_rule(
            text,
            whole=range(count),
            local=local,
            across=reduced,
            all_reduces=(reduced, 1 if local is _truth else 2),
            refuses_empty=reduced if local is _logsumexp else "",
        )
    if op is None or never:
        return text
    return _reducing(text, reduced, op, name)


@cache
def _reducing(text: str, reduced: str, op: str, name: str) -> Rule:
    local = _mean if name == "mean" else _extremum if op in ("max", "min") else None
    linear = 0 if name in LINEAR_REDUCTIONS else ()
    return LibraryRule(text, reduce=dict.fromkeys(reduced, op), linear=linear, local=local, across=reduced)


def _mean(call: LocalCall) -> Any:
    """The local sum divided by the global count, so that uneven shards are weighted correctly."""
    over, keep = reduced_dims(call.call)
    (x,) = call.call.operands
    dtype = call["dtype"] or x.dtype
    total = torch.ops.aten.sum.dim_IntList(call.args[0], over, keep, dtype=WIDE.get(dtype, call["dtype"]))
    return (total / prod(x.shape[i] for i in over)).to(dtype)


def _extremum(call: LocalCall) -> Any:
    """The extremum of the shard; for an empty shard, the value that never wins against another."""
    if not has_empty_shard(call):
        return call.run()
    (x,) = call["self"] if call.call.many else [call["self"]]
    over, keep = reduced_dims(call.call)
    wants_max = REDUCTIONS[call.call.name] == "max"
    if x.dtype.is_floating_point:
        worst = -inf if wants_max else inf
    else:
        worst = torch.iinfo(x.dtype).min if wants_max else torch.iinfo(x.dtype).max
    shape = [1 if i in over else s for i, s in enumerate(x.shape) if keep or i not in over]
    made = x.new_full(shape, worst)
    return [made] if call.call.many else made


def _truth(call: LocalCall) -> Any:
    """`any` is the maximum of all ranks' truth values, `all` the minimum."""
    made = call.run()
    op = "max" if call.call.name == "any" else "min"
    return all_reduce(made.to(torch.uint8), op, call, _reduced_factors(call)).to(made.dtype)


def _reduced_factors(call: LocalCall) -> set[str]:
    return {LETTERS[i] for i in reduced_dims(call.call)[0]}


def _logsumexp(call: LocalCall) -> Any:
    """The maximum over all ranks is subtracted first, so that no exponential overflows."""
    (o,) = call.call.outputs
    assert o is not None
    over, keep = reduced_dims(call.call)
    factors = _reduced_factors(call)
    x = wide(call["self"].to(o.dtype))
    shape = [1 if i in over else s for i, s in enumerate(x.shape)]
    top = x.amax(over, keepdim=True) if x.numel() else x.new_full(shape, -inf)
    top = all_reduce(top, "max", call, factors)
    top = torch.where(top.abs() == inf, torch.zeros_like(top), top)
    total = all_reduce((x - top).exp().sum(over, keepdim=True), "sum", call, factors)
    made = (total.log() + top).to(o.dtype)
    return made if keep else made.reshape([s for i, s in enumerate(made.shape) if i not in over])


def _variance(call: LocalCall) -> Any:
    """Compute the variance in two passes: first the mean, then the squared deviations from it."""
    name, x = call.call.name, wide(call["self"])
    over, keep = reduced_dims(call.call)
    factors = _reduced_factors(call)
    count = prod(call.call["self"].shape[i] for i in over)
    mean = all_reduce(x.sum(over, keepdim=True), "sum", call, factors) / count
    centred = x - mean
    squares = all_reduce((centred * centred).sum(over, keepdim=True), "sum", call, factors)
    made = squares / max(count - _correction(call), 0)
    made = made.sqrt() if name.startswith("std") else made
    if not keep:
        kept = [s for i, s in enumerate(made.shape) if i not in over]
        made, mean = made.reshape(kept), mean.reshape(kept)
    made, mean = (t.to(call["self"].dtype) for t in (made, mean))
    return (made, mean) if name.endswith("_mean") else made


def _correction(call: LocalCall) -> Any:
    if call.call.has("unbiased"):
        return int(call["unbiased"])
    return 1 if call["correction"] is None else call["correction"]


WITHIN: dict[str, Callable[[LocalCall], Any]] = {
    "any": _truth,
    "all": _truth,
    "logsumexp": _logsumexp,
    "var": _variance,
    "std": _variance,
    "var_mean": _variance,
    "std_mean": _variance,
}
"""Operator whose results no collective can combine -> its `local` function, which does. Results are Replicate."""


@rule_for("histc", by_value=True)
def histogram(call: Call) -> Rule | str:
    """Counts add up over the ranks, provided that the range is given and does not have to be found first."""
    return "*->1" if call["min"] == call["max"] else Rule("...->1", reduce="...")


__all__ = ["REDUCTIONS", "WITHIN"]
