"""Runs operators that do not run as one local operator.

These are operators on lists of tensors (foreach), operators written in terms of others, decompositions, in-place views,
and operators whose result depends on values. Importing this module fills `dispatch.KINDS` with a function for each.
"""

from collections.abc import Callable
from typing import Any

import torch

from ..comm.redistribute import redistribute_local
from ..errors import OperatorError, ShardingError, StrictError
from ..layout.layout import Layout
from ..mesh.tensor_spec import Spec
from ..rules import Output, needs_whole, rule_of
from ..torch_private.core import OpOverload, decompositions, is_alias_of, return_and_correct_aliasing
from . import dispatch, strictness
from .decision import (
    COMPOSITES,
    call_of,
    called,
    check_operands,
    decide_by,
    functional_of,
    is_dtensor,
    mapped,
    replicated,
)
from .dispatch import KINDS, run, with_plain_wrapped
from .fallback import fell_back
from .implicit_moves import moves_of, named_operands
from .plain_operands import region_of_torch
from .whole_graph import now


def _foreach(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a foreach operator index by index; an index that holds only plain tensors runs unchanged."""
    names = [a.name for a in func._schema.arguments]
    lists = {n: v for n, v in [*zip(names, args), *kwargs.items()] if isinstance(v, (list, tuple))}
    length = max(len(v) for v in lists.values())
    results = []
    for i in range(length):
        given = [_number(_at(i, a)) if n in NUMBERS else _at(i, a) for n, a in [*zip(names, args), *kwargs.items()]]
        named = dict(zip(kwargs, given[len(args) :]))
        results.append(_one_of_foreach(func, tuple(given[: len(args)]), named))
    if not func._schema.returns or all(r is None for r in results):
        return None
    if isinstance(results[0], tuple):
        return tuple([r[0] for r in rs] for rs in zip(*results))
    return [r[0] for r in results]


NUMBERS = ("lr", "state_steps")
"""Arguments of fused optimizers that hold a number on every rank, in a tensor of any shape and on any mesh."""


def _number(a: Any) -> Any:
    """Turn a plain or replicated tensor of one element into a plain tensor without dims; do so in lists too."""
    if isinstance(a, list):
        return [_number(x) for x in a]
    if is_dtensor(a) and a._spec.layout.is_replicated:
        a = a._local_tensor
    return a.reshape(()) if isinstance(a, torch.Tensor) and not is_dtensor(a) and a.numel() == 1 else a


def _at(i: int, a: Any) -> Any:
    """The list of element `i` of a list; an empty list (an optional argument that is not given) stays empty."""
    return list(a[i : i + 1]) if isinstance(a, (list, tuple)) else a


def _one_of_foreach(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensors: list[Any] = []
    _tensors([args, list(kwargs.values())], tensors)
    if not any(is_dtensor(t) for t in tensors):
        return func(*args, **kwargs)
    if not all(is_dtensor(t) for t in tensors):
        args, kwargs = with_plain_wrapped(func, args, kwargs)
    base = func._schema.name.removeprefix("aten::_foreach_")
    if base.rstrip("_") in FOREACH_COMPOSITES:
        single = [a[0] if isinstance(a, list) else a for a in args]
        return [_blamed(lambda *_: FOREACH_COMPOSITES[base](*single, **kwargs))(func, args, kwargs)]
    operands: list[Spec] = []
    check_operands(func, args, kwargs, operands)
    call = call_of(func, args, kwargs, operands)
    in_place = base.endswith("_")
    make = rule_of(func)
    if (in_place and not call.outputs) or call.outputs == (None,):
        first = operands[0]
        call.outputs, call.many = (Output(first.shape, first.stride, first.dtype),), True
    rule = make(call) if make is not None else replicated(call)
    return run(decide_by(call, rule, in_place).on(operands[0].mesh).traced(), func, args, kwargs)


def _tensors(a: Any, found: list[Any]) -> None:
    if isinstance(a, torch.Tensor):
        found.append(a)
    elif isinstance(a, (list, tuple)):
        for item in a:
            _tensors(item, found)


def _blamed(run: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `run` so that its strict errors name the operator that was called, not only those it runs as."""

    def named(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return run(func, args, kwargs)
        except StrictError as error:
            raise strictness.within(func, named_operands(func, args, kwargs), error) from error

    return named


@_blamed
def _decompose(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with region_of_torch():
        made = decompositions[func](*args, **kwargs)
    return _whole(func, args, kwargs) if made is NotImplemented else made


def _whole(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Gather all operands and run the operator on every rank."""
    operands: list[Spec] = []
    check_operands(func, args, kwargs, operands)
    call = call_of(func, args, kwargs, operands)
    return run(decide_by(call, replicated(call), False).on(operands[0].mesh).traced(), func, args, kwargs)


@_blamed
def _functional(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an in-place operator by its functional overload and copy the result back."""
    return args[0].copy_(functional_of(func)(*args, **kwargs))


@_blamed
def _inplace_view(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator that changes the shape of its tensor, by giving it the local tensor and spec of the view."""
    functional = functional_of(func)
    if functional is None:
        raise OperatorError(f"{func} is not possible on a DTensor; make a new tensor instead")
    x = args[0]
    made = functional(*args, **kwargs)
    x._local_tensor, x._spec = made._local_tensor, made._spec
    if now.recorder is not None:
        now.recorder.becomes(x, made)
    return return_and_correct_aliasing(func, args, kwargs, x)


def _set(x: Any, source: Any = None, *_: Any) -> Any:
    """`set_`, and the operator that a graph records for an assignment to `data`: of a tensor to itself, as a conversion
    of a module to the dtype that it has.

    Raises:
        ShardingError: the memory is another one.
    """
    if is_dtensor(source) and source._spec == x._spec and _is_same(x._local_tensor, source._local_tensor):
        return x
    raise ShardingError(
        f"a DTensor of shape {list(x.shape)} cannot take the memory of another tensor by set_, or by an assignment to "
        "its data in a compiled function; write x.data = y outside of compiled code, or x.copy_(y)"
    )


def _is_same(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether two tensors of one shape and one order of elements are the same memory."""
    return is_alias_of(x, y) and x.storage_offset() == y.storage_offset()


@_blamed
def _implicit(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An operator that torch itself writes in terms of others; it gets here only from within a decomposition."""
    with region_of_torch():
        return func.decompose(*args, **kwargs)


def _dynamic(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator whose result, or its shape, depends on values: on gathered operands, with replicated results."""
    operands: list[Spec] = []
    check_operands(func, args, kwargs, operands)
    mesh = operands[0].mesh
    targets = [Layout.make(mesh.ndim, ((),) * spec.ndim, ()) for spec in operands]
    moves = moves_of(named_operands(func, args, kwargs), targets)
    if strictness.active():
        strictness.check_moves(func, moves)
    if moves and not needs_whole(func):
        fell_back(func)
    supply = iter(targets)

    def whole(x: Any) -> Any:
        return redistribute_local(x._local_tensor, x._spec, next(supply))

    def wrapped(t: Any) -> Any:
        if not isinstance(t, torch.Tensor):
            return t
        layout = Layout.make(mesh.ndim, ((),) * t.dim(), ())
        return dispatch.wrap(t, Spec.make(mesh, layout, t.shape, t.stride(), t.dtype))

    made = called(func)(*mapped(args, whole), **{k: mapped(v, whole) for k, v in kwargs.items()})
    return type(made)(map(wrapped, made)) if isinstance(made, (list, tuple)) else wrapped(made)


@_blamed
def _composite(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return COMPOSITES[func._schema.name](*args, **kwargs)


def vector_norm(
    x: Any, ord: int = 2, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Any:
    """`linalg_vector_norm` in terms of operators that have rules, so that only the reduced value is communicated.

    As in torch, the norm of complex numbers is that of their absolute values, and float16 and bfloat16 are accumulated
    in float32.
    """
    x = x.to(dtype) if dtype is not None else x
    x = x.abs() if x.is_complex() else x
    if x.dtype in (torch.float16, torch.bfloat16):
        return vector_norm(x.float(), ord, dim, keepdim).to(x.dtype)
    over = list(range(x.dim())) if dim is None else dim
    if ord == float("inf"):
        return x.abs().amax(over, keepdim)
    if ord == float("-inf"):
        return x.abs().amin(over, keepdim)
    if ord == 0:
        return (x != 0).to(x.dtype).sum(over, keepdim)
    if ord == 2:
        return (x * x).sum(over, keepdim).sqrt()
    return x.abs().pow(ord).sum(over, keepdim).pow(1 / ord)


def _size(x: Any) -> list[int]:
    """The sizes as ints, for torch kernels that do not support symbols; it specializes the trace to these sizes."""
    return [int(n) for n in x.shape]


COMPOSITES["aten::size"] = _size
COMPOSITES["aten::linalg_vector_norm"] = vector_norm
COMPOSITES["aten::set"] = COMPOSITES["aten::shallow_copy_data_"] = _set  # the latter since torch 2.15
FOREACH_COMPOSITES: dict[str, Callable[..., Any]] = {"norm": vector_norm}

KINDS.update(
    foreach=_foreach,
    composite=_composite,
    decompose=_decompose,
    implicit=_implicit,
    dynamic=_dynamic,
    functional=_functional,
    inplace_view=_inplace_view,
)

__all__ = ["vector_norm"]
