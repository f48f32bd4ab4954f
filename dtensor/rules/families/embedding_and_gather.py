"""Embedding, gather, index_select and scatter: reads and writes of rows by index.

The dim that is looked up may be sharded: each rank looks up the indices that fall into its rows (`own_rows`) and puts
zeros elsewhere, so the result is Partial(sum). The offset of a rank's rows is computed when the graph runs.
"""

from math import prod
from typing import Any

import torch

from ...torch_private.symbolic_sizes import hint
from ..bind import rule_for, rule_table
from ..call import Call, LocalCall
from ..notation import LETTERS, LibraryRule, Rule, library_rule
from ..plan import signature
from .row_lookup import bounds, own_rows, with_a_row


def _local_embedding(call: LocalCall) -> Any:
    weight, indices, size = with_a_row(call["weight"], 0), call["indices"], call.call["weight"].shape[0]
    row, mine = own_rows(indices, size, weight.shape[0], call.axes["v"], call.mesh)
    with bounds(indices, size, 0):
        found = torch.ops.aten.embedding.default(weight, row)
    return torch.where(mine.unsqueeze(-1), found, torch.zeros_like(found))


EMBEDDING = {"embedding": LibraryRule("vd,...->...d", reduce="v", linear=0, local=_local_embedding, across="v")}

rule_table(__name__, EMBEDDING)


@rule_for("embedding_dense_backward")
def embedding_backward(call: Call) -> Rule:
    """The gradient of the table is a partial sum over the indices, unless each counts how often it occurs."""
    blocked = "..." if call["scale_grad_by_freq"] else ""
    return library_rule("...d,...->1d", reduce="...", linear=0, blocked=blocked, last="...")


@rule_for("index_select")
def index_select(call: Call) -> Rule:
    """Rows are selected of a shard by indices of the whole: each rank gives what it has, and zeros."""
    source, index = call.operands
    full = LETTERS[: source.ndim]
    dim = call["dim"] % max(source.ndim, 1)
    row = "i" if full and index.ndim else "1"
    return _looked_up(call, f"{_along(full, dim, 'v')},{row * index.ndim}->{_along(full, dim, row)}")


def _along(term: str, dim: int, factor: str) -> str:
    """The term with another factor for `dim`; that of a 0-dim tensor as it is."""
    return term and term[:dim] + factor + term[dim + 1 :]


@rule_for("gather")
def gather(call: Call) -> Rule:
    """Dims other than the looked-up one may stay sharded where source and index have the same length."""
    source, index = call.operands
    if source.ndim != index.ndim:
        # An empty index may have any number of dims, and a scalar is accepted in place of a vector of length 1.
        return Rule("*,*->*", linear=0)
    dim = call["dim"] % max(source.ndim, 1)
    beside = _beside(dim, [source.shape, index.shape])
    looked, found = _along(beside, dim, "v"), _along(beside, dim, "i")
    return _looked_up(call, f"{looked},{found}->{found}")


def _looked_up(call: Call, text: str) -> Rule:
    """The rule of a lookup of rows by index; `v` is the looked-up factor."""
    return library_rule(text, linear=0, local=_local_lookup, **lookup(call)) if "v" in text else Rule(text, linear=0)


def lookup(call: Call) -> dict[str, Any]:
    """Fields of a rule for the looked-up factor `v`: if it is sharded, each rank returns zeros for other ranks' rows.

    It may be sharded only where this pays: an all-reduce of the result sends no more than a gather of the source if
    the result has at most half as many elements.
    """
    source, (result,) = call.operands[0], call.outputs
    assert result is not None
    pays = 2 * prod(map(hint, result.shape)) <= prod(map(hint, source.shape)) and source.dtype != torch.bool
    return {"reduce": "v", "blocked": "" if pays else "v", "across": "v", "last": "v"}


def _local_lookup(call: LocalCall) -> Any:
    dim = call.call["dim"] % call["self"].dim()
    source, index, size = with_a_row(call["self"], dim), call["index"], call.call["self"].shape[dim]
    row, mine = own_rows(index, size, source.shape[dim], call.axes["v"], call.mesh)
    with bounds(index, size, dim):
        found = call.run(self=source, index=row)
    if call.call.name == "index_select":
        mine = mine.reshape([-1 if d == dim else 1 for d in range(found.dim())])
    return torch.where(mine, found, torch.zeros_like(found))


def _beside(dim: int, shapes: list[tuple[Any, ...]]) -> str:
    """The term of the dims other than `dim` in which all shapes have the same length."""
    first, *others = shapes
    same = [k != dim and all(shape[k] == n for shape in others) for k, n in enumerate(first)]
    return "".join([LETTERS[k] if alike else "1" for k, alike in enumerate(same)])


@rule_for("scatter", "scatter_add", "scatter_reduce")
def scatter(call: Call) -> Rule:
    """The reverse of gather: dims other than the written one may stay sharded.

    Values that are added may be sharded along the written dim too: each rank adds its own to a partial result.
    """
    target, index = call.operands[:2]
    count = len(signature(call.func).arguments)
    sums = call.name == "scatter_add" or (call.name == "scatter_reduce" and call["reduce"] == "sum")
    copies = call.name == "scatter" and call.func._overloadname == "src"
    linear = ((0, 2),) if sums or copies else ()
    if not target.ndim or any(o.ndim != target.ndim for o in call.operands):  # as in `gather`
        return Rule(f"{','.join(['*'] * count)}->*", linear=linear)
    dim = call["dim"] % target.ndim
    one = _beside(dim, [o.shape for o in call.operands])
    joins = sums and (call.name == "scatter_add" or call["include_self"])
    adds = joins and index.shape[dim] == call.operands[2].shape[dim]
    read = _along(one, dim, "i") if adds else one
    text = f"{','.join([one, *[read] * (count - 1)])}->{one}"
    return library_rule(text, reduce="i", linear=linear, added=0, last="i") if adds else Rule(text, linear=linear)


@rule_for("index_add", "index_copy", "index_fill", "index_reduce")
def index_write(call: Call) -> Rule:
    """Writes rows along one dim; the other dims may stay sharded, and so may the rows if they are added."""
    target, index = call.operands[:2]
    dim = call["dim"] % max(target.ndim, 1)
    one = _beside(dim, [target.shape])
    adds = call.name == "index_add" and index.ndim == 1 and target.ndim > 0
    read = _along(one, dim, "i") if adds else one
    rows = [read if o.ndim == target.ndim else "*" for o in call.operands[2:]]
    text = f"{','.join([one, 'i' if adds else '*', *rows])}->{one}"
    linear = ((0, 2),) if rows and call.name != "index_reduce" else ()
    return library_rule(text, reduce="i", linear=linear, added=0, last="i") if adds else Rule(text, linear=linear)


__all__ = ["EMBEDDING", "lookup"]
