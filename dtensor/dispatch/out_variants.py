"""Runs `out=` variants: operators that write their results to tensors passed by the caller.

The overload that returns a new tensor computes the result, which is redistributed to the layout of the tensor passed as
`out=` and copied into it. An empty tensor, plain or DTensor, takes on the result instead: torch's own operators pass
empty tensors for results that are not read. Importing this module registers it in `dispatch.KINDS`.
"""

from typing import Any

import torch

from ..comm.redistribute import redistribute_local
from ..errors import MixedTensorError, OperatorError
from ..layout.layout import Layout
from ..mesh.tensor_spec import Spec
from ..torch_private.core import OpOverload, return_and_correct_aliasing
from . import dispatch
from .decision import check_operands, functional_of, is_dtensor, mapped
from .dispatch import KINDS


def _out(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run `func` and return the tensors passed as `out=`.

    Raises:
        MixedTensorError: `out=` is a plain tensor with elements.
        OperatorError: `out=` has elements, but not as many as the result, or is a view of another shape.
    """
    targets = {a.name: kwargs[a.name] for a in func._schema.arguments if a.is_out}
    rest = {k: v for k, v in kwargs.items() if k not in targets}
    functional = functional_of(func)
    made = functional(*args, **rest) if functional is not None else _on_whole(func, args, rest, targets)
    one = len(targets) == 1
    for (name, target), result in zip(targets.items(), (made,) if one else made):
        for given, value in zip(target, result) if isinstance(target, (list, tuple)) else ((target, result),):
            put(func, name, given, value)
    if not func._schema.returns:
        return None
    return next(iter(targets.values())) if one else tuple(targets.values())


def put(func: OpOverload, name: str, given: torch.Tensor, value: Any) -> None:
    """Write `value`, a result of `func`, to `given`, which was passed as its argument `name`."""
    if not is_dtensor(value):
        given.copy_(value)
    elif not is_dtensor(given):
        if given.numel():
            raise MixedTensorError(
                f"{func}: argument '{name}' is a plain tensor of shape {list(given.shape)}, the result is a DTensor; "
                "give a DTensor to write to"
            )
        whole = value.full_tensor()
        given.resize_(whole.shape).copy_(whole)
    elif given.shape == value.shape:
        given.copy_(value)
    elif given._is_view():
        raise OperatorError(
            f"{func}: {name}= is a view of shape {list(given.shape)}, the result has shape {list(value.shape)}, and a "
            f"view of a DTensor does not change its size; write {name}=view.new_empty(0), or leave it out"
        )
    elif given.numel() in (0, value.numel()):
        _become(given, value)
    else:
        raise OperatorError(
            f"{func}: {name}= has shape {list(given.shape)}, the result {list(value.shape)}; "
            f"write {name}=torch.empty_like(...) of a DTensor of that shape, or leave it out"
        )


def _become(x: Any, value: Any) -> None:
    """Give the DTensor `x` the shape, layout and values of `value`."""
    value = value.to(x.dtype).contiguous()
    x._local_tensor, x._spec = value._local_tensor, value._spec
    return_and_correct_aliasing(torch.ops.aten.resize_.default, (x, list(value.shape)), {}, x)


def _on_whole(func: OpOverload, args: tuple[Any, ...], rest: dict[str, Any], targets: dict[str, Any]) -> Any:
    """Run an operator that has no functional overload on gathered tensors; return one result or a list."""
    operands: list[Spec] = []
    check_operands(func, args, rest | targets, operands)
    mesh = operands[0].mesh

    def whole(x: Any) -> Any:
        return redistribute_local(x._local_tensor, x._spec, Layout.make(mesh.ndim, ((),) * x._spec.ndim, ())).clone()

    def wrapped(x: torch.Tensor) -> Any:
        layout = Layout.make(mesh.ndim, ((),) * x.dim(), ())
        return dispatch.wrap(x, Spec.make(mesh, layout, x.shape, x.stride(), x.dtype))

    outs: dict[str, Any] = {name: mapped(t, whole) for name, t in targets.items()}
    func(*mapped(args, whole), **{k: mapped(v, whole) for k, v in rest.items()}, **outs)
    results = [wrapped(x) for x in outs.values()]
    return results if len(results) > 1 else results[0]


KINDS["out"] = _out

__all__ = ["put"]
