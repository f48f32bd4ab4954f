"""Scaled dot product attention: batch, heads, queries and keys may be sharded; features may not.

The ways that there are where the sequence is sharded, each for its own price:

    the queries are         keys and values are gathered, and their gradients are sums over the shards
    queries and keys are    each rank's keys and values are passed to all others in turn, which is a ring (Liu, Zaharia
                            and Abbeel, 2023); in the backward their gradients go the same way
    the keys are            each rank attends to its own, and the results are reduced: for few queries, as when a model
                            generates
    heads instead           the operands are exchanged before, which is called Ulysses

A causal mask leaves the first ranks of a ring little to do. There each rank sends its keys and values to those that are
up to half the ranks after it; and those at the end send their queries to the first ones, which attend with their own
keys and send the results back (Li et al., "DistFlashAttn", 2023). So all ranks compute as much; and where keys have as
many heads as queries, half as much is sent.

Where keys have fewer heads, the query heads are a (key head, group) pair of factors. Kernels that pad their outputs
keep the sequence whole. These rules are for the fused operators; `dtensor.tensor.composite_operators` catches the math
path before torch decomposes it.
"""

from collections.abc import Callable, Iterator, Mapping
from math import prod
from typing import Any

import torch

from ...comm.collectives import emit, ops
from ...mesh.local_sizes import divides, local_length, written
from ...mesh.mesh import group_name, mesh_shape
from ...torch_private.symbolic_sizes import same_size
from ..attention_blocks import CPU, GPU, add_rows, attend, attend_backward, join
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


def _causal(ways: Mapping[tuple[str, ...], int]) -> float:
    """How much more than an even part of a causal mask the busiest rank computes: of the square of queries by keys a
    strip, or a part of which most is seen. Where both are cut together ranks help each other."""
    s, t = ways.get(("s",), 1), ways.get(("t",), 1)
    both = ways.get(("s", "t"), 1)
    return 1.0 if s == t == 1 else 2.0 if s > 1 and t > 1 else 2.0 - 1.0 / (both * max(s, t))


