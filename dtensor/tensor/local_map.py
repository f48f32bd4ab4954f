"""`local_map`: applies a function on local tensors to DTensors, with declared placements.

The function may communicate as it likes, so no placement can be derived from it. The placements of its inputs are
checked; those of its outputs and of the gradients of its inputs are trusted. Gradient placements have a default only on
axes where the default cannot be wrong.

It is built on `DTensor`: in eager mode and in a trace it is `to_local`, the function, `from_local`.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from ..errors import ArgumentTypeError, MeshError, PlacementError, shown
from ..layout.chunks import own_length
from ..layout.layout import Layout
from ..layout.placements import Placement, as_placement, as_placements
from ..mesh.tensor_spec import contiguous_stride
from ..torch_private.core import tree_flatten, tree_unflatten
from .tensor import DTensor

Wanted = Sequence[Placement] | None
"""The placements of one tensor; None for a value that is not a DTensor."""


def local_map(
    func: Callable[..., Any] | None = None,
    out_placements: Wanted | tuple[Wanted, ...] = None,
    in_placements: Sequence[Wanted] | None = None,
    in_grad_placements: Sequence[Wanted] | None = None,
    device_mesh: DeviceMesh | None = None,
    *,
    redistribute_inputs: bool = False,
) -> Callable[..., Any]:
    """Turns `func`, which works on this rank's local tensors, into a function of DTensors.

    Without `func` it returns a decorator. If no argument is a DTensor, the returned function just calls `func`.
    Arguments and results may be nested; placements are counted over the flattened values.

    Args:
        func: the function; it may communicate.
        out_placements: the placements of the output, such as `[Shard(0)]`, or a tuple with those of each output. None
            stands for an output that is not a tensor or stays plain. The global length of a sharded dim is that of even
            shards, unless an input dim over the same mesh axes is sharded unevenly; then it is that of the input dim
            that has the output's local length.
        in_placements: for each positional argument the placements that a DTensor must have; None for an argument that
            is not a DTensor. None for the whole argument accepts DTensors in any placements.
        in_grad_placements: for each positional argument the placements of the local gradient, as `func`'s backward
            computes it; None uses the placements of the argument. Required for an argument that needs a gradient where
            this default could be wrong: on an axis over which the argument is Partial, or over which it is replicated
            while another argument or an output is not. If `func` does not communicate, write Replicate() in the first
            case and Partial() in the second.
        device_mesh: the mesh of inputs and outputs; None uses the inputs' mesh.
        redistribute_inputs: redistribute DTensors in other placements to `in_placements` instead of raising.

    Returns:
        A function with the signature of `func` that takes and returns DTensors.

    Raises:
        PlacementError: an input is in other placements, the number of placements is not that of the arguments or
            outputs, the placements of a gradient must be declared, or the global length of an output is ambiguous.
        MeshError: the DTensors are on different meshes, or not on `device_mesh`.
        TypeError: `func` is not callable, a DTensor was given by keyword, or `func` returned a DTensor.

    >>> rows = dtensor.local_map(torch.mm, [Shard(0)], ([Shard(0)], [Replicate()]), (None, [Partial()]))
    >>> rows(x, w)  # each rank multiplies its rows; the gradient of w is a sum over the ranks
    """
    if func is None:
        return functools.partial(
            local_map,
            out_placements=out_placements,
            in_placements=in_placements,
            in_grad_placements=in_grad_placements,
            device_mesh=device_mesh,
            redistribute_inputs=redistribute_inputs,
        )
    if not callable(func):
        raise ArgumentTypeError(f"local_map takes a function; got {shown(func)}, write local_map(f, ...)(x)")
    outs = _per_output(out_placements)

    @functools.wraps(func)
    def mapped(*args: Any, **kwargs: Any) -> Any:
        flat, form = tree_flatten(args)
        given = [a for a in flat if isinstance(a, DTensor)]
        _check_keywords(func, kwargs)
        if not given:
            return func(*args, **kwargs)
        mesh = _mesh(func, given, device_mesh)
        wanted = _per_argument(func, "in_placements", in_placements, flat)
        grads = _per_argument(func, "in_grad_placements", in_grad_placements, flat)
        placed = [
            _placed(func, i, a, wanted[i], in_placements is not None, redistribute_inputs, mesh)
            for i, a in enumerate(flat)
        ]
        _check_gradients(func, placed, grads, outs, mesh)
        local = [_local(a, g) if isinstance(a, DTensor) else a for a, g in zip(placed, grads)]
        made, out_form = tree_flatten(func(*tree_unflatten(local, form), **kwargs))
        if len(made) != len(outs):
            raise PlacementError(
                f"local_map: out_placements holds placements for {len(outs)} outputs, {_name(func)} returned "
                f"{len(made)}; write a tuple with the placements of each, None for one that is not a tensor"
            )
        inputs = [a for a in placed if isinstance(a, DTensor)]
        whole = [_whole(func, i, made[i], outs[i], inputs, mesh) for i in range(len(made))]
        return tree_unflatten(whole, out_form)

    return mapped


def _name(func: Any) -> str:
    return getattr(func, "__name__", type(func).__name__)


def _is_placement(p: Any) -> bool:
    return isinstance(p, Placement) or hasattr(p, "is_partial")


def _per_output(given: Any) -> tuple[tuple[Placement, ...] | None, ...]:
    """Placements of each output: one sequence of placements stands for a single output."""
    if given is None or (isinstance(given, (tuple, list)) and given and all(map(_is_placement, given))):
        given = (given,)
    if not isinstance(given, (tuple, list)) or not all(p is None or isinstance(p, (tuple, list)) for p in given):
        fix = f", write [{given!r}]" if _is_placement(given) else ""
        raise PlacementError(
            "local_map: out_placements is a list of placements such as [Shard(0)], or a tuple with one such list for "
            f"each output; got {shown(given)}{fix}"
        )
    return tuple([None if p is None else tuple(map(as_placement, p)) for p in given])


def _per_argument(
    func: Callable[..., Any], argument: str, given: Sequence[Wanted] | None, flat: list[Any]
) -> Sequence[Wanted]:
    if given is None:
        return [None] * len(flat)
    if not isinstance(given, (tuple, list)) or any(map(_is_placement, given)):
        raise PlacementError(
            f"local_map: {argument} holds placements for each argument, such as ([Shard(0)], None); got {given!r}"
        )
    if len(given) != len(flat):
        raise PlacementError(
            f"local_map: {argument} holds placements for {len(given)} arguments, {_name(func)} was given {len(flat)}; "
            "write one for each positional argument, None for one that is not a DTensor"
        )
    return given


def _check_keywords(func: Callable[..., Any], kwargs: dict[str, Any]) -> None:
    for name, value in kwargs.items():
        if any(isinstance(a, DTensor) for a in tree_flatten(value)[0]):
            raise ArgumentTypeError(
                f"local_map: {_name(func)} was given a DTensor by the keyword {name!r}, but in_placements are for "
                "positional arguments; pass it by position"
            )


def _mesh(func: Callable[..., Any], given: list[DTensor], device_mesh: DeviceMesh | None) -> DeviceMesh:
    mesh = given[0].device_mesh if device_mesh is None else device_mesh
    for x in given:
        if x.device_mesh != mesh:
            raise MeshError(
                f"local_map: {_name(func)} was given a DTensor on {x.device_mesh}, but works on {mesh}; "
                "write x.redistribute(device_mesh, placements) first"
            )
    return mesh


def _placed(
    func: Callable[..., Any], index: int, x: Any, wanted: Wanted, declared: bool, move: bool, mesh: DeviceMesh
) -> Any:
    """An argument in the placements that `in_placements` requires."""
    if not isinstance(x, DTensor):
        if wanted is not None and not isinstance(x, torch.Tensor):
            raise PlacementError(
                f"local_map: in_placements[{index}] is {list(wanted)}, but argument {index} of {_name(func)} is not a "
                f"tensor but {x!r}; write None for it"
            )
        if wanted is not None:
            as_placements(wanted, mesh.ndim, x.dim())
        return x
    if not declared:
        return x
    if wanted is None:
        raise PlacementError(
            f"local_map: in_placements[{index}] is None, but argument {index} of {_name(func)} is a DTensor; "
            f"write the placements it must have, such as {list(x.placements)}"
        )
    target = as_placements(wanted, x.device_mesh.ndim, x.dim())
    if x.placements == target:
        return x
    if not move:
        raise PlacementError(
            f"local_map: argument {index} of {_name(func)} has placements {list(x.placements)}, but in_placements has "
            f"{list(target)}; redistribute it first, or write redistribute_inputs=True"
        )
    return x.redistribute(placements=target)


def _local(x: DTensor, grad: Wanted) -> torch.Tensor:
    return x.to_local() if grad is None else x.to_local(grad_placements=grad)


def _check_gradients(
    func: Callable[..., Any], args: list[Any], grads: Sequence[Wanted], outs: Any, mesh: DeviceMesh
) -> None:
    """Raise if the placements of a gradient depend on what the function computes and were not declared."""
    if not torch.is_grad_enabled():
        return
    for i, x in enumerate(args):
        if grads[i] is not None and not isinstance(x, torch.Tensor):
            raise PlacementError(
                f"local_map: in_grad_placements[{i}] is {grads[i]!r}, but argument {i} of {_name(func)} is not a "
                f"tensor but {x!r}; write None for it"
            )
        if not isinstance(x, DTensor) or not x.requires_grad or grads[i] is not None:
            continue
        for axis, p in enumerate(x.placements):
            others = [a.placements[axis] for j, a in enumerate(args) if j != i and isinstance(a, DTensor)]
            others += [o[axis] for o in outs if o is not None and axis < len(o)]
            if p.is_partial() or (p.is_replicate() and not all(o.is_replicate() for o in others)):
                raise PlacementError(_ask(func, i, x, axis, p))


def _ask(func: Callable[..., Any], index: int, x: DTensor, axis: int, p: Placement) -> str:
    local = "Replicate()" if p.is_partial() else "Partial()"
    why = "is partial" if p.is_partial() else "is replicated, other arguments or outputs are not,"
    example = [local if a == axis else repr(q) for a, q in enumerate(x.placements)]
    return (
        f"local_map: argument {index} of {_name(func)} {why} over mesh axis {axis}, so the placement of its gradient "
        f"there depends on the function; write in_grad_placements with [{', '.join(example)}] for it if the function "
        "does not communicate over that axis, otherwise the placements that its backward produces"
    )


def _whole(func: Callable[..., Any], index: int, x: Any, wanted: Any, inputs: list[DTensor], mesh: DeviceMesh) -> Any:
    """An output of the function as the DTensor it was declared to be."""
    if isinstance(x, DTensor):
        raise ArgumentTypeError(
            f"local_map: output {index} of {_name(func)} is a DTensor, but the function must return local tensors; "
            "return x.to_local()"
        )
    if wanted is None:
        return x
    if not isinstance(x, torch.Tensor):
        raise PlacementError(
            f"local_map: out_placements has {list(wanted)} for output {index} of {_name(func)}, which is not a tensor "
            f"but {x!r}; write None for it"
        )
    try:
        placements = as_placements(wanted, mesh.ndim, x.dim())
    except PlacementError as error:
        raise PlacementError(f"local_map: output {index} of {_name(func)}: {error}") from None
    shape = _global_shape(func, index, x, Layout.of(placements, x.dim()), inputs, mesh)
    if shape is None:
        return DTensor.from_local(x, mesh, placements)
    return DTensor.from_local(x, mesh, placements, shape=shape, stride=contiguous_stride(shape))


def _global_shape(
    func: Callable[..., Any], index: int, x: torch.Tensor, layout: Layout, inputs: list[DTensor], mesh: DeviceMesh
) -> Any:
    """The global shape of an output with a dim that is sharded unevenly, as an input's is; None if all are even."""
    if not any(layout.dims) or mesh.get_coordinate() is None:
        return None
    uneven = {axes: _uneven(inputs, axes, mesh) for axes in layout.dims if axes}
    if not any(uneven.values()):
        return None
    shape = []
    for dim, axes in enumerate(layout.dims):
        lengths = uneven.get(axes) or []
        own = x.shape[dim]
        found = [n for n in lengths if _own(n, axes, mesh) == own]
        if lengths and len(found) != 1:
            raise PlacementError(
                f"local_map: output {index} of {_name(func)} has length {own} in dimension {dim} on this rank, and the "
                f"inputs sharded over the same mesh axes have global lengths {lengths}, so its global length is not "
                "known; pad the inputs to a length that divides, or return it to the caller plain and write "
                "DTensor.from_local(x, mesh, placements, shape=…, stride=…)"
            )
        shape.append(found[0] if lengths else own * _parts(axes, mesh))
    return tuple(shape)


def _parts(axes: tuple[int, ...], mesh: DeviceMesh) -> int:
    return math.prod([mesh.size(axis) for axis in axes])


def _uneven(inputs: list[DTensor], axes: tuple[int, ...], mesh: DeviceMesh) -> list[Any]:
    """The distinct global lengths of input dims sharded over `axes`; empty if all of them divide evenly."""
    found: list[Any] = []
    for x in inputs:
        for size, cut in zip(x.shape, Layout.of(x.placements, x.dim()).dims):
            if cut == axes and size not in found:
                found.append(size)
    parts = _parts(axes, mesh)
    return found if any(n % parts != 0 for n in found) else []


def _own(length: Any, axes: tuple[int, ...], mesh: DeviceMesh) -> Any:
    for axis in axes:
        length = own_length(length, mesh.size(axis), mesh.get_local_rank(axis), "")
    return length


__all__ = ["local_map"]
