"""Negative log likelihood: the batch may be sharded, the classes not.

The mean divides by the weight of all targets, so on a sharded batch that weight is reduced over the ranks first.
"""

from ..collectives import emit as ops
from ..mesh import group_name
from .call import Call, LocalCall, rule_for
from .rule import Dims, Rule

MEAN, SUM = 1, 2
_BATCH = ("n", "y", "x")


def _factors(call: Call, scores) -> tuple[Dims, Dims, dict]:
    """Factors of the scores and of the target; sizes."""
    if scores.ndim == 1:
        return ((),), ((),) * call["target"].ndim, {}
    batch = [("n",), *((f,) for f in _BATCH[1 : scores.ndim - 1])]
    full: Dims = (batch[0], (), *batch[1:])
    shape = (scores.shape[0], *scores.shape[2:])
    return full, tuple(batch), dict(zip(_BATCH, shape))


@rule_for("nll_loss_forward", "nll_loss2d_forward")
def nll_loss(call: Call) -> Rule:
    full, batch, sizes = _factors(call, call.operands[0])
    ins = (full, batch, *([((),)] * (len(call.operands) - 2)))
    if call["reduction"] not in (MEAN, SUM):
        out = batch if call.operands[0].ndim > 1 else ()
        return Rule(ins, (out, ()), sizes, whole=frozenset({1}))
    whole = frozenset({1}) if call["reduction"] == MEAN else frozenset()
    return Rule(ins, ((), ()), sizes, reduce=dict.fromkeys(sizes, "sum"), whole=whole, local=_local_loss)


def _local_loss(call: LocalCall):
    axes = sorted({a for f in call.axes.values() for a in f})
    if call["reduction"] != MEAN or not axes:
        return call.run()
    total, weight = call.run(reduction=SUM)
    for axis in axes:
        weight = ops.all_reduce(weight, "sum", group_name(call.mesh, axis))
    return total / weight, weight


@rule_for("nll_loss_backward", "nll_loss2d_backward")
def nll_loss_backward(call: Call) -> Rule:
    scores = call["self"]
    full, batch, sizes = _factors(call, scores)
    grad = batch if call["reduction"] not in (MEAN, SUM) and scores.ndim > 1 else ()
    weight = [((),)] if call["weight"] is not None else []
    ins = (grad, full, batch, *weight, ())
    unread = frozenset() if call["reduction"] == MEAN else frozenset({len(ins) - 1})
    return Rule(ins, (full,), sizes, linear=(frozenset({0}),), unread=unread)


@rule_for("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy_with_logits")
def elementwise_loss(call: Call) -> Rule:
    names = [f"d{i}" for i in range(call.operands[0].ndim)]
    full: Dims = tuple((f,) for f in names)
    same = all(tuple(o.shape) == tuple(call.operands[0].shape) for o in call.operands)
    sizes = dict(zip(names, call.operands[0].shape)) if same else {}
    if not same:
        nothing = tuple(((),) * o.ndim for o in call.operands)
        return Rule(nothing, tuple(((),) * o.ndim if o else None for o in call.outputs), {})
    ins = (full,) * len(call.operands)
    if call["reduction"] not in (MEAN, SUM):
        return Rule(ins, (full,), sizes)
    return Rule(ins, ((),), sizes, reduce=dict.fromkeys(names, "sum"), local=_local_elementwise)


def _local_elementwise(call: LocalCall):
    if call["reduction"] != MEAN or not any(call.axes.values()):
        return call.run()
    count = 1
    for size in call.call.operands[0].shape:
        count = count * size
    return call.run(reduction=SUM) / count


@rule_for("mse_loss_backward", "smooth_l1_loss_backward", "huber_loss_backward")
def elementwise_loss_backward(call: Call) -> Rule:
    """The gradient of a mean divides by the local count, which a shard has to correct."""
    shape = call["self"].shape
    names = [f"d{i}" for i in range(len(shape))]
    full: Dims = tuple((f,) for f in names)
    grad = full if call["reduction"] not in (MEAN, SUM) else ((),) * call.operands[0].ndim
    return Rule((grad, full, full), (full,), dict(zip(names, shape)), linear=(frozenset({0}),), local=_scaled)


def _scaled(call: LocalCall):
    if call["reduction"] != MEAN or not any(call.axes.values()):
        return call.run()
    count = 1
    for size in call.call["self"].shape:
        count = count * size
    return call.run(reduction=SUM) / count


__all__: list[str] = []
