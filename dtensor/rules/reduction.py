"""Reductions.

A reduced factor may be sharded where the reduction is associative over ranks; what the operator returns is then
Partial.
"""

from math import inf, prod

import torch

from .call import Call, LocalCall, rule_for
from .pointwise import broadcast
from .rule import Dims, Rule

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
"""Operator -> the reduce op of its parts; None where parts cannot be put together by a collective."""

LINEAR_REDUCTIONS = ("sum", "mean")


def reduced_dims(call: Call) -> tuple[list[int], bool]:
    """The reduced dimensions, counted from the front, and whether they are kept with length 1."""
    ndim = call.operands[0].ndim
    given = call["dim"] if call.has("dim") else None
    keep = bool(call["keepdim"]) if call.has("keepdim") else False
    if given is None or (isinstance(given, (list, tuple)) and not given):
        return list(range(ndim)), keep
    given = given if isinstance(given, (list, tuple)) else [given]
    return [d % ndim if ndim else 0 for d in given], keep


@rule_for(*REDUCTIONS)
def reduction(call: Call) -> Rule:
    name = call.name
    shape = call.operands[0].shape
    if len(call.operands) == 2:
        return elementwise_extremum(call)
    (ins,), sizes = broadcast([shape], shape)
    over, keep = reduced_dims(call)
    op = REDUCTIONS[name]
    factors = [f"d{i}" for i in over] if shape else []
    indices = name in ("max", "min") and len(call.outputs) == 2
    out: Dims = tuple(() if i in over else (f"d{i}",) for i in range(len(shape)) if keep or i not in over)
    if op is None or indices or (op != "sum" and call.operands[0].dtype == torch.bool):
        return Rule((ins,), (out,) * len(call.outputs), sizes, blocked=frozenset(factors))
    linear = (frozenset({0}),) if name in LINEAR_REDUCTIONS else ()
    reduce = dict.fromkeys(factors, op)
    local = _mean if name == "mean" else _extremum if op in ("max", "min") else None
    return Rule((ins,), (out,), sizes, reduce=reduce, linear=linear, local=local)


def elementwise_extremum(call: Call) -> Rule:
    """`max(a, b)` and `min(a, b)`: pointwise in two operands."""
    (out,) = call.outputs
    assert out is not None
    ins, sizes = broadcast([o.shape for o in call.operands], out.shape)
    return Rule(ins, (tuple((f,) for f in sizes),), sizes)


def _mean(call: LocalCall):
    """Where a reduced dimension is sharded: the local sum over the global count, so that uneven parts weigh right."""
    over, keep = reduced_dims(call.call)
    if not any(call.axes.get(f"d{i}") for i in over):
        return call.run()
    shape = call.call.operands[0].shape
    dtype = call.call["dtype"]
    total = torch.ops.aten.sum.dim_IntList(call.args[0], over, keep, dtype=dtype)
    return total / prod(shape[i] for i in over)


def _extremum(call: LocalCall):
    """An empty shard gives the value that loses against every other."""
    x = call.args[0]
    if x.numel() or not any(call.axes.values()):
        return call.run()
    over, keep = reduced_dims(call.call)
    wants_max = REDUCTIONS[call.call.name] == "max"
    if x.dtype.is_floating_point:
        worst = -inf if wants_max else inf
    else:
        worst = torch.iinfo(x.dtype).min if wants_max else torch.iinfo(x.dtype).max
    shape = [1 if i in over else s for i, s in enumerate(x.shape) if keep or i not in over]
    return x.new_full(shape, worst)


__all__ = ["REDUCTIONS"]
