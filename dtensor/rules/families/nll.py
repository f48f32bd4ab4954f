"""Negative log likelihood: samples and classes may be sharded, so that a loss on sharded logits gathers nothing.

A rank that holds some of the classes adds the contributions of the targets among these, and the loss is the sum over
the ranks. The mean divides by the weight of all targets, so that weight is all-reduced first. A target that is not a
valid class is refused as on one device.
"""

from typing import Any

import torch

from ..bind import rule_for
from ..call import Call, LocalCall
from ..local_calls import all_reduce
from ..notation import Rule, library_rule
from .row_lookup import bounds, own_rows, with_a_row

MEAN, SUM = 1, 2


def _terms(scores: Any) -> tuple[str, str]:
    """The terms of the scores and of the target."""
    full = "c" if scores.ndim == 1 else "ncyx"[: scores.ndim]
    return full, full.replace("c", "")


@rule_for("nll_loss_forward", "nll_loss2d_forward")
def nll_loss(call: Call) -> Rule:
    """Classes and samples may be sharded: each rank has the losses of the classes that it holds, as partial sums."""
    full, batch = _terms(call["self"])
    batch = batch or "1" * call["target"].ndim
    mean, each = call["reduction"] == MEAN, call["reduction"] not in (MEAN, SUM) and full != "c"
    factors = full if mean else "c"
    return library_rule(
        f"{full},{batch},c->{batch if each else ''},",
        reduce="c" if each else full,
        last="c",
        whole=(1,) if each or mean else (),
        local=_local_loss,
        across=factors,
        all_reduces=(factors if mean else "", 1),
    )


def _local_loss(call: LocalCall) -> Any:
    mean = call["reduction"] == MEAN
    if call.axes.get("c"):
        total, weight = _of_own_classes(call)
    else:
        total, weight = call.run(reduction=SUM)
    if not mean:
        return total, weight
    weight = all_reduce(weight, "sum", call)
    return total / weight, weight


def _of_own_classes(call: LocalCall) -> Any:
    """The loss of the targets among this rank's classes, summed unless the reduction is "none"; their weight."""
    scores = call["self"]
    dim = _class_dim(scores)
    row, weight = _own_targets(call)
    with _bounds(call):
        picked = with_a_row(scores, dim).gather(dim, row.unsqueeze(dim)).squeeze(dim)
    each = torch.where(weight == 0, weight, -picked * weight)
    if call["reduction"] in (MEAN, SUM) or not each.dim():
        return each.sum(), weight.sum()
    return each, scores.new_zeros(())


def _class_dim(scores: Any) -> int:
    return 0 if scores.dim() == 1 else 1


def _bounds(call: LocalCall) -> bounds:
    scores, target = call.call["self"], call["target"]
    dim = _class_dim(call["self"])
    return bounds(target, scores.shape[dim], dim, error=IndexError, what="Target", ignored=call["ignore_index"])


def _own_targets(call: LocalCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Each target's index among this rank's classes, and its weight: 0 for other ranks' classes and ignored targets."""
    scores, target, weight = call["self"], call["target"], call["weight"]
    dim = _class_dim(scores)
    own = scores.shape[dim]
    counts = target != call["ignore_index"]
    row, mine = own_rows(target * counts, call.call["self"].shape[dim], max(own, 1), call.axes["c"], call.mesh)
    mine = mine & counts
    with _bounds(call):
        each = scores.new_ones(()) if weight is None or own == 0 else weight[row]
    return row, torch.where(mine, each, torch.zeros_like(each))


@rule_for("nll_loss_backward", "nll_loss2d_backward")
def nll_loss_backward(call: Call) -> Rule:
    """Each rank has the gradients of the classes and samples that it holds."""
    full, batch = _terms(call["self"])
    mean = call["reduction"] == MEAN
    grad = "" if call["reduction"] in (MEAN, SUM) else batch
    return library_rule(
        f"{grad},{full},{batch or '1' * call['target'].ndim},c,->{full}",
        linear=0,
        last="c",
        unread="self" if mean else ("self", "total_weight"),
        local=_local_backward,
        across="c",
        refuses_empty="c",  # of no samples, too: the kernel writes to a class all the same
    )


def _local_backward(call: LocalCall) -> Any:
    scores, grad = call["self"], call["grad_output"]
    dim = _class_dim(scores)
    zeros = torch.zeros_like(scores)
    if not scores.shape[dim]:
        return zeros
    row, weight = _own_targets(call)
    scale = grad / call["total_weight"] if call["reduction"] == MEAN else grad
    each = torch.where(weight == 0, weight, -weight * scale)
    return zeros.scatter(dim, row.unsqueeze(dim), each.unsqueeze(dim))


__all__ = ["MEAN", "SUM"]
