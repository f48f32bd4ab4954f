"""Scaled dot product attention: batch, heads, queries and keys may be sharded; features may not.

The ways that there are where the sequence is sharded, each for its own price:

    the queries are         keys and values are gathered, and their gradients are sums over the shards
    queries and keys are    each rank's keys and values are passed to all others in turn, which is a ring; in the
                            backward their gradients go the same way
    the keys are            each rank attends to its own, and the results are reduced: for few queries, as when a model
                            generates
    heads instead           the operands are exchanged before, which is called Ulysses

Where keys have fewer heads than queries, the query heads are a (key head, group) pair of factors. Kernels that pad their
outputs keep the sequence whole. These rules are for the fused operators; `dtensor.tensor.composite_operators` catches
the math path before torch decomposes it.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from ...comm.collectives import emit, ops
from ...mesh.local_sizes import local_length, written
from ...mesh.mesh import group_name, mesh_shape
from ...torch_private.symbolic_sizes import known_equal, same_size
from ..attention_blocks import CPU, GPU, attend, attend_backward
from ..bind import rule_for
from ..call import Call, LocalCall
from ..local_calls import all_reduce, empty_outputs, for_empty, passed
from ..notation import Rule, library_rule
from ..plan import signature

FUSED = (
    CPU,
    GPU,
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)

MASKS = ("attn_mask", "attn_bias")
"""The arguments for a mask."""

BY_QUERY = (CPU, GPU)
"""The kernels whose outputs have one entry for each query; others pad them."""


def _queries(call: Call) -> tuple[str, str, dict[str, Any]]:
    """The items for batch, heads and length of the queries; those of keys and values; and options of the rule.

    With dropout no factor may be sharded, because the kernels draw by position in their inputs. No shard of heads or
    queries should be empty: the kernels divide by the number of heads, and on the CPU the process ends.
    """
    q, k = call["query"], call["key"]
    grouped = not same_size(q.shape[1], k.shape[1])
    cut = call.name.removesuffix("_backward") in BY_QUERY
    length, keys = ("s", "bht1") if cut else ("1", "bh11")
    items = f"b{'(hg)' if grouped else 'h'}{length}"
    factors = items.translate({ord(c): None for c in "(1)"})
    options: dict[str, Any] = {
        "blocked": f"{factors}{'t' if cut else ''}" if call["dropout_p"] else "g" if grouped else "",
        "refuses_empty": factors[1:],
        "local": _on_shards,
        "across": "",
    }
    if cut:
        options |= {"across": "st" if call["is_causal"] else "t", "last": "t", "together": (("s", "t"),)}
        options |= {"busiest": _causal if call["is_causal"] else None}
    return items, keys, options


def _causal(ways: Mapping[str, int]) -> float:
    """How much more than an even part of a causal mask the busiest rank computes: of the square of queries by keys, cut
    into s by t parts, that one of which most is seen; where both are cut together, or the keys are not, a strip of it.
    """
    s, t = ways.get("s", 1), ways.get("t", 1)
    n = max(s, t)
    return 1.0 if n == 1 else 2.0 - 1.0 / n if min(s, t) in (1, n) else 2.0


def _like_query(tensor: Any, items: str) -> str:
    """The term of an output: (b, heads, queries, …), and none for a seed or a list of lengths."""
    return f"{items}{'1' * (tensor.ndim - 3)}" if tensor is not None and tensor.ndim > 2 else "*"


def _mask(mask: Any, items: str) -> str:
    """The term of a mask, which broadcasts over batch, heads and queries."""
    if mask is None:
        return "*"
    dims = [items[0], items[1:-1], items[-1], "1"][4 - mask.ndim :]
    return "".join(["1" if same_size(n, 1) else item for n, item in zip(mask.shape, dims)])


@rule_for(*FUSED)
def fused(call: Call) -> Rule:
    """Batch, heads, queries and keys may be sharded; a mask as queries are, and along its keys never."""
    items, keys, options = _queries(call)
    mask = [_mask(call[name], items) for name in signature(call.func).arguments if name in MASKS]
    outs = [_like_query(call.outputs[k], items) for k in signature(call.func).results]
    whole = [i for i, term in enumerate(outs) if term == "*"]
    if "t" in keys:
        whole += [(i, "t") for i, term in enumerate(outs) if term != "*"]
        reduced, passed_on = ("t", "all_reduce", ("query",)), ("st", "collective_permute", ("key", "value"))
        options |= {"inside": (reduced, passed_on)}
    return library_rule(f"{','.join([f'{items}1', keys, keys, *mask])}->{','.join(outs)}", whole=tuple(whole), **options)


@rule_for(*(f"{name}_backward" for name in FUSED))
def fused_backward(call: Call) -> Rule:
    """The gradient of a mask is a sum over what it broadcasts over, those of the keys over shards of the queries, and
    the other way round."""
    items, keys, options = _queries(call)
    terms = {name: _like_query(call[name], items) for name in signature(call.func).arguments}
    terms |= {"key": keys, "value": keys} | {name: _mask(call[name], items) for name in terms if name in MASKS}
    outs = [f"{items}1", keys, keys, *(terms[name] for name in terms if name in MASKS)]
    outs = outs[: signature(call.func).returns]
    factors = f"{items}{keys}"
    reduce = [f for f in "bhst" if f in factors and any(f not in term for term in outs)]
    if "t" in keys:
        options |= {"inside": (("st", "collective_permute", ("key", "value")),) * 2}
    return library_rule(f"{','.join(terms.values())}->{','.join(outs)}", linear=0, reduce="".join(reduce), **options)


@for_empty
def _on_shards(call: LocalCall) -> Any:
    """Attention of shards: block by block where positions or other ranks' keys matter.

    Else the operator itself, but not on a rank with an empty shard: the kernels divide by the number of heads. Without
    queries such a rank adds zeros to the gradients of keys and values.
    """
    if call.axes.get("t") or (call.axes.get("s") and call["is_causal"]):
        return _backward(call) if call.call.name.endswith("_backward") else _forward(call)
    return call.run() if call["query"].numel() else empty_outputs(call)


class _Ring:
    """The blocks of keys and values that a rank attends to, its own first.

    Attributes:
        axes: the mesh axes that shard queries and keys together, along which blocks are passed.
        others: those that shard the keys alone.
        behind: mesh axis -> of how many ranks before this one the block at hand is.
        longest: the length of the longest block; those that are passed are padded to it.
    """

    def __init__(self, call: LocalCall) -> None:
        s, t = (call.axes.get(f, ()) for f in "st")
        self.call = call
        self.axes: list[int] = [a for a in t if a in s]
        self.others: list[int] = [a for a in t if a not in s]
        self.behind: dict[int, int] = dict.fromkeys(t, 0)
        self.sizes: dict[int, int] = {a: mesh_shape(call.mesh)[a] for a in t}
        self.queries, self.keys = (written(call.call[name].shape[2]) for name in ("query", "key"))
        self.query_groups = [group_name(call.mesh, a) for a in s]
        self.key_groups = [group_name(call.mesh, a) for a in t]
        self.longest: Any = self.keys
        for group in self.key_groups:
            self.longest = local_length(self.longest, group, first=True)

    @property
    def said(self) -> tuple[Any, ...]:
        """What the operators are told of the block at hand."""
        call = self.call
        kernel = call.call.name.removesuffix("_backward")
        place = self.queries, self.query_groups, self.keys, self.key_groups, list(self.behind.values())
        return call["is_causal"], call["scale"], kernel, *place

    def steps(self) -> Iterator[int]:
        """The mesh axis of each step to the next rank: all along the last axis, then one along the one before it."""
        count = 1
        for a in self.axes:
            count *= self.sizes[a]
        for k in range(1, count):
            at = len(self.axes) - 1
            while k % self.sizes[self.axes[at]] == 0:
                k //= self.sizes[self.axes[at]]
                at -= 1
            yield self.axes[at]

    def moved(self, x: torch.Tensor, axis: int) -> Callable[[], torch.Tensor]:
        """`x` on the next rank along an axis."""
        return passed(x, self.call, axis, 1)

    def home(self, x: torch.Tensor) -> torch.Tensor:
        """What belongs to the block at hand, back on the rank that holds it."""
        for axis in self.axes:
            left = -self.behind[axis] % self.sizes[axis]
            x = passed(x, self.call, axis, left)() if left else x
        return x

    def pair(self, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Keys and values, or their gradients, in one tensor, as they are passed."""
        return _fitting(torch.cat([key.unsqueeze(0), value.unsqueeze(0)]), self.longest)


