"""Advanced indexing: reads and writes of `x[i, :, j]` by tensors of indices.

Dims that are not indexed stay sharded. The dims of the index, to which all index tensors broadcast, are factors of
their own. Elements that are accumulated may be sharded over the index: each rank adds its own to a partial result.
"""

from typing import Any

import torch

from ...torch_private.symbolic_sizes import same_size
from ..call import Call, LocalCall, rule_for
from ..pattern import Pattern, pattern_rules
from ..rule import Dims, Rule
from .embedding_and_gather import index_factors, lookup
from .pointwise import broadcast, broadcast_shape
from .row_lookup import bounds, own_rows, with_a_row

MASKS = (torch.bool, torch.uint8)
"""Dtypes of index tensors that are masks, so that the shape of the result depends on their values."""


def _indexed(call: Call) -> tuple[Dims, tuple[Dims, ...], Dims, dict[str, Any]]:
    """Factors of the tensor, the index tensors and the indexed result; their sizes."""
    shape = call["self"].shape
    indices = list(call["indices"])
    tensors = [i for i in indices if i is not None]
    at = [d for d, i in enumerate(indices) if i is not None]
    shapes = [i.shape for i in tensors]
    factors, sizes = broadcast(shapes, broadcast_shape(shapes))
    index = [tuple(tuple(f"i{f[1:]}" for f in d) for d in dims) for dims in factors]
    found: Dims = tuple((f"i{f[1:]}",) for f in sizes)
    sizes = {f"i{f[1:]}": s for f, s in sizes.items()}
    own: Dims = tuple(() if d in at else (f"d{d}",) for d in range(len(shape)))
    # The dims of adjacent indices stay in place; those of other indices come first.
    first = at[0] if at and at == list(range(at[0], at[-1] + 1)) else 0
    kept = [d for d in range(len(shape)) if d not in at]
    before = [own[d] for d in kept if d < first]
    read = (*before, *found, *(own[d] for d in kept if d >= first))
    return own, tuple(index), read, {**sizes, **{f"d{d}": shape[d] for d in kept}}


def _has_mask(call: Call) -> bool:
    return any(i is not None and i.dtype in MASKS for i in call["indices"])


def _fills_by_mask(call: Call) -> bool:
    """Whether a single value is written where a mask is true, so that each element is independent of the others."""
    indices = call["indices"]
    return len(indices) == 1 and _has_mask(call) and not call["values"].ndim and not call["accumulate"]


@rule_for("index", "_unsafe_index")
def index(call: Call) -> Rule:
    """Read by index; with a single index tensor the dim it indexes may be sharded, as in `index_select`."""
    own, indices, read, sizes = _indexed(call)
    if len(indices) != 1:
        return Rule((own, *indices), (read,), sizes, linear=(frozenset({0}),))
    dim = len(call["indices"]) - 1
    own = tuple(("v",) if d == dim else f for d, f in enumerate(own))
    sizes["v"] = call["self"].shape[dim]
    return Rule((own, *indices), (read,), sizes, linear=(frozenset({0}),), local=_local_index, **lookup(call))


def _local_index(call: LocalCall) -> Any:
    given = list(call["indices"])
    dim, index = len(given) - 1, given[-1]
    source, size = with_a_row(call["self"], dim), call.call["self"].shape[dim]
    counted = torch.where(index < 0, index + size, index)
    row, mine = own_rows(counted, size, source.shape[dim], call.axes["v"], call.mesh)
    with bounds(index, size, dim, least=-size):
        found = call.run(self=source, indices=[*given[:-1], row])
    mine = mine.reshape(*mine.shape, *[1] * (source.dim() - dim - 1))
    return torch.where(mine, found, torch.zeros_like(found))


@rule_for("index_put", "_index_put_impl", "_unsafe_index_put")
def index_put(call: Call) -> Rule:
    target, values = call["self"], call["values"]
    own, indices, read, sizes = _indexed(call)
    shape = [sizes[f] for (f,) in read]
    missing = len(read) - values.ndim
    # A row of values may stand for all, and a single value for all of a row.
    written = tuple(
        () if same_size(s, 1) and not same_size(shape[i], 1) else read[i] for i, s in enumerate(values.shape, missing)
    )
    last = len(call.operands) - 1
    linear = (frozenset({0, last}),)
    index_factors = [f for f in sizes if f.startswith("i")]
    if _fills_by_mask(call):
        ((own,), sizes), (mask,) = broadcast([target.shape], target.shape), call["indices"]
        return Rule((own, own[: mask.ndim], ()), (own,), sizes, linear=linear)
    if _has_mask(call):
        nothing = tuple(((),) * o.ndim for o in call.operands)
        return Rule(nothing, (((),) * target.ndim,), {}, linear=linear)
    if not call["accumulate"]:
        return Rule((own, *indices, written), (own,), sizes, linear=linear, blocked=frozenset(index_factors))
    reduce = dict.fromkeys(index_factors, "sum")
    return Rule((own, *indices, written), (own,), sizes, reduce=reduce, linear=linear, addends=frozenset({0}))


FLAT = {
    "take": Pattern("~, * -> *", linear=({0},), local=None),
    "masked_scatter": Pattern("~, ~, ~ -> ~", linear=({0, 2},), local=None),
    "masked_scatter_backward": Pattern("~, ~ -> ~", linear=({0},), local=None),
}
"""Operators that index a tensor as if it were flat, so that it has to be unsharded."""

pattern_rules(FLAT)


@rule_for("put")
def put(call: Call) -> Rule:
    target, where, source = call.operands
    nothing: Dims = ((),) * target.ndim
    names, sizes = index_factors(where.shape)
    linear = (frozenset({0, 2}),)
    if not call["accumulate"] or tuple(where.shape) != tuple(source.shape):
        return Rule((nothing, ((),) * where.ndim, ((),) * source.ndim), (nothing,), {}, linear=linear)
    reduce = dict.fromkeys(sizes, "sum")
    return Rule((nothing, names, names), (nothing,), sizes, reduce=reduce, linear=linear, addends=frozenset({0}))


__all__ = ["FLAT", "MASKS"]
