"""Embedding, gather, index_select and scatter: reads and writes of rows by index.

The dim that is looked up may be sharded: each rank looks up the indices that fall into its rows (`own_rows`) and puts
zeros elsewhere, so the result is Partial(sum). The offset of a rank's rows is computed when the graph runs.
"""

from math import prod
from typing import Any

import torch

from ...torch_private.symbolic_sizes import hint
from ..call import Call, LocalCall, rule_for
from ..rule import Dims, Rule
from .pointwise import broadcast
from .row_lookup import bounds, own_rows, with_a_row


def index_factors(shape: tuple[Any, ...]) -> tuple[Dims, dict[str, Any]]:
    """Factors of an index tensor, one for each dim, and their sizes."""
    names = [f"i{k}" for k in range(len(shape))]
    return tuple((f,) for f in names), dict(zip(names, shape))


@rule_for("embedding")
def embedding(call: Call) -> Rule:
    weight, indices = call.operands
    where, sizes = index_factors(indices.shape)
    sizes = {"v": weight.shape[0], "d": weight.shape[1], **sizes}
    return Rule(
        ((("v",), ("d",)), where),
        ((*where, ("d",)),),
        sizes,
        reduce={"v": "sum"},
        linear=(frozenset({0}),),
        local=_local_embedding,
        across=frozenset("v"),
    )


def _local_embedding(call: LocalCall) -> Any:
    weight, indices, size = with_a_row(call["weight"], 0), call["indices"], call.call["weight"].shape[0]
    row, mine = own_rows(indices, size, weight.shape[0], call.axes["v"], call.mesh)
    with bounds(indices, size, 0):
        found = torch.ops.aten.embedding.default(weight, row)
    return torch.where(mine.unsqueeze(-1), found, torch.zeros_like(found))


@rule_for("embedding_dense_backward")
def embedding_backward(call: Call) -> Rule:
    grad, indices = call.operands
    where, found = index_factors(indices.shape)
    return Rule(
        ((*where, ("d",)), where),
        ((("v",), ("d",)),),
        {"v": call["num_weights"], "d": grad.shape[-1], **found},
        reduce=dict.fromkeys(found, "sum"),
        linear=(frozenset({0}),),
        blocked=frozenset({"v", *(found if call["scale_grad_by_freq"] else ())}),
    )


@rule_for("index_select")
def index_select(call: Call) -> Rule:
    source, index = call.operands
    dim = call["dim"] % max(source.ndim, 1)
    (full,), sizes = broadcast([source.shape], source.shape)
    found = ("i",) if index.ndim else ()
    ins = tuple(("v",) if i == dim else d for i, d in enumerate(full))
    out = tuple(found if i == dim else d for i, d in enumerate(full))
    sizes = {f: s for f, s in sizes.items() if f != f"d{dim}"} | dict(zip(found, index.shape))
    return _looked_up(call, (ins, (found,) * index.ndim), out, sizes, dim)


@rule_for("gather")
def gather(call: Call) -> Rule:
    """Dims other than the looked-up one may stay sharded where source and index have the same length."""
    source, index = call.operands
    if source.ndim != index.ndim:
        # An empty index may have any number of dims, and a scalar is accepted in place of a vector of length 1.
        return Rule((((),) * source.ndim, ((),) * index.ndim), (((),) * index.ndim,), {}, linear=(frozenset({0}),))
    dim = call["dim"] % max(source.ndim, 1)
    one, sizes = _beside(dim, [source.shape, index.shape])
    found: Dims = tuple(("i",) if k == dim else d for k, d in enumerate(one))
    looked: Dims = tuple(("v",) if k == dim else d for k, d in enumerate(one))
    sizes = {**sizes, **({"i": index.shape[dim]} if index.ndim else {})}
    return _looked_up(call, (looked, found), found, sizes, dim)


def _looked_up(call: Call, ins: tuple[Dims, ...], out: Dims, sizes: dict[str, Any], dim: int) -> Rule:
    """The rule of a lookup of rows by index; `v` is the looked-up factor."""
    source = call.operands[0]
    sizes = {**sizes, "v": source.shape[dim]} if source.ndim else sizes
    return Rule(ins, (out,), sizes, linear=(frozenset({0}),), local=_local_lookup, **lookup(call))


