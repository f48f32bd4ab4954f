"""Layer, RMS and group normalisation: the leading dims may be sharded, the normalised ones may not.

In the backward the parameters' gradients are sums over the leading dims, and so Partial where those are sharded. They
have only one number per feature, and if they stayed Partial they would be reduced whenever an optimizer reads them. So
they are redistributed to the layout of their parameter at once.
"""

from typing import Any

from ..call import Call, LocalCall, rule_for
from ..local_calls import guarded, parts
from ..pattern import Pattern, pattern_rules
from ..rule import Dims, Rule


def _factors(call: Call, shape: Any) -> tuple[Dims, Dims, Dims, dict[str, Any], frozenset[str]]:
    """Factors of the input, of the parameters and of the statistics; sizes; the normalised factors."""
    inner = len(call["normalized_shape"])
    names = [f"d{i}" for i in range(len(shape))]
    outer, last = names[: len(names) - inner], names[len(names) - inner :]
    full = tuple((f,) for f in names)
    statistics = tuple((f,) for f in outer) + ((),) * inner
    return full, tuple((f,) for f in last), statistics, dict(zip(names, shape)), frozenset(last)


@rule_for("native_layer_norm", "_fused_rms_norm")
def norm(call: Call) -> Rule:
    full, parameter, statistics, sizes, blocked = _factors(call, call["input"].shape)
    ins = (full, *([parameter] * (len(call.operands) - 1)))
    return Rule(ins, (full, *([statistics] * (len(call.outputs) - 1))), sizes, blocked=blocked)


@rule_for("native_layer_norm_backward", "_fused_rms_norm_backward")
def norm_backward(call: Call) -> Rule:
    full, parameter, statistics, sizes, blocked = _factors(call, call["input"].shape)
    ndim = len(full)
    names = ("grad_out", "input", "mean", "rstd", "weight", "bias")
    kinds = {"mean": statistics, "rstd": statistics, "weight": parameter, "bias": parameter}
    present = [n for n in names if call.has(n) and call[n] is not None]
    ins = tuple(kinds.get(n, full) for n in present)
    outs = tuple(None if o is None else parameter if i else full for i, o in enumerate(call.outputs))
    reduce = {f"d{i}": "sum" for i in range(ndim) if f"d{i}" not in blocked}
    unread = frozenset(i for i, n in enumerate(present) if n == "bias")
    parameters = {1: "weight", 2: "bias"}
    home = {i: present.index(n) for i, n in parameters.items() if n in present and outs[i : i + 1] != (None,)}
    linear = (frozenset({0}),)
    return Rule(ins, outs, sizes, reduce=reduce, linear=linear, blocked=blocked, unread=unread, home=home)


_GROUPS: dict[str, Any] = {"sizes": {"g": "group"}, "blocked": "k"}


def _local_groups(call: LocalCall) -> Any:
    """Run the operator with the sizes of the shard, which it takes as arguments."""
    x = call["input"]
    return call.run(N=x.shape[0], C=x.shape[1], group=call.call["group"] // parts(call, "g"))


GROUP_NORM = {
    "native_group_norm": Pattern("n(gk)~, (gk), (gk) -> n(gk)~, ng, ng", local=guarded(_local_groups), **_GROUPS),
    "native_group_norm_backward": Pattern(
        "n(gk)~, n(gk)~, ng, ng, (gk) -> n(gk)~, (gk), (gk)",
        linear=({0},),
        reduce={"n": "sum"},
        local=guarded(_local_groups),
        **_GROUPS,
    ),
}
"""Channels are a (group, channel) pair of factors, of which only the group can be sharded."""

pattern_rules(GROUP_NORM)

__all__ = ["GROUP_NORM"]
