"""Losses that are a sum or mean over elements, which may be sharded; a mean divides by the global count."""

from math import prod
from typing import Any

from ..call import Call, LocalCall, rule_for
from ..local_calls import guarded, is_sharded
from ..pattern import Pattern, bind
from ..rule import Rule
from .pointwise import broadcast, broadcast_shape

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
def elementwise_loss(call: Call) -> Rule:
    shapes = [o.shape for o in call.operands]
    ins, sizes = broadcast(shapes, broadcast_shape(shapes))
    full = tuple((f,) for f in sizes)
    if call["reduction"] not in (MEAN, SUM):
        return Rule(ins, (full,), sizes)
    reduce = dict.fromkeys(sizes, "sum")
    return Rule(ins, ((),), sizes, reduce=reduce, local=_local_elementwise, across=_across_mean(call, sizes))


def _across_mean(call: Call, sizes: dict[str, Any]) -> frozenset[str]:
    """The factors that a mean is taken over; none for other reductions."""
    return frozenset(sizes if call["reduction"] == MEAN else ())


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
    (grad, full, *rest), sizes = broadcast([o.shape for o in call.operands], call["self"].shape)
    linear = (frozenset({0}), frozenset({1, 2})) if call.name == "mse_loss_backward" else (frozenset({0}),)
    across = _across_mean(call, sizes)
    return Rule((grad, full, *rest), (full,), sizes, linear=linear, local=_local_elementwise_backward, across=across)


def _local_elementwise_backward(call: LocalCall) -> Any:
    return _mean_by(call, prod(call.call["self"].shape))


MARGIN = {
    "multi_margin_loss": ("n_, n, _ -> n", "n_, n, _ ->"),
    "multi_margin_loss_backward": ("n, n_, n, _ -> n_", "~, n_, n, _ -> n_"),
    "multilabel_margin_loss_forward": ("n_, n_ -> n, n_", "n_, n_ -> , n_"),
    "multilabel_margin_loss_backward": ("n, n_, n_, n_ -> n_", "~, n_, n_, n_ -> n_"),
}
"""Loss over the classes of each sample -> its patterns without and with a reduction."""


@rule_for(*MARGIN)
def margin_loss(call: Call) -> Rule:
    reduced = call["reduction"] in (MEAN, SUM)
    linear = ({0},) if call.has("grad_output") else ()
    reduce = {"n": "sum"} if reduced and not linear else {}
    return bind(Pattern(MARGIN[call.name][reduced], linear=linear, reduce=reduce, local=_local_margin), call)


@guarded
def _local_margin(call: LocalCall) -> Any:
    return _mean_by(call, call.call["self"].shape[0])


__all__ = ["ELEMENTWISE", "MARGIN"]
