"""Scaled dot product attention: batch, heads and, without a causal mask, the queries may be sharded; features may not.

Each query attends to all keys, so keys and values stay whole where the sequence of queries is sharded, and their
gradients are sums over its shards. A kernel that masks by position counts from its first query, and others pad their
outputs: there the sequence stays whole. Where the keys have fewer heads than the queries, the query heads are a
(key head, group) pair of factors. These rules
are for the fused operators; `dtensor.tensor.composite_operators` catches the math path before torch decomposes it.
"""

from collections.abc import Iterable
from typing import Any

from ...mesh.tensor_spec import Spec
from ...torch_private.symbolic_sizes import same_size
from ..call import Call, LocalCall, rule_for
from ..local_calls import empty_outputs, for_empty
from ..rule import Dim, Dims, Rule

FUSED: dict[str, Any] = {
    "_scaled_dot_product_flash_attention_for_cpu": "attn_mask",
    "_scaled_dot_product_flash_attention": None,
    "_scaled_dot_product_efficient_attention": "attn_bias",
    "_scaled_dot_product_cudnn_attention": "attn_bias",
}
"""Fused forward operator -> the name of its mask argument."""

FULL = frozenset({"h", "g", "s"})
"""The factors of which no shard should be empty: the kernels divide by the number of heads, and on the CPU the process
ends."""

BY_QUERY = ("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention")
"""The kernels whose outputs have one entry for each query; others pad them."""


def _heads(call: Call) -> tuple[Dims, Dims, dict[str, Any]]:
    """Factors of queries, gradients and output; factors of keys and values; sizes."""
    q, k = call["query"], call["key"]
    sizes = {"b": q.shape[0], "h": k.shape[1]}
    queries: Dim = ()
    if not call["is_causal"] and call.name.removesuffix("_backward") in BY_QUERY:
        sizes["s"] = q.shape[2]
        queries = ("s",)
    head = ("h",)
    if not same_size(q.shape[1], k.shape[1]):
        sizes["g"] = q.shape[1] // k.shape[1]
        head = ("h", "g")
    return (("b",), head, queries, ()), (("b",), ("h",), (), ()), sizes


def _mask(mask: Any, heads: Dims) -> Dims:
    """Factors of a mask that broadcasts over batch, heads and queries."""
    return tuple(() if same_size(s, 1) else d for d, s in zip(heads[4 - mask.ndim :], mask.shape))


def _like_query(o: Any, heads: Dims) -> Dims:
    """Factors of an output: (b, heads, queries, …), and none for a seed or a list of lengths."""
    return (*heads[:3], *[()] * (o.ndim - 3)) if o.ndim > 2 else ((),) * o.ndim


@rule_for(*FUSED)
def fused(call: Call) -> Rule:
    heads, keys, sizes = _heads(call)
    name = FUSED[call.name]
    mask = call[name] if name else None
    ins = [heads, keys, keys] + ([_mask(mask, heads)] if mask is not None else [])
    outs = [None if o is None else _like_query(o, heads) for o in call.outputs]
    whole = frozenset(i for i, d in enumerate(outs) if d is not None and not any(d))
    return _rule(call, ins, outs, sizes, whole=whole)


def _rule(call: Call, ins: Iterable[Dims], outs: Iterable[Dims | None], sizes: dict[str, Any], **more: Any) -> Rule:
    """With dropout no factor may be sharded, because the kernels draw by position in their inputs."""
    more["blocked"] = frozenset(sizes if call["dropout_p"] else {"g"})
    return Rule(tuple(ins), tuple(outs), sizes, local=_unless_empty, refuses_empty=FULL, **more)


@for_empty
def _unless_empty(call: LocalCall) -> Any:
    """A rank with an empty shard must not run the kernels, which divide by the number of heads. Without queries it adds
    zeros to the gradients of keys and values."""
    return call.run() if call["query"].numel() else empty_outputs(call)


@rule_for(*(f"{name}_backward" for name in FUSED))
def fused_backward(call: Call) -> Rule:
    """The gradient of a mask is a sum over what it broadcasts over."""
    heads, keys, sizes = _heads(call)
    ins: list[Dims] = []
    outs = [heads, keys, keys]
    for name in [a.name for a in call.func._schema.arguments]:
        value = call[name]
        if name in ("key", "value"):
            ins.append(keys)
        elif name in ("attn_mask", "attn_bias") and value is not None:
            ins.append(_mask(value, heads))
            outs.append(ins[-1])
        elif isinstance(value, Spec):
            ins.append(_like_query(value, heads))
    made = [d if o is not None else None for d, o in zip(outs, call.outputs)]
    return _rule(call, ins, made, sizes, linear=(frozenset({0}),), reduce=dict.fromkeys("bhs", "sum"))


__all__ = ["FUSED"]
