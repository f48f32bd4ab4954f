"""Scaled dot product attention: batch and heads may be sharded, sequence and features may not.

Where the keys have fewer heads than the queries, the query heads are a (key head, group) pair of factors. These rules
are for the fused operators; `dtensor.tensor.composite` catches the math path before torch decomposes it.
"""

from collections.abc import Iterable
from typing import Any

from ...mesh.tensor_spec import Spec
from ..call import Call, LocalCall, rule_for
from ..local_calls import empty_outputs
from ..rule import Dims, Rule

FUSED: dict[str, Any] = {
    "_scaled_dot_product_flash_attention_for_cpu": "attn_mask",
    "_scaled_dot_product_flash_attention": None,
    "_scaled_dot_product_efficient_attention": "attn_bias",
    "_scaled_dot_product_cudnn_attention": "attn_bias",
}
"""Fused forward operator -> the name of its mask argument."""

HEADS = frozenset({"h", "g"})
"""The factors that the kernels divide by; on the CPU the process ends if a shard has none."""


def _heads(call: Call) -> tuple[Dims, Dims, dict[str, Any]]:
    """Factors of queries, gradients and output; factors of keys and values; sizes."""
    q, k = call["query"], call["key"]
    sizes = {"b": q.shape[0], "h": k.shape[1]}
    head = ("h",)
    if isinstance(q.shape[1], int) and isinstance(k.shape[1], int) and q.shape[1] != k.shape[1]:
        sizes["g"] = q.shape[1] // k.shape[1]
        head = ("h", "g")
    return (("b",), head, (), ()), (("b",), ("h",), (), ()), sizes


def _mask(mask: Any, heads: Dims, sizes: dict[str, Any]) -> Dims:
    """Factors of a mask that broadcasts over batch and heads."""
    full = heads[4 - mask.ndim :]
    return tuple(() if not d or s == 1 else d for d, s in zip(full, mask.shape))


def _output(o: Any, heads: Dims, query: Any, sizes: dict[str, Any]) -> Dims | None:
    """Factors of an output: (b, heads, …) if its shape starts like the query's, else none."""
    if o is None:
        return None
    if o.ndim >= 3 and o.shape[0] == query.shape[0] and o.shape[1] == query.shape[1]:
        return (*heads[:2], *([()] * (o.ndim - 2)))
    return ((),) * o.ndim


@rule_for(*FUSED)
def fused(call: Call) -> Rule:
    heads, keys, sizes = _heads(call)
    name = FUSED[call.name]
    mask = call[name] if name else None
    ins = [heads, keys, keys] + ([_mask(mask, heads, sizes)] if mask is not None else [])
    outs = [_output(o, heads, call["query"], sizes) for o in call.outputs]
    whole = frozenset(i for i, d in enumerate(outs) if i > 0 and d is not None and not any(d))
    return _rule(call, ins, outs, sizes, whole=whole)


def _rule(call: Call, ins: Iterable[Dims], outs: Iterable[Dims | None], sizes: dict[str, Any], **more: Any) -> Rule:
    """With dropout no factor may be sharded, because the kernels draw by position in their inputs."""
    more["blocked"] = frozenset(sizes if call["dropout_p"] else {"g"})
    return Rule(tuple(ins), tuple(outs), sizes, local=_unless_empty, refuses_empty=HEADS, **more)


def _unless_empty(call: LocalCall) -> Any:
    """A rank with an empty shard must not run the kernels, which divide by the number of heads."""
    return call.run() if call["query"].numel() else empty_outputs(call)


@rule_for(*(f"{name}_backward" for name in FUSED))
def fused_backward(call: Call) -> Rule:
    heads, keys, sizes = _heads(call)
    names = [a.name for a in call.func._schema.arguments]
    ins: list[Dims] = []
    for name in names:
        value = call[name]
        if name in ("key", "value"):
            ins.append(keys)
        elif name in ("grad_out", "query", "out", "logsumexp", "grad_out_"):
            ins.append(_output(value, heads, call["query"], sizes) or ())
        elif name in ("attn_mask", "attn_bias") and value is not None:
            ins.append(_mask(value, heads, sizes))
        elif isinstance(value, Spec):
            ins.append(((),) * value.ndim)
    outs: list[Dims | None] = [heads, keys, keys]
    outs += [((),) * o.ndim if o is not None else None for o in call.outputs[3:]]
    outs = [d if o is not None else None for d, o in zip(outs, call.outputs)]
    return _rule(call, ins, outs, sizes, linear=(frozenset({0}),))


__all__ = ["FUSED"]
