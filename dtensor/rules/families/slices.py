"""Parts of a tensor: select, slice, split, diagonal, windows, and the operators that put a part back.

A dim of which a part is taken may not be sharded; all other dims may stay sharded.
"""

from functools import partial
from itertools import count
from typing import Any

import torch

from ...errors import OperatorError
from ...torch_private.symbolic_sizes import same_size
from ..bind import rule_for
from ..call import Call, LocalCall
from ..notation import LETTERS, Rule, library_rule
from .views import follow


@rule_for("select", "unbind")
def select(call: Call) -> Rule:
    """All dims but the one that is selected from may be sharded."""
    ndim = call["self"].ndim
    gone = call["dim"] % ndim
    return follow(call, [i for i in range(ndim) if i != gone])


CUTS = (
    "slice",
    "narrow",
    "split",
    "split_with_sizes",
    "chunk",
    "tensor_split",
    "unsafe_split",
    "unsafe_split_with_sizes",
)


@rule_for(*CUTS)
def cut(call: Call) -> Rule:
    """The sliced dim may not be sharded, unless the slice is the entire dim."""
    shape = call["self"].shape
    order: list[int | None] = list(range(len(shape)))
    dim = call["dim"] % len(shape)
    if call.has("end"):
        (out,) = call.outputs
        if out is not None and same_size(out.shape[dim], shape[dim]):
            return follow(call, order)
    order[dim] = None
    return follow(call, order)


@rule_for("diagonal")
def diagonal(call: Call) -> Rule:
    """All dims but the two of the diagonal may be sharded; the result has it as its last."""
    ndim = call["self"].ndim
    gone = (call["dim1"] % ndim, call["dim2"] % ndim)
    return follow(call, [*(i for i in range(ndim) if i not in gone), None])


@rule_for("trace")
def trace(call: Call) -> Rule:
    """No dim may be sharded."""
    return follow(call, [])


@rule_for("diag_embed")
def diag_embed(call: Call) -> Rule:
    """All dims but the last, which becomes the diagonal of two new ones, may be sharded."""
    (out,) = call.outputs
    assert out is not None
    new = (call["dim1"] % out.ndim, call["dim2"] % out.ndim)
    rest = count()
    return follow(call, [None if i in new else next(rest) for i in range(out.ndim)])


@rule_for("unfold")
def unfold(call: Call) -> Rule:
    """All dims but the one that is unfolded may be sharded; the result has a new last one."""
    ndim = call["self"].ndim
    over = call["dimension"] % max(ndim, 1)
    return follow(call, [*(None if i == over else i for i in range(ndim)), None])


def _part(call: Call, shape: tuple[Any, ...]) -> tuple[str, str]:
    """The terms of a tensor of `shape` of which only a part is written, and of that part."""
    name, ndim = call.name.rpartition("_")[0], len(shape)
    over = {call[dim] % ndim for dim in (("dim1", "dim2") if name == "diagonal" else ("dim",))}
    if name == "slice" and same_size(call.operands[-1].shape[min(over)], shape[min(over)]):
        over = set[int]()
    full = "".join(["1" if i in over else f for i, f in enumerate(LETTERS[:ndim])])
    rest = full.replace("1", "")
    return full, {"unfold": f"{full}1", "diagonal": f"{rest}1", "select": rest}.get(name, full)


@rule_for("slice_backward", "select_backward", "diagonal_backward", "unfold_backward")
def put_back(call: Call) -> Rule:
    """The gradient of taking a part: zeros, except for the part that was taken."""
    (out,) = call.outputs
    assert out is not None
    if not out.ndim:
        return Rule("*->", linear=0)
    full, part = _part(call, out.shape)
    return library_rule(f"{part}->{full}", linear=0, shape_arg="input_sizes")


@rule_for("slice_scatter", "select_scatter", "diagonal_scatter")
def put_into(call: Call) -> Rule:
    """A copy of a tensor with a part of it replaced."""
    full, part = _part(call, call["self"].shape)
    return Rule(f"{full},{part}->{full}", linear=((0, 1),))