def _inside(call: Call, backward: bool) -> tuple[tuple[str, str, tuple[str, ...], str], ...]:
    """What is sent where the keys are cut. With a causal mask half of the ring, and by some ranks queries and results
    instead: as much as the queries is added for these."""
    causal = call["is_causal"]
    pair = ("st", "collective_permute", ("key", "value"), "half ring" if causal else "ring")
    helped = (("st", "collective_permute", ("query",), "half ring"),) if causal else ()
    return (pair, pair, *helped) if backward else (("t", "all_reduce", ("query",), "once"), pair, *helped)


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
        options |= {"inside": _inside(call, backward=False)}
    return library_rule(
        f"{','.join([f'{items}1', keys, keys, *mask])}->{','.join(outs)}", whole=tuple(whole), **options
    )


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
        options |= {"inside": _inside(call, backward=True)}
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
        longest: length of the longest block of keys, to which those that are passed are padded.
        even: whether all blocks are known to be as long.
        helps: whether ranks that a causal mask leaves little to do help the others.
    """

    def __init__(self, call: LocalCall) -> None:
        s, t = (call.axes.get(f, ()) for f in "st")
        self.call = call
        self.mask: Any = call["attn_mask"] if call.call.has("attn_mask") else None
        self.axes: list[int] = [a for a in t if a in s]
        self.others: list[int] = [a for a in t if a not in s]
        self.behind: dict[int, int] = dict.fromkeys(t, 0)
        self.sizes: dict[int, int] = {a: mesh_shape(call.mesh)[a] for a in t}
        self.queries, self.keys = (written(call.call[name].shape[2]) for name in ("query", "key"))
        square = len(s) == 1 and s == t and same_size(self.queries, self.keys)
        self.helps: bool = call["is_causal"] and self.mask is None and square
        self.query_groups = [group_name(call.mesh, a) for a in s]
        self.key_groups = [group_name(call.mesh, a) for a in t]
        self.longest: Any = self._longest(self.keys, self.key_groups)
        self.even: bool = self._even()

    @staticmethod
    def _longest(length: Any, groups: list[str]) -> Any:
        for group in groups:
            length = local_length(length, group, first=True)
        return length

    def _even(self) -> bool:
        """Whether all blocks are known to be as long, so that all ranks know none has to be padded."""
        return divides(prod([self.sizes[a] for a in self.sizes]), self.keys)

    def fitting(self, x: torch.Tensor, length: Any = None) -> torch.Tensor:
        """`x`, padded to the longest block, or cut to a length, along the sequence; on all ranks the same way."""
        return x if self.even else ops.fit(x, x.dim() - 2, self.longest if length is None else length)

    @property
    def n(self) -> int:
        """The number of ranks that help each other."""
        return self.sizes[self.axes[0]]

    @property
    def group(self) -> str:
        """The group of the ranks that help each other."""
        return self.key_groups[0]

    def said(self, of_queries: int = 0, first: Any = 0, of_keys: int | None = None) -> tuple[Any, ...]:
        """What the operators are told: of which rank before this one the queries and keys are, where there is one axis;
        by default the queries are this rank's, and the keys the block at hand."""
        kernel = self.call.call.name.removesuffix("_backward")
        behind = [*self.behind.values()] if of_keys is None else [of_keys]
        queries = self.queries, self.query_groups, [of_queries] * len(self.query_groups), first
        return self.call["is_causal"], self.call["scale"], kernel, *queries, self.keys, self.key_groups, behind

    def steps(self) -> Iterator[int]:
        """The mesh axis of each step to the next rank: all along the last axis, then one along the one before it."""
        for k in range(1, prod([self.sizes[a] for a in self.axes])):
            at = len(self.axes) - 1
            while k % self.sizes[self.axes[at]] == 0:
                k //= self.sizes[self.axes[at]]
                at -= 1
            yield self.axes[at]

    def step(self, axis: int) -> None:
        """Note that the block at hand is now that of a rank one more before this one."""
        self.behind[axis] = (self.behind[axis] + 1) % self.sizes[axis]

    def moved(self, x: torch.Tensor, axis: int, by: int = 1) -> Callable[[], torch.Tensor]:
        """`x` on the rank that is `by` further along an axis."""
        return passed(x, self.call, axis, [(r - by) % self.sizes[axis] for r in range(self.sizes[axis])])

    def home(self, x: torch.Tensor) -> torch.Tensor:
        """What belongs to the block at hand, back on the rank that holds it."""
        for axis in self.axes:
            left = -self.behind[axis] % self.sizes[axis]
            x = self.moved(x, axis, left)() if left else x
        return x

    def pair(self, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Keys and values, or their gradients, in one tensor, as they are passed."""
        return self.fitting(_stacked(key, value))

    def shares(self, t: int) -> tuple[tuple[Any, Any] | None, tuple[Any, Any]]:
        """In step t, the rows for which a rank attends itself to the keys of the rank t before, None for all, and those
        for which that rank helps it; as first one and count."""
        half = self.longest // 2
        return ((0, half), (half, self.longest - half)) if 2 * t == self.n else (None, (0, self.longest))

    def forth(self, x: torch.Tensor, by: int, around: bool = False) -> Callable[[], torch.Tensor]:
        """`x` on the ranks that are `by` after this one; `around`: not on these, but on the first ones for the last."""
        senders = [(r - by) % self.n if (r >= by) != around else r for r in range(self.n)]
        return passed(x, self.call, self.axes[0], senders)

    def back(self, x: torch.Tensor, by: int, around: bool = False) -> Callable[[], torch.Tensor]:
        """`x` on the ranks that `forth` took something from."""
        senders = [(r + by) % self.n if (r < self.n - by) != around else r for r in range(self.n)]
        return passed(x, self.call, self.axes[0], senders)


def _stacked(*tensors: torch.Tensor) -> torch.Tensor:
    return torch.cat([t.unsqueeze(0) for t in tensors])


def _forward(call: LocalCall) -> Any:
    ring, query = _Ring(call), call["query"]
    out, lse = _helping(ring, query, call["key"], call["value"]) if ring.helps else _around(ring, query)
    if ring.others:
        out, lse = _reduced(out, lse, call, ring.others)
    if ring.mask is not None:
        lse = torch.where(lse == -torch.inf, 0, lse)  # as the kernel says it of rows of which a mask leaves nothing
    return _results(call, out.to(query.dtype), lse)


def _around(ring: _Ring, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The result of all blocks, which are passed around."""
    (key, value), out, lse = (ring.call[name] for name in ("key", "value")), None, None
    steps = [*ring.steps(), None]
    pair = ring.pair(key, value) if len(steps) > 1 else None
    for axis in steps:
        coming = ring.moved(pair, axis) if axis is not None and pair is not None else None
        out, lse = attend(query, key, value, ring.mask, out, lse, *ring.said())
        if axis is not None and coming is not None:
            pair = coming()
            key, value = pair.unbind()
            ring.step(axis)
    assert out is not None
    assert lse is not None
    return out, lse


def _helping(ring: _Ring, query: Any, key: Any, value: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The result of a causal mask, for which ranks help each other.

    In step t a rank attends to the keys of the rank t before it; a rank that has none before it helps the rank n - t
    after it, whose queries it gets. Each operator computes nothing on ranks where it has nothing to see. If there is a
    step of n/2, that is both, and each does it for half of the queries.
    """
    n, whole, pair = ring.n, ring.fitting(query), ring.pair(key, value)

    def send(t: int) -> tuple[Callable[[], torch.Tensor], Callable[[], torch.Tensor]]:
        return ring.forth(pair, t), ring.forth(whole.narrow(2, *ring.shares(t)[1]), t, around=True)

    coming = send(1)
    out, lse = attend(query, key, value, None, None, None, *ring.said())
    for t in range(1, n // 2 + 1):
        (near, (first, _)), (keys, asked) = ring.shares(t), coming
        coming = send(t + 1) if t < n // 2 else coming
        found = attend(asked(), key, value, None, None, None, *ring.said(t, first, 0))
        back = [ring.back(x.to(dtype), t, around=True) for x, dtype in zip(found, (query.dtype, lse.dtype))]
        if near is None:
            out, lse = attend(query, *keys().unbind(), None, out, lse, *ring.said(0, 0, t))
        else:
            found = attend(whole.narrow(2, *near), *keys().unbind(), None, None, None, *ring.said(0, 0, t))
            out, lse = join(out, lse, *found, 0, ring.group, 0)
        out, lse = join(out, lse, *[x() for x in back], first, ring.group, n - t)
    return out, lse


def _reduced(
    out: torch.Tensor, lse: torch.Tensor, call: LocalCall, axes: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
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
    ring = _Ring(call)
    query, key, value = (call[name] for name in ("query", "key", "value"))
    given = [call[name] for name in ("grad_out", "query", "out", "logsumexp")]
    run = _helping_backward if ring.helps else _around_backward
    of_query, of_key, of_value = run(ring, given, key, value)
    return of_query.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype)


def _gradients(given: list[Any], key: torch.Tensor, value: torch.Tensor, mask: Any, *said: Any) -> Any:
    """The gradients by a block, of gradients, queries, results and logsumexps."""
    grad, query, out, lse = given
    return attend_backward(grad, query, key, value, mask, out, lse, *said)


def _around_backward(ring: _Ring, given: list[Any], key: torch.Tensor, value: torch.Tensor) -> Any:
    """The gradients where blocks are passed around, behind them the sums of their gradients."""
    steps, sums = [*ring.steps()], None
    pair = ring.pair(key, value) if steps else None
    coming = ring.moved(pair, steps[0]) if pair is not None else None
    of_query, *own = _gradients(given, key, value, ring.mask, *ring.said())
    for k, axis in enumerate(steps):
        assert coming is not None
        pair = coming()
        ring.step(axis)
        coming = ring.moved(pair, steps[k + 1]) if k + 1 < len(steps) else None
        arriving = ring.moved(sums, axis) if sums is not None else None
        of_q, *of_pair = _gradients(given, *pair.unbind(), ring.mask, *ring.said())
        of_query = of_query + of_q
        found = ring.pair(*of_pair).to(key.dtype)
        sums = found if arriving is None else arriving() + found
    if sums is not None:
        own = [a + b for a, b in zip(own, ring.fitting(ring.home(sums), key.shape[2]).unbind())]
    return of_query, *own


def _helping_backward(ring: _Ring, given: list[Any], key: torch.Tensor, value: torch.Tensor) -> Any:
    """The gradients where ranks help each other: who helped gets the gradient of the result, too, and sends that of the
    queries back; who had the keys of another rank sends theirs."""
    n, pair = ring.n, ring.pair(key, value)
    grad, query, out, lse = given
    whole = ring.fitting(_stacked(grad, query, out)), ring.fitting(lse.unsqueeze(-1))

    def send(t: int) -> tuple[Callable[[], torch.Tensor], list[Callable[[], torch.Tensor]]]:
        far = ring.shares(t)[1]
        return ring.forth(pair, t), [ring.forth(x.narrow(-2, *far), t, around=True) for x in whole]

    coming = send(1)
    of_query, *own = _gradients(given, key, value, None, *ring.said())
    of_pair = ring.pair(*own)
    for t in range(1, n // 2 + 1):
        (near, (first, _)), (keys, asked) = ring.shares(t), coming
        coming = send(t + 1) if t < n // 2 else coming
        rows = _rows(*[x() for x in asked])
        of_asked, *found = _gradients(rows, key, value, None, *ring.said(t, first, 0))
        back = ring.back(of_asked.to(query.dtype), t, around=True)
        of_pair = of_pair + ring.pair(*found)
        rows = given if near is None else _rows(*[x.narrow(-2, *near) for x in whole])
        of_near, *found = _gradients(rows, *keys().unbind(), None, *ring.said(0, 0, t))
        back_keys = ring.back(ring.pair(*found).to(key.dtype), t)
        of_query = add_rows(of_query, of_near, 0, ring.group, 0, n)
        of_query = add_rows(of_query, back().to(of_query.dtype), first, ring.group, n - t, n)
        of_pair = add_rows(of_pair, back_keys().to(of_pair.dtype), 0, ring.group, 0, n - t)
    return of_query, *ring.fitting(of_pair, key.shape[2]).unbind()


def _rows(stacked: torch.Tensor, lse: torch.Tensor) -> list[Any]:
    """Gradients, queries, results and logsumexps as they are passed, one by one."""
    return [*stacked.unbind(), lse.squeeze(-1)]


__all__ = ["FUSED"]