def lookup(call: Call) -> dict[str, Any]:
    """Fields of a rule for the looked-up factor `v`: if it is sharded, each rank returns zeros for other ranks' rows.

    It may be sharded only where this pays: an all-reduce of the result sends no more than a gather of the source if
    the result has at most half as many elements.
    """
    source, (result,) = call.operands[0], call.outputs
    assert result is not None
    pays = 2 * prod(map(hint, result.shape)) <= prod(map(hint, source.shape)) and source.dtype != torch.bool
    return {"reduce": {"v": "sum"}, "blocked": frozenset("" if pays else "v"), "across": frozenset("v")}


def _local_lookup(call: LocalCall) -> Any:
    dim = call.call["dim"] % call["self"].dim()
    source, index, size = with_a_row(call["self"], dim), call["index"], call.call["self"].shape[dim]
    row, mine = own_rows(index, size, source.shape[dim], call.axes["v"], call.mesh)
    with bounds(index, size, dim):
        found = call.run(self=source, index=row)
    if call.call.name == "index_select":
        mine = mine.reshape([-1 if d == dim else 1 for d in range(found.dim())])
    return torch.where(mine, found, torch.zeros_like(found))


def _beside(dim: int, shapes: list[tuple[Any, ...]]) -> tuple[Dims, dict[str, Any]]:
    """Factors of the dims other than `dim` in which all shapes have the same length, and their sizes."""
    first, *others = shapes
    kept = {k: n for k, n in enumerate(first) if k != dim and all(shape[k] == n for shape in others)}
    return tuple((f"d{k}",) if k in kept else () for k in range(len(first))), {f"d{k}": n for k, n in kept.items()}


@rule_for("scatter", "scatter_add", "scatter_reduce")
def scatter(call: Call) -> Rule:
    """The reverse of gather: dims other than the written one may stay sharded.

    Values that are added may be sharded along the written dim too: each rank adds its own to a partial result.
    """
    target, index = call.operands[:2]
    sums = call.name == "scatter_add" or (call.name == "scatter_reduce" and call["reduce"] == "sum")
    copies = call.name == "scatter" and call.func._overloadname == "src"
    linear = (frozenset({0, 2}),) if sums or copies else ()
    if not target.ndim or any(o.ndim != target.ndim for o in call.operands):
        # As in `gather`.
        return Rule(tuple(((),) * o.ndim for o in call.operands), (((),) * target.ndim,), {}, linear=linear)
    dim = call["dim"] % target.ndim
    one, sizes = _beside(dim, [o.shape for o in call.operands])
    read: Dims = tuple(("i",) if k == dim else d for k, d in enumerate(one))
    joins = sums and (call.name == "scatter_add" or call["include_self"])
    adds = joins and index.shape[dim] == call.operands[2].shape[dim]
    ins = (one, *([read if adds else one] * (len(call.operands) - 1)))
    if not adds:
        return Rule(ins, (one,), sizes, linear=linear)
    sizes = {**sizes, "i": index.shape[dim]}
    return Rule(ins, (one,), sizes, reduce={"i": "sum"}, linear=linear, addends=frozenset({0}))


@rule_for("index_add", "index_copy", "index_fill", "index_reduce")
def index_write(call: Call) -> Rule:
    """Writes rows along one dim; the other dims may stay sharded, and so may the rows if they are added."""
    target, index = call.operands[:2]
    dim = call["dim"] % max(target.ndim, 1)
    one, sizes = _beside(dim, [target.shape])
    adds = call.name == "index_add" and index.ndim == 1 and target.ndim > 0
    read: Dims = tuple(("i",) if adds and k == dim else d for k, d in enumerate(one))
    ins = (
        one,
        (("i",),) if adds else ((),) * index.ndim,
        *(read if o.ndim == target.ndim else ((),) * o.ndim for o in call.operands[2:]),
    )
    linear = (frozenset({0, 2}),) if call.name != "index_reduce" and len(ins) == 3 else ()
    if not adds:
        return Rule(ins, (one,), sizes, linear=linear)
    (sizes["i"],) = index.shape
    return Rule(ins, (one,), sizes, reduce={"i": "sum"}, linear=linear, addends=frozenset({0}))


__all__ = ["index_factors", "lookup"]
