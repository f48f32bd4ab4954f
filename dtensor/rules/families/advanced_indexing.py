"""Advanced indexing: reads and writes of `x[i, :, j]` by tensors of indices.

Dims that are not indexed stay sharded. The dims of the index, to which all index tensors broadcast, are factors of
their own. Elements that are accumulated may be sharded over the index: each rank adds its own to a partial result.
"""

from typing import Any

import torch

from ..bind import rule_for, rule_table
from ..call import Call, LocalCall
from ..notation import LETTERS, Rule, library_rule
from .embedding_and_gather import lookup
from .row_lookup import bounds, own_rows, with_a_row

MASKS = (torch.bool, torch.uint8)
"""Dtypes of index tensors that are masks, so that the shape of the result depends on their values."""


def _indexed(call: Call) -> tuple[str, list[str]]:
    """The term of the tensor, and the items of that of the indexed result, in which `...` are the dims of the index."""
    at = [d for d, i in enumerate(call["indices"]) if i is not None]
    own = "".join(["1" if d in at else LETTERS[d] for d in range(call["self"].ndim)])
    # The dims of adjacent indices stay in place; those of other indices come first.
    first = at[0] if at and at == list(range(at[0], at[-1] + 1)) else 0
    kept = [d for d in range(len(own)) if d not in at]
    before, after = ([own[d] for d in kept if (d < first) == is_before] for is_before in (True, False))
    return own, [*before, *(["..."] if at else []), *after]


def _has_mask(call: Call) -> bool:
    return any(i is not None and i.dtype in MASKS for i in call["indices"])


def _fills_by_mask(call: Call) -> bool:
    """Whether a single value is written where a mask is true, so that each element is independent of the others."""
    indices = call["indices"]
    return len(indices) == 1 and _has_mask(call) and not call["values"].ndim and not call["accumulate"]


@rule_for("index", "_unsafe_index")
def index(call: Call) -> Rule:
    """Read by index; with a single index tensor the dim it indexes may be sharded, as in `index_select`."""
    own, read = _indexed(call)
    rest = own.replace("1", "")
    if len(call.operands) != 2:
        return library_rule(f"{own},{'...' if '...' in read else '*'}->{''.join(read)}", linear=0, last=rest)
    dim = len(call["indices"]) - 1
    text = f"{own[:dim]}v{own[dim + 1 :]},...->{''.join(read)}"
    return library_rule(text, linear=0, local=_local_index, **{**lookup(call), "last": f"{rest}v"})


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
    """Rows along indexed dims are written where they are; a mask that all dims of it share is cut like the tensor."""
    target, values, linear = call["self"], call["values"], ((0, 2),)
    if _fills_by_mask(call):
        own, (mask,) = LETTERS[: target.ndim], call["indices"]
        return Rule(f"{own},{own[: mask.ndim]},->{own}", linear=linear)
    if _has_mask(call):
        return Rule("*,*,*->*", linear=linear)
    own, read = _indexed(call)
    # A row of values may stand for all, and a single value for all of a row.
    after = read[read.index("...") + 1 :]
    before = values.ndim - len(after) - max(i.ndim for i in call["indices"] if i is not None)
    written = after[len(after) - values.ndim :] if values.ndim <= len(after) else ["...", *after]
    if before > 0:
        written = read[len(read) - len(after) - 1 - before :]
    text = f"{own},...,{''.join(written)}->{own}"
    if not call["accumulate"]:
        return Rule(text, linear=linear, blocked="...")
    return library_rule(text, linear=linear, reduce="...", added=0, last=own.replace("1", ""))


FLAT = {
    "take": Rule("*,...->...", linear=0),
    "masked_scatter": Rule("*,*,*->*", linear=((0, 2),)),
    "masked_scatter_backward": Rule("*,*->*", linear=0),
}
"""Operators that index a tensor as if it were flat, so that it has to be unsharded."""

rule_table(__name__, FLAT)


@rule_for("put")
def put(call: Call) -> Rule:
    """Places are counted in the whole tensor. If values are added, each rank may add a part of them."""
    _, where, source = call.operands
    linear = ((0, 2),)
    if not call["accumulate"] or tuple(where.shape) != tuple(source.shape):
        return Rule("*,*,*->*", linear=linear)
    return Rule("*,...,...->*", reduce="...", linear=linear, added=0)


__all__ = ["FLAT", "MASKS"]
