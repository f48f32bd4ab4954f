"""The logsumexp of linear logits, without materializing the full logits: samples and classes may be sharded.

If classes are sharded, each rank sums over its own. Two all-reduces, of one and of two numbers per sample, combine the
sums. The backward itself does not communicate.
"""

from typing import Any

import torch

from ..bind import rule_for, rule_table
from ..call import Call, LocalCall
from ..local_calls import all_reduce, axes_of
from ..notation import LibraryRule, Rule, library_rule
from .row_lookup import bounds, own_rows

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


FORWARD = LibraryRule(
    "...1,v1,v,...->...,...", reduce="v", whole=((0, "v"), (1, "v")), local=_local, all_reduces=("v", 2)
)

rule_table(__name__, {"dtensor::linear_lse": FORWARD})


@rule_for("dtensor::linear_lse_backward")
def linear_lse_backward(call: Call) -> Rule:
    """Gradients of a log-sum-exp of a linear layer: partial sums over classes and rows."""
    bias = "1" if call["bias"] is None else "v"
    text = f"...,...,...1,v1,v,...,...->...1,v1,{bias}"
    return library_rule(text, reduce="...v", linear=((0, 1),), local=_run)


__all__ = ["FORWARD", "linear_lse_backward"]
