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
    row = indices - (start if indices.dim() else start.squeeze(0))
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
        blocked=frozenset({"v"} | ({d[0] for d in where} if call["scale_grad_by_freq"] else set())),
    )


@rule_for("index_select")
def index_select(call: Call) -> Rule:
    source, index = call.operands
    dim = call["dim"] % source.ndim if source.ndim else 0
    (ins,), sizes = broadcast([source.shape], source.shape)
    looked = f"d{dim}"
    found = ("i",) if index.ndim else ()
    out = tuple(found if i == dim else d for i, d in enumerate(ins))
    sizes = {**sizes, **dict(zip(found, index.shape))}
    return Rule((ins, (found,) * index.ndim), (out,), sizes, linear=(frozenset({0}),), blocked=frozenset({looked}))


@rule_for("gather")
def gather(call: Call) -> Rule:
    """Dimensions other than the looked-up one keep their shard where source and index have the same length."""
    source, index = call.operands
    dim = call["dim"] % max(source.ndim, 1)
    one, sizes = _beside(dim, [source.shape, index.shape])
    found: Dims = tuple(("i",) if k == dim else d for k, d in enumerate(one))
    sizes = {**sizes, **({"i": index.shape[dim]} if index.ndim else {})}
    return Rule((one, found), (found,), sizes, linear=(frozenset({0}),))


def _beside(dim: int, shapes: list[tuple]) -> tuple[Dims, dict]:
    """Factors of the dimensions other than `dim` in which all shapes have one length, and their sizes."""
    lengths = list(zip(*shapes))
    kept = {k: s[0] for k, s in enumerate(lengths) if k != dim and all(t == s[0] for t in s)}
    return tuple((f"d{k}",) if k in kept else () for k in range(len(lengths))), {f"d{k}": s for k, s in kept.items()}


@rule_for("scatter", "scatter_add", "scatter_reduce")
def scatter(call: Call) -> Rule:
    """As gather, the other way round: dimensions other than the written one keep their shard."""
    target = call.operands[0]
    dim = call["dim"] % max(target.ndim, 1)
    one, sizes = _beside(dim, [o.shape for o in call.operands])
    ins = tuple(one if o.ndim == target.ndim else ((),) * o.ndim for o in call.operands)
    name, overload = call.func._schema.name.rstrip("_"), call.func._overloadname
    linear = len(ins) == 3 and (name == "aten::scatter_add" or (name == "aten::scatter" and overload == "src"))
    return Rule(ins, (one,), sizes, linear=(frozenset({0, 2}),) if linear else ())


@rule_for("index_add", "index_copy", "index_fill")
def index_write(call: Call) -> Rule:
    """Rows of one dimension are written; the others keep their shard."""
    target = call.operands[0]
    dim = call["dim"] % max(target.ndim, 1)
    one, sizes = _beside(dim, [target.shape])
    ins = tuple(one if i != 1 and o.ndim == target.ndim else ((),) * o.ndim for i, o in enumerate(call.operands))
    linear = call.func._schema.name.rstrip("_") != "aten::index_fill" and len(ins) == 3
    return Rule(ins, (one,), sizes, linear=(frozenset({0, 2}),) if linear else ())


__all__ = ["first_row"]
