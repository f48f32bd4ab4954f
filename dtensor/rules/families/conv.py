"""Convolution: batch and channels may be sharded; space may not, as a kernel reaches into neighbouring shards.

Input channels are contracted, so where they are sharded the result is Partial(sum), and so is the bias. With groups,
the channels are a (group, channel) pair of factors, of which only the group can be sharded.
"""

from typing import Any

from ..bind import rule_for
from ..call import Call, LocalCall
from ..local_calls import empty_outputs, has_empty_shard, is_sharded, parts
from ..notation import LibraryRule, Rule

WEIGHT = {False: "(go)i*", True: "(gi)o*"}
"""Whether a convolution is transposed -> the term of its weight."""


def _local_convolution(call: LocalCall) -> Any:
    if not is_sharded(call):
        return call.run()
    x, weight, bias = call["input"], call["weight"], call["bias"]
    if x.numel() and weight.numel():
        return call.run(groups=_groups(call))
    # A rank without input channels still adds its part of the bias.
    made = empty_outputs(call)
    return made if bias is None else made + bias.reshape(-1, *[1] * (weight.dim() - 2))


def _groups(call: LocalCall) -> Any:
    return call.call["groups"] // parts(call, "g")


def _local_backward(call: LocalCall) -> Any:
    if not is_sharded(call):
        return call.run()
    grad = call["grad_output"]
    if has_empty_shard(call):
        made = list(empty_outputs(call))
        made[2] = None if made[2] is None else grad.sum([d for d in range(grad.dim()) if d != 1])
        return tuple(made)
    return call.run(groups=_groups(call), bias_sizes=None if call["bias_sizes"] is None else [grad.shape[1]])


FORWARD = {
    transposed: LibraryRule(
        f"n(gi)*,{weight},(go)->n(go)*",
        linear=((0, 2), (1, 2)),
        reduce="i",
        sizes={"g": "groups"},
        added=2,
        local=_local_convolution,
    )
    for transposed, weight in WEIGHT.items()
}

BACKWARD = {
    transposed: LibraryRule(
        f"n(go)*,n(gi)*,{weight}->n(gi)*,{weight},(go)",
        linear=0,
        reduce="on",
        sizes={"g": "groups"},
        whole=((2, "i"),),
        local=_local_backward,
    )
    for transposed, weight in WEIGHT.items()
}
"""The bias gradient does not depend on the input channels, so every rank computes it where these are sharded."""


@rule_for("convolution", "_convolution", "convolution_overrideable")
def convolution(call: Call) -> Rule:
    """Samples and output channels may be sharded; over input channels results are partial sums."""
    return FORWARD[call["transposed"]]


@rule_for("convolution_backward", "convolution_backward_overrideable")
def convolution_backward(call: Call) -> Rule:
    """Over samples the gradients of weight and bias are partial sums, over output channels that of the input."""
    return BACKWARD[call["transposed"]]


__all__ = ["BACKWARD", "FORWARD", "WEIGHT"]
