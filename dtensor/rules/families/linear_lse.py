"""The logsumexp of linear logits, without materializing the full logits: samples and classes may be sharded.

If classes are sharded, each rank sums over its own. Two all-reduces, of one and of two numbers per sample, combine the
sums. The backward itself does not communicate.
"""

from typing import Any

import torch

from ..call import RULES, Call, LocalCall
from ..local_calls import all_reduce, axes_of
from ..rule import Dims, Rule
from .row_lookup import bounds, own_rows


def _factors(call: Call) -> tuple[Dims, Dims, Dims, list[Dims], dict[str, Any]]:
    """Factors of the samples, of x, weight and bias (a list of none or one); sizes."""
    x, weight, row = call["x"], call["weight"], call["row"]
    samples: Dims = tuple((f"n{i}",) for i in range(row.ndim))
    sizes = {**{f"n{i}": n for i, n in enumerate(row.shape)}, "v": weight.shape[0], "d": x.shape[-1]}
    bias: list[Dims] = [] if call["bias"] is None else [(("v",),)]
    return samples, (*samples, ("d",)), (("v",), ("d",)), bias, sizes


def linear_lse(call: Call) -> Rule:
    samples, x, weight, bias, sizes = _factors(call)
    return Rule(
        (x, weight, *bias, samples),
        (samples, samples),
        sizes,
        reduce={"v": "sum"},
        blocked=frozenset({"d"}),
        whole=frozenset({(0, "v"), (1, "v")}),
        local=_local,
        all_reduces={"v": 2},
    )


NONE = -1
"""The index of no class, among indices relative to a rank's first class."""


def _run(call: LocalCall) -> Any:
    """Run the operator with the picked classes as indices into this rank's classes, and `NONE` for other ranks'."""
    row, none, axes = call["row"], call["none"], call.axes.get("v", ())
    size, changed = call.call["weight"].shape[0], {}
    if axes:
        counts, own = row != none, max(call["weight"].shape[0], 1)
        near, mine = own_rows(row * counts, size, own, axes, call.mesh)
        changed = {"row": torch.where(counts & (mine | (near >= own)), near, NONE), "none": NONE}
    with bounds(row, size, 0, error=RuntimeError, what="Target", ignored=none):
        return call.run(**changed)


def _local(call: LocalCall) -> Any:
    lse, picked = _run(call)
    if not axes_of(call, {"v"}):
        return lse, picked
    largest = all_reduce(lse, "max", call, {"v"})
    both = all_reduce(torch.cat([(lse - largest).exp().unsqueeze(0), picked.unsqueeze(0)]), "sum", call, {"v"})
    total, picked = both.unbind(0)
    return largest + total.log(), picked


def linear_lse_backward(call: Call) -> Rule:
    samples, x, weight, bias, sizes = _factors(call)
    return Rule(
        (samples, samples, x, weight, *bias, samples, samples),
        (x, weight, (("v",),) if bias else ((),)),
        sizes,
        reduce=dict.fromkeys(sizes, "sum"),
        linear=(frozenset({0, 1}),),
        blocked=frozenset({"d"}),
        local=_run,
    )


RULES["dtensor::linear_lse"] = linear_lse
RULES["dtensor::linear_lse_backward"] = linear_lse_backward

__all__ = ["linear_lse", "linear_lse_backward"]
