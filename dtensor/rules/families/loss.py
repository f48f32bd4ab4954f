"""Losses that are a sum or mean over elements, which may be sharded; a mean divides by the global count."""

from math import prod
from typing import Any

from ..bind import rule_for
from ..call import Call, LocalCall
from ..local_calls import guarded, is_sharded
from ..notation import Rule, library_rule
from .pointwise import broadcast_shape, elementwise

MEAN, SUM = 1, 2

ELEMENTWISE = (
    "mse_loss",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "soft_margin_loss",
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
)
"""Losses that are a sum or mean over all elements."""


@rule_for(*ELEMENTWISE)
def elementwise_loss(call: Call) -> Rule | str:
    """All dims may be sharded; a sum over elements is partial, and so is a mean, of which each rank has a share."""
    if call["reduction"] not in (MEAN, SUM):
        return elementwise(call)
    return library_rule(elementwise(call, ""), reduce="...", local=_local_elementwise, across=_across_mean(call))


def _across_mean(call: Call) -> str:
    """The factors that a mean is taken over; none for other reductions."""
    return "..." if call["reduction"] == MEAN else ""


def _local_elementwise(call: LocalCall) -> Any:
    return _mean_by(call, prod(broadcast_shape([o.shape for o in call.call.operands])))


def _mean_by(call: LocalCall, count: Any) -> Any:
    """Run the operator; for a mean over a sharded factor, divide the local sum by the global count."""
    if call["reduction"] != MEAN or not is_sharded(call):
        return call.run()
    made = call.run(reduction=SUM)
    return (made[0] / count, *made[1:]) if isinstance(made, tuple) else made / count


@rule_for(*(f"{name}_backward" for name in ELEMENTWISE))
def elementwise_loss_backward(call: Call) -> Rule:
    """The gradient of a mean: the kernel would divide by the local count, so a shard uses the global one."""
    # A mean or sum gets one number as its gradient, but one per element where this is differentiated again.
    linear = (0, (1, 2)) if call.name == "mse_loss_backward" else 0
    text, across = elementwise(call), _across_mean(call)
    return library_rule(text, linear=linear, local=_local_elementwise_backward, across=across)


def _local_elementwise_backward(call: LocalCall) -> Any:
    return _mean_by(call, prod(call.call["self"].shape))


MARGIN = {
    "multi_margin_loss": ("n1,n,1->n", "n1,n,1->"),
    "multi_margin_loss_backward": ("n,n1,n,1->n1", "*,n1,n,1->n1"),
    "multilabel_margin_loss_forward": ("n1,n1->n,n1", "n1,n1->,n1"),
    "multilabel_margin_loss_backward": ("n,n1,n1,n1->n1", "*,n1,n1,n1->n1"),
}
"""Loss over the classes of each sample -> its texts without and with a reduction."""


@rule_for(*MARGIN)
def margin_loss(call: Call) -> Rule | str:
    """Samples may be sharded, their classes not; a sum or mean over samples is partial."""
    reduced, backward = call["reduction"] in (MEAN, SUM), call.has("grad_output")
    text, reduce = MARGIN[call.name][reduced], "n" if reduced and not backward else ""
    if call["self"].ndim < 2:  # a single sample
        return text.replace("n1", "*").replace("n", "*")
    return library_rule(text, linear=0 if backward else (), reduce=reduce, local=_local_margin)


@guarded
def _local_margin(call: LocalCall) -> Any:
    return _mean_by(call, call.call["self"].shape[0])


__all__ = ["ELEMENTWISE", "MARGIN"]