def _fitting(pair: torch.Tensor, length: Any) -> torch.Tensor:
    """A pair of keys and values, padded or cut to a length."""
    return pair if known_equal(pair.shape[3], length) else ops.fit(pair, 3, length)


def _forward(call: LocalCall) -> Any:
    ring, query, mask = _Ring(call), call["query"], call["attn_mask"] if call.call.has("attn_mask") else None
    key, value, out, lse = call["key"], call["value"], None, None
    steps = [*ring.steps(), None]
    pair = ring.pair(key, value) if len(steps) > 1 else None
    for axis in steps:
        coming = ring.moved(pair, axis) if axis is not None else None
        out, lse = attend(query, key, value, mask, out, lse, *ring.said)
        if axis is not None:
            pair = coming()
            key, value = pair.unbind()
            ring.behind[axis] = (ring.behind[axis] + 1) % ring.sizes[axis]
    if ring.others:
        out, lse = _reduced(out, lse, call, ring.others)
    if mask is not None:
        lse = torch.where(lse == -torch.inf, 0, lse)  # as the kernel says it of rows of which a mask leaves nothing
    return _results(call, out.to(query.dtype), lse)


def _reduced(out: torch.Tensor, lse: torch.Tensor, call: LocalCall, axes: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The result of all keys, of which each rank along the axes has attended to some."""
    total = lse
    for axis in axes:
        n = mesh_shape(call.mesh)[axis]
        total = emit.all_gather(total.unsqueeze(0), 0, n, group_name(call.mesh, axis)).logsumexp(0)
    share = (lse - total.masked_fill(total == -torch.inf, 0)).exp()
    return all_reduce(out * share.unsqueeze(-1), "sum", call, axes=axes), total


def _results(call: LocalCall, out: torch.Tensor, lse: torch.Tensor) -> Any:
    """What the operator returns: of lengths and seeds, which nothing reads without dropout, zeros."""
    lengths = {"max_q": call["query"].shape[2], "max_k": call["key"].shape[2]}
    names = [result.name for result in call.func._schema.returns]
    others = [
        lengths.get(name) if o is None else out.new_zeros(o.shape, dtype=o.dtype)
        for name, o in zip(names[2:], call.call.outputs[2:])
    ]
    return (out, lse, *others)


def _backward(call: LocalCall) -> Any:
    ring, mask = _Ring(call), call["attn_mask"] if call.call.has("attn_mask") else None
    query, key, value = (call[name] for name in ("query", "key", "value"))
    given = call["grad_out"], query
    done = call["out"], call["logsumexp"]
    steps = [*ring.steps()]
    pair = ring.pair(key, value) if steps else None
    length, sums = key.shape[2], None
    coming = ring.moved(pair, steps[0]) if steps else None
    of_query, *own = attend_backward(*given, key, value, mask, *done, *ring.said)
    for k, axis in enumerate(steps):
        pair = coming()
        ring.behind[axis] = (ring.behind[axis] + 1) % ring.sizes[axis]
        coming = ring.moved(pair, steps[k + 1]) if k + 1 < len(steps) else None
        arriving = ring.moved(sums, axis) if sums is not None else None
        of_q, *of_pair = attend_backward(*given, *pair.unbind(), mask, *done, *ring.said)
        of_query = of_query + of_q
        found = ring.pair(*of_pair).to(key.dtype)
        sums = found if arriving is None else arriving() + found
    of_key, of_value = own
    if sums is not None:
        of_key, of_value = (a + b for a, b in zip(own, _fitting(ring.home(sums), length).unbind()))
    return of_query.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype)


__all__ = ["FUSED"]
