"""Scaled dot product attention: batch, heads and, without a causal mask, the queries may be sharded; features may not.

Each query attends to all keys, so keys and values stay whole where the sequence of queries is sharded, and their
gradients are sums over its shards. A kernel that masks by position counts from its first query, and others pad their
outputs: there the sequence stays whole. Where the keys have fewer heads than the queries, the query heads are a
(key head, group) pair of factors. These rules
are for the fused operators; `dtensor.tensor.composite_operators` catches the math path before torch decomposes it.
"""

from typing import Any

from ...torch_private.symbolic_sizes import same_size
from ..bind import rule_for
from ..call import Call, LocalCall
from ..local_calls import empty_outputs, for_empty
from ..notation import Rule, library_rule
from ..plan import signature

FUSED = (
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)

MASKS = ("attn_mask", "attn_bias")
"""The arguments for a mask."""

BY_QUERY = ("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention")
"""The kernels whose outputs have one entry for each query; others pad them."""


def _queries(call: Call) -> tuple[str, dict[str, Any]]:
    """The items for batch, heads and length of the queries, and options of the rule.

    With dropout no factor may be sharded, because the kernels draw by position in their inputs. No shard of heads or
    queries should be empty: the kernels divide by the number of heads, and on the CPU the process ends.
    """
    q, k = call["query"], call["key"]
    grouped = not same_size(q.shape[1], k.shape[1])
    length = "s" if not call["is_causal"] and call.name.removesuffix("_backward") in BY_QUERY else "1"
    items = f"b{'(hg)' if grouped else 'h'}{length}"
    factors = items.translate({ord(c): None for c in "(1)"})
    return items, {
        "blocked": factors if call["dropout_p"] else "g" if grouped else "",
        "refuses_empty": factors[1:],
        "local": _unless_empty,
    }


def _like_query(tensor: Any, items: str) -> str:
    """The term of an output: (b, heads, queries, …), and none for a seed or a list of lengths."""
    return f"{items}{'1' * (tensor.ndim - 3)}" if tensor is not None and tensor.ndim > 2 else "*"


KEYS = "bh11"
"""The term of keys and values."""


def _mask(mask: Any, items: str) -> str:
    """The term of a mask, which broadcasts over batch, heads and queries."""
    if mask is None:
        return "*"
    dims = [items[0], items[1:-1], items[-1], "1"][4 - mask.ndim :]
    return "".join(["1" if same_size(n, 1) else item for n, item in zip(mask.shape, dims)])


@rule_for(*FUSED)
def fused(call: Call) -> Rule:
    """Batch, heads and queries may be sharded, keys and values along batch and heads; a mask as they are."""
    items, options = _queries(call)
    mask = [_mask(call[name], items) for name in signature(call.func).arguments if name in MASKS]
    outs = [_like_query(call.outputs[k], items) for k in signature(call.func).results]
    whole = tuple([i for i, term in enumerate(outs) if term == "*"])
    return library_rule(f"{','.join([f'{items}1', KEYS, KEYS, *mask])}->{','.join(outs)}", whole=whole, **options)


@for_empty
def _unless_empty(call: LocalCall) -> Any:
    """A rank with an empty shard must not run the kernels, which divide by the number of heads. Without queries it adds
    zeros to the gradients of keys and values."""
    return call.run() if call["query"].numel() else empty_outputs(call)


@rule_for(*(f"{name}_backward" for name in FUSED))
def fused_backward(call: Call) -> Rule:
    """The gradient of a mask is a sum over what it broadcasts over."""
    items, options = _queries(call)
    terms = {name: _like_query(call[name], items) for name in signature(call.func).arguments}
    terms |= {"key": KEYS, "value": KEYS} | {name: _mask(call[name], items) for name in terms if name in MASKS}
    outs = [f"{items}1", KEYS, KEYS, *(terms[name] for name in terms if name in MASKS)]
    outs = outs[: signature(call.func).returns]
    reduce = [f for f in "bhs" if f in items and any(f not in term for term in outs)]
    return library_rule(f"{','.join(terms.values())}->{','.join(outs)}", linear=0, reduce="".join(reduce), **options)


__all__ = ["FUSED"]
