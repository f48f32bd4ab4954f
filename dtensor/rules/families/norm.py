"""Layer, RMS and group normalisation: the leading dims may be sharded, the normalised ones may not.

In the backward the parameters' gradients are sums over the leading dims, and so Partial where those are sharded. They
have only one number per feature, and if they stayed Partial they would be reduced whenever an optimizer reads them. So
they are redistributed to the layout of their parameter at once.
"""

from functools import cache
from typing import Any

from ..bind import rule_for, rule_table
from ..call import Call, LocalCall
from ..local_calls import guarded, parts
from ..notation import LETTERS, LibraryRule, Rule

NORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "native_layer_norm": ("...N,N,N->...N,...O,...O", {}),
    "native_layer_norm_backward": (
        "...N,...N,...O,...O,N,N->...N,N,N",
        {"reduce": "...", "linear": 0, "unread": "bias", "home": {1: "weight", 2: "bias"}},
    ),
    "_fused_rms_norm": ("...N,N->...N,...O", {}),
    "_fused_rms_norm_backward": ("...N,...N,...O,N->...N,N", {"reduce": "...", "linear": 0, "home": {1: "weight"}}),
}
"""Operator -> its text, in which N stands for the normalised dims and O for dims of length 1; options of its rule."""


@rule_for(*NORMS)
def norm(call: Call) -> Rule:
    """All but the normalised dims may be sharded; gradients of weight and bias are partial sums over them."""
    return _norm(call.name, len(call["normalized_shape"]))


@cache
def _norm(name: str, dims: int) -> Rule:
    (text, options), blocked = NORMS[name], LETTERS[:dims]
    return LibraryRule(text.replace("N", blocked).replace("O", "1" * dims), blocked=blocked, **options)


def _local_groups(call: LocalCall) -> Any:
    """Run the operator with the sizes of the shard, which it takes as arguments."""
    x = call["input"]
    return call.run(N=x.shape[0], C=x.shape[1], group=call.call["group"] // parts(call, "g"))


GROUP_NORM = {
    "native_group_norm": LibraryRule(
        "n(gk)*,(gk),(gk)->n(gk)*,ng,ng", sizes={"g": "group"}, blocked="k", local=guarded(_local_groups)
    ),
    "native_group_norm_backward": LibraryRule(
        "n(gk)*,n(gk)*,ng,ng,(gk)->n(gk)*,(gk),(gk)",
        linear=0,
        reduce="n",
        sizes={"g": "group"},
        blocked="k",
        local=guarded(_local_groups),
    ),
}
"""Channels are a (group, channel) pair of factors, of which only the group can be sharded."""

rule_table(__name__, GROUP_NORM)

__all__ = ["GROUP_NORM", "NORMS"]
