"""Log softmax: any dim may be sharded, including the one it runs along.

If that dim is sharded, the maximum and the sum of exponentials of each row are all-reduced, which is little compared to
the rows; logits whose classes are sharded are not gathered. Half precision is widened in between, as torch does.
"""

from typing import Any

import torch

from ..bind import rule_for
from ..call import Call, LocalCall
from ..local_calls import all_reduce, wide
from ..notation import LETTERS, Rule, library_rule


def _rule(call: Call, local: Any, all_reduces: int, linear: Any = (), refuses: bool = False) -> Rule:
    ndim = call.operands[0].ndim
    full = LETTERS[:ndim]
    along = full[call["dim"]] if ndim else ""
    return library_rule(
        f"{','.join([full] * len(call.operands))}->{full}",
        linear=linear,
        last=along,
        local=local,
        across=along,
        all_reduces=(along, all_reduces),
        refuses_empty=along if refuses else "",
    )


@rule_for("_log_softmax")
def log_softmax(call: Call) -> Rule:
    """The dim that is normalised may be sharded, for two all-reduces of maxima and sums."""
    return _rule(call, _local_log_softmax, 2, refuses=True)


def _along(call: LocalCall) -> tuple[int, str]:
    """The dim that the operator runs along, and its factor."""
    (out,) = call.call.outputs
    assert out is not None
    dim = call["dim"] % max(out.ndim, 1)
    return dim, LETTERS[dim]


def _local_log_softmax(call: LocalCall) -> Any:
    dim, factor = _along(call)
    x = wide(call["self"])
    lowest = x.new_full([1 if i == dim else n for i, n in enumerate(x.shape)], -torch.inf)
    largest = all_reduce(x.amax(dim, keepdim=True) if x.shape[dim] else lowest, "max", call, {factor})
    shifted = x - largest
    total = all_reduce(shifted.exp().sum(dim, keepdim=True), "sum", call, {factor})
    out = shifted - total.log()
    return out if call["half_to_float"] else out.to(call["self"].dtype)


@rule_for("_log_softmax_backward_data")
def log_softmax_backward(call: Call) -> Rule:
    """The dim that was normalised may be sharded, for an all-reduce of sums."""
    return _rule(call, _local_backward, 1, linear=0)


def _local_backward(call: LocalCall) -> Any:
    dim, factor = _along(call)
    grad, output = wide(call["grad_output"]), wide(call["output"])
    total = all_reduce(grad.sum(dim, keepdim=True), "sum", call, {factor})
    return (grad - output.exp() * total).to(call["input_dtype"])


__all__ = ["log_softmax", "log_softmax_backward"]
