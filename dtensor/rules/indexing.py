"""Embedding, gather and index_select: looking rows up.

The looked-up dimension of an embedding table may be sharded: each rank looks up what falls into its rows and puts zeros
elsewhere, so the result is Partial(sum). The offset of a rank's rows is looked up when the graph runs.
"""

import torch

from ..collectives import chunk_length, ops
from ..mesh import group_name
from .call import Call, LocalCall, rule_for
from .pointwise import broadcast
from .rule import Dims, Rule


def _names(prefix: str, ndim: int) -> Dims:
    return tuple((f"{prefix}{i}",) for i in range(ndim))


@rule_for("embedding")
def embedding(call: Call) -> Rule:
    weight, indices = call.operands
    where = _names("i", indices.ndim)
    sizes = {"v": weight.shape[0], "d": weight.shape[1], **{d[0]: s for d, s in zip(where, indices.shape)}}
    return Rule(
        ((("v",), ("d",)), where),
        ((*where, ("d",)),),
        sizes,
        reduce={"v": "sum"},
        linear=(frozenset({0}),),
        local=_local_embedding,
    )


def first_row(size, axes: tuple[int, ...], mesh, device) -> torch.Tensor:
    """Index, as an int64 tensor of one element, of this rank's first row when `size` rows are cut by `axes` in turn."""
    total = torch.zeros(1, dtype=torch.int64, device=device)
    coordinate = mesh.get_coordinate()
    for axis in axes:
        n = mesh.size(axis)
        step = -(-size // n)
        starts = torch.arange(0, n, device=device) * step
        total = total + ops.shard(starts, 0, group_name(mesh, axis))
        size = chunk_length(size, n, coordinate[axis])
    return total


def _local_embedding(call: LocalCall):
    axes = call.axes.get("v", ())
    if not axes:
        return call.run()
    weight, indices = call["weight"], call["indices"]
    if weight.shape[0] == 0:
        return weight.new_zeros((*indices.shape, weight.shape[1]))
    start = first_row(call.call["weight"].shape[0], axes, call.mesh, indices.device)
    row = indices - start
    mine = (row >= 0) & (row < weight.shape[0])
    found = torch.ops.aten.embedding.default(weight, torch.where(mine, row, torch.zeros_like(row)))
    return torch.where(mine.unsqueeze(-1), found, torch.zeros_like(found))


@rule_for("embedding_dense_backward")
def embedding_backward(call: Call) -> Rule:
    grad, indices = call.operands
    where = _names("i", indices.ndim)
    sizes = {"v": call["num_weights"], "d": grad.shape[-1], **{d[0]: s for d, s in zip(where, indices.shape)}}
    return Rule(
        ((*where, ("d",)), where),
        ((("v",), ("d",)),),
        sizes,
        reduce={d[0]: "sum" for d in where},
        linear=(frozenset({0}),),
        blocked=frozenset({"v"}),
    )


@rule_for("index_select")
def index_select(call: Call) -> Rule:
    source, index = call.operands
    dim = call["dim"] % source.ndim if source.ndim else 0
    (ins,), sizes = broadcast([source.shape], source.shape)
    looked = f"d{dim}"
    out = tuple(("i",) if i == dim else d for i, d in enumerate(ins))
    sizes = {**sizes, "i": index.shape[0] if index.ndim else 1}
    return Rule((ins, (("i",),) * index.ndim), (out,), sizes, linear=(frozenset({0}),), blocked=frozenset({looked}))


@rule_for("gather")
def gather(call: Call) -> Rule:
    """Dimensions other than the looked-up one keep their shard where source and index have the same length."""
    source, index = call.operands
    dim = call["dim"] % max(source.ndim, 1)
    names = [f"d{i}" for i in range(source.ndim)]
    same = [i != dim and s == t for i, (s, t) in enumerate(zip(source.shape, index.shape))]
    one: Dims = tuple((f,) if ok else () for f, ok in zip(names, same))
    sizes = {f: s for f, s, ok in zip(names, source.shape, same) if ok}
    return Rule((one, one), (one,), sizes, linear=(frozenset({0}),))


__all__ = ["first_row"]
