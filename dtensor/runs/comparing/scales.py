"""Scales: how large the result of an operator would be if its terms did not cancel.

Rounding is relative to the terms, not to their sum: the difference of two nearly equal tensors has few correct digits,
and the differences of its inputs weigh the more. The scale of a result is at least its norm; for the operators below it
is estimated from the norms of the inputs, as for tensors of random elements.
"""

import math
from collections.abc import Callable, Sequence

from .values import RecordedValue

Norms = Sequence[float]

ATTENTION = tuple(
    [
        f"_scaled_dot_product_{kind}"
        for kind in ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
    ]
)


def scale(result: RecordedValue, inputs: Sequence[RecordedValue]) -> float:
    """The scale of a result, a Frobenius norm."""
    estimate = FAMILIES.get(result.op)
    norms = [x.norm for x in inputs]
    found = estimate(result, inputs, norms) if estimate is not None and inputs else 0.0
    return max(result.norm, found)


def count(x: RecordedValue) -> int:
    """The number of its elements on one rank; at least 1."""
    return max(math.prod(x.first["g"]), 1)


def _sum(result: RecordedValue, inputs: Sequence[RecordedValue], norms: Norms) -> float:
    return sum(norms)


def _product(result: RecordedValue, inputs: Sequence[RecordedValue], norms: Norms) -> float:
    """Products of elements that have nothing to do with each other."""
    if len(norms) < 2:
        return 0.0
    rms = [n / math.sqrt(count(x)) for n, x in zip(norms, inputs)]
    return math.prod(sorted(rms)[-2:]) * math.sqrt(count(result))


def _contraction(result: RecordedValue, inputs: Sequence[RecordedValue], norms: Norms) -> float:
    """Sums of products over the inner dim, of sqrt(inner) times the size of a product."""
    if len(norms) < 2:
        return 0.0
    *rest, a, b = inputs if len(inputs) > 2 else (inputs[0], inputs[1])
    inner = math.sqrt(max(count(a) * count(b) / count(result), 1.0))  # the inner dim, twice the batch left out
    found = a.norm * b.norm / math.sqrt(max(inner, 1.0))
    return found + sum([x.norm for x in rest])


def _reduction(result: RecordedValue, inputs: Sequence[RecordedValue], norms: Norms) -> float:
    return max(norms)


def _mean(result: RecordedValue, inputs: Sequence[RecordedValue], norms: Norms) -> float:
    return max(norms) * count(result) / max(map(count, inputs))


def _statistic(result: RecordedValue, inputs: Sequence[RecordedValue], norms: Norms) -> float:
    """A mean of elements that nearly cancel, which norms return beside their result."""
    if result.first["n"] != 1:
        return 0.0
    return max([n / math.sqrt(count(x)) for n, x in zip(norms, inputs)]) * math.sqrt(count(result))


def _of_weight(result: RecordedValue, inputs: Sequence[RecordedValue], norms: Norms) -> float:
    """The gradients of the weight and the bias of a norm, which are sums over all that it normalised. What they add up
    has the size of the incoming gradient."""
    if result.first["n"] == 0:
        return 0.0
    return max([n for n, x in zip(norms, inputs) if x.phase == result.phase], default=0.0)


def roundings(result: RecordedValue, inputs: Sequence[RecordedValue]) -> float:
    """How often the rounding of a result counts: more than once if its terms are added up one by one in its dtype.

    Each addition rounds a sum that grows as the square root of the number of terms, so that their errors together grow,
    relative to the result, as that root. On CPUs they are 0.28 `eps` times the root, measured for bfloat16.
    """
    if result.op not in ADDED_IN_DTYPE or result.first["n"] == 0 or not inputs:
        return 1.0
    return max(math.sqrt(max(map(count, inputs)) / count(result)) / 4.0, 1.0)


def _through_softmax(result: RecordedValue, inputs: Sequence[RecordedValue], norms: Norms) -> float:
    """In the gradient of a softmax most of what is added cancels; how much, the operator does not show."""
    return 4.0 * result.norm


Family = Callable[[RecordedValue, Sequence[RecordedValue], Norms], float]
FAMILIES: dict[str, Family] = {
    **dict.fromkeys(["add", "sub", "rsub", "cat", "stack", "lerp", "addcmul", "addcdiv", "index_add"], _sum),
    **dict.fromkeys(
        ["mul", "native_dropout_backward", "gelu_backward", "silu_backward", "threshold_backward"], _product
    ),
    **dict.fromkeys(["_softmax_backward_data", "sigmoid_backward", "tanh_backward"], _product),
    **dict.fromkeys(["mm", "bmm", "addmm", "baddbmm", "convolution", "dot", "mv"], _contraction),
    **dict.fromkeys(["sum", "embedding_dense_backward", "scatter_add", "index_put", "cumsum", "norm"], _reduction),
    **dict.fromkeys(["mean"], _mean),
    **dict.fromkeys([f"native_{norm}_norm_backward" for norm in ("layer", "group", "batch")], _of_weight),
    **dict.fromkeys(["_fused_rms_norm_backward"], _of_weight),
    **dict.fromkeys(["native_layer_norm", "native_group_norm", "native_batch_norm", "var_mean"], _statistic),
    **dict.fromkeys([f"{attention}_backward" for attention in ATTENTION], _through_softmax),
}
"""Operator -> the estimate for its results."""

EXPONENTIAL = {
    *("exp", "_softmax", "_softmax_backward_data", "_log_softmax_backward_data", "_safe_softmax", "logsumexp"),
    *(*ATTENTION, *[f"{attention}_backward" for attention in ATTENTION]),
}
"""Operators whose results are exponentials of inputs, relative to which an absolute difference counts."""

ADDED_IN_DTYPE = ("native_layer_norm_backward",)
"""Operators whose results but the first are sums that CPUs add up in the dtype of the result. Other reductions use
float32 for that."""

STEEP = {"pow": 3.0}
"""How much more than others an operator may enlarge relative differences: a power as often as its exponent says. The
record does not hold it; those of norms and their gradients are at most 3."""

__all__ = ["EXPONENTIAL", "FAMILIES", "STEEP", "count", "roundings", "scale"]