@rule_for("as_strided", "as_strided_scatter")
def as_strided(call: Call) -> Rule:
    """Strides do not relate to dims, so everything is replicated.

    The exception is a result with the tensor's own sizes and strides, up to dims of length 1: autograd requests it
    around a write to a view, and the tensor may stay sharded. Otherwise strides refer to memory, and a gathered tensor
    has memory of its own.

    Raises:
        OperatorError: the tensor is sharded and not contiguous.
    """
    given = call["self"]
    kept = _as_it_lies(call)
    if kept is not None:
        full = ["1" if n == 1 else f for n, f in zip(given.shape, LETTERS)]
        out = ["1" if dim is None else full[dim] for dim in kept]
        return library_rule(f"{''.join(full)}->{''.join(out)}", linear=0, local=partial(_with_ones, kept))
    if given.static and given.unusual_stride is not None and not given.layout.is_replicated and _has_gaps(given):
        raise OperatorError(
            f"{call.func} of a tensor of shape {list(given.shape)} and strides {list(given.stride)}, sharded as "
            f"{given.layout}: strides refer to the global tensor's memory, which no rank holds; write "
            "x.contiguous().as_strided(…), or select, slice, transpose or unfold it"
        )
    outer = _outermost(call)
    if outer:
        there = {place: dim for dim, place in outer.items()}
        full = "".join([LETTERS[dim] if dim in outer else "1" for dim in range(given.ndim)])
        out = "".join([LETTERS[there[place]] if place in there else "1" for place in range(len(call["size"]))])
        local = partial(_strided, outer, call["size"], call["stride"])
        return library_rule(f"{full}->{out}", linear=0, local=local)
    return Rule("*->*", linear=0) if call.name == "as_strided" else Rule("*,*->*", linear=((0, 1),))


def _by_memory(given: Any) -> list[int]:
    """The dims of a tensor that are longer than 1, outermost in memory first."""
    return sorted([d for d, n in enumerate(given.shape) if n != 1], key=lambda d: -given.stride[d])


def _has_gaps(given: Any) -> bool:
    inner = 1
    for dim in reversed(_by_memory(given)):
        if given.stride[dim] != inner and 0 not in given.shape:
            return True
        inner *= given.shape[dim]
    return False


def _outermost(call: Call) -> dict[int, int]:
    """Outermost dims in memory that an as_strided result has, too, while all others stay within one step of them."""
    given = call["self"]
    if call.name != "as_strided" or not given.static or call["storage_offset"] not in (None, 0) or 0 in given.shape:
        return {}
    asked = list(zip(call["size"], call["stride"]))
    if not all(isinstance(n, int) for pair in asked for n in pair) or _has_gaps(given):
        return {}
    found, left = dict[int, int](), list(range(len(asked)))
    for dim in _by_memory(given):
        place = next((k for k in left if asked[k] == (given.shape[dim], given.stride[dim])), None)
        rest = [asked[k] for k in left if k != place]
        if place is None or sum((n - 1) * step for n, step in rest) >= given.stride[dim]:
            break
        found[dim] = place
        left.remove(place)
    return found


def _strided(outer: dict[int, int], size: Any, stride: Any, call: LocalCall) -> torch.Tensor:
    x, size, stride = call["self"], list(size), list(stride)
    for dim, place in outer.items():
        size[place], stride[place] = x.shape[dim], x.stride(dim)
    return x.as_strided(size, stride)


def _as_it_lies(call: Call) -> tuple[int | None, ...] | None:
    """For each dim of an as_strided result the tensor's dim that it equals, or None for a new dim of length 1.

    None as a whole if the result differs from the tensor by more than dims of length 1.
    """
    given = call["self"]
    if call.name != "as_strided" or not given.static or call["storage_offset"] not in (None, 0):
        return None
    asked = list(zip(call["size"], call["stride"]))
    if not all(isinstance(n, int) for pair in asked for n in pair) or 0 in given.shape:
        return None
    there = [dim for dim, n in enumerate(given.shape) if n != 1]
    if [pair for pair in asked if pair[0] != 1] != [(given.shape[dim], given.stride[dim]) for dim in there]:
        return None
    left = iter(there)
    return tuple(None if n == 1 else next(left) for n, _ in asked)


def _with_ones(kept: tuple[int | None, ...], call: LocalCall) -> torch.Tensor:
    x = call["self"]
    gone = [dim for dim in range(x.dim()) if dim not in kept]
    if not gone and None not in kept:
        return torch.ops.aten.alias.default(x)
    x = x.squeeze(gone)
    for place, dim in enumerate(kept):
        x = x.unsqueeze(place) if dim is None else x
    return x


__all__ = ["CUTS"]
