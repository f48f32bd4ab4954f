"""Runs one operator on DTensors.

    operator call -> key -> decision (cached) -> redistribute operands -> local operator -> wrap

`DTensor.__torch_dispatch__` calls `dispatch`. A decision holds everything that follows from the operator, its plain
arguments and the operands' specs. Where all sizes are ints it is cached, so the hot path is one dictionary lookup.
"""

import functools
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, strided

from ..comm.redistribute import redistribute_local
from ..errors import MixedTensorError
from ..layout.layout import Layout
from ..mesh import provenance
from ..mesh.caches import cache
from ..mesh.provenance import note_inside
from ..mesh.tensor_spec import Spec
from ..rules.call import BY_VALUE, RULES, base_name, is_in_place, replaced
from ..torch_private.core import (
    OWN_KEYSET,
    OpOverload,
    disable_proxy_modes_tracing,
    last_traced_node,
    make_wrapper_subclass,
)
from ..torch_private.symbolic_sizes import is_traced
from . import strictness, view_copies
from .decision import FOREACH, Decision, check_operands, decide, has_out, mapped
from .global_view import may_be_written
from .plain_operands import mark_alike, mark_local
from .prepared import Prepared
from .view_copies import copies, freshen, remember, wrote
from .whole_graph import OperatorLayouts, now, once, place, written

MOST_DECISIONS = 1 << 16
"""Maximum number of cached decisions; one more clears the cache."""

STAND_IN, SYMBOLIC, PLAIN = 1, 2, 4
"""Bits that `_walk` reports: a DTensor on a stand-in for its mesh, which results then get too; a symbolic size; a plain
tensor. The last two keep a decision from being looked up."""

ATOMS = frozenset((int, bool, str, complex, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format))
"""Argument types that hold no tensor and enter a key unchanged."""

_cache: dict[tuple[Any, ...], Prepared] = cache()

KINDS: dict[str, Callable[..., Any]] = {}
"""Kind of a decision -> the function that runs the call; `multi_step` and `out_variants` fill it."""

wrap: Callable[[torch.Tensor, Spec], torch.Tensor]
"""Makes a DTensor from a local tensor and a spec; `dtensor.tensor.tensor` sets it."""
DTensorType: type
"""The DTensor class; `dtensor.tensor.tensor` sets it."""


def install(cls: type, make: Callable[[torch.Tensor, Spec], torch.Tensor]) -> None:
    """Set the DTensor class and the function that builds it from a local tensor and a spec."""
    global wrap, DTensorType
    DTensorType, wrap = cls, make
    view_copies.install(make)


DEVICE = 7
"""Where the device stands among the arguments that `wrapper_of` makes."""


def wrapper_of(spec: Spec, device: torch.device) -> tuple[Any, ...]:
    """What makes the outside of a DTensor: arguments of `make_wrapper_subclass`, the one at DEVICE its device."""
    usual = (False, False, None, False, False, OWN_KEYSET)
    return DTensorType, spec.shape, spec.unusual_stride, None, None, spec.dtype, strided, device, *usual


def dispatch(func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
    """Run `func` on arguments of which at least one is a DTensor; this is `DTensor.__torch_dispatch__`.

    Returns:
        What `func` returns, with DTensors in place of tensors.

    Raises:
        MixedTensorError: a plain tensor that may differ between ranks is among the arguments.
        MeshError: the DTensors live on different meshes.
        OperatorError: an in-place operator would have to change the layout of its tensor.
        StrictError: under `strict()` an operand would be redistributed by a collective.
    """
    # The quick path: the key as `_look_up` would make it. A spec on a stand-in for its mesh, or with symbolic sizes, is
    # in no key, so such a call is not found. What most operators take, one tensor or two, needs no lists.
    unusual = 0
    n = len(args)
    if n == 1 and not kwargs and type(x := args[0]) is DTensorType:
        key: tuple[Any, ...] = (id(func), x._spec)
        local: Any = (x._local_tensor,)
    elif n == 2 and not kwargs and type(x := args[0]) is DTensorType and type(y := args[1]) is DTensorType:
        key = (id(func), x._spec, y._spec)
        local = (x._local_tensor, y._local_tensor)
    else:
        parts: list[Any] = [id(func)]
        local = []
        for a in args:
            kind = type(a)
            if kind is DTensorType:
                parts.append(a._spec)
                local.append(a._local_tensor)
            elif kind is int:
                parts.append(a)
                local.append(a)
            elif kind in ATOMS:
                parts.append(kind)
                parts.append(a)
                local.append(a)
            elif kind is list:
                parts.append(list)
                parts.append(len(a))
                local.append(inner := [])
                unusual |= _walk(a, func, parts, inner)
            else:
                unusual |= _walk((a,), func, parts, local)
        if kwargs:
            for name, a in kwargs.items():
                kind = type(a)
                parts.append(name)
                if kind in ATOMS and kind is not int:
                    parts.append(kind)
                    parts.append(a)
                else:
                    unusual |= _walk((a,), func, parts, [])
        key = tuple(parts)
    prepared = None if unusual or provenance.looked_up else _cache.get(key)
    if prepared is None:
        return _look_up(func, args, kwargs or {})
    spec = prepared.spec
    if spec is None:
        return _carry_out(prepared, args, kwargs or {}, list(local))
    if copies:
        freshen((), func, args, kwargs or {})
    made = prepared.call(*local, **kwargs) if kwargs else prepared.call(*local)
    wrapper = prepared.wrapper  # as `wrap`, without its frame
    if (device := made.device) != wrapper[DEVICE]:
        prepared.wrapper = wrapper = wrapper_of(spec, device)
    out = make_wrapper_subclass(*wrapper)
    out._local_tensor = made
    out._spec = spec
    out.device_mesh = spec.mesh
    if type(made) is not Tensor:
        mark_local(out, func, args, kwargs or {})
    return out


def _carry_out(prepared: Prepared, args: tuple[Any, ...], kwargs: dict[str, Any], local: list[Any]) -> Any:
    """Run a call on its local arguments, of which those that move and those that are fixed are replaced here."""
    decision, func = prepared.decision, prepared.func
    if not prepared.is_whole:
        out = run(decision, func, args, kwargs)
        mark_local(out, func, args, kwargs)
        return out
    if copies:
        freshen(decision.written, func, args, kwargs)
    if prepared.moves:
        if strictness.active():
            strictness.check(decision, func, args, kwargs)
        for at, redistribution in prepared.moves:
            held = local
            for i in at[:-1]:
                held = held[i]
            held[at[-1]] = redistribution(held[at[-1]], once(func) if provenance.looked_up else None)
    for i, value in prepared.fixed:
        local[i : i + 1] = (value,)
    made = prepared.call(*local, **kwargs) if prepared.local is None else prepared.local(func, tuple(local), kwargs)
    out = _results(decision, made, args)
    if prepared.is_view:
        remember(func, args, kwargs, out, moved=bool(decision.moves), taken_apart=False)
    elif decision.written:
        _wrote(decision, args, kwargs)
    if type(made[0] if decision.many else made) is not Tensor:
        mark_local(out, func, args, kwargs)
    return out


def _results(decision: Decision, made: Any, args: tuple[Any, ...]) -> Any:
    """What the operator returns, of what its call on local tensors made."""
    if decision.returns_self:
        return args[0]
    if decision.homes:
        made = _homed(made, decision)
    if decision.many:
        wrapped = [r if s is None else wrap(r, s) for r, s in zip(made, decision.outputs)]
        return wrapped if isinstance(made, list) else tuple(wrapped)
    spec = decision.outputs[0] if decision.outputs else None
    return made if spec is None else wrap(made, spec)


def _look_up(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a call that is not known yet, is traced, or has plain tensors or symbolic sizes among its arguments."""
    before = last_traced_node() if provenance.keeps else None
    parts: list[Any] = [id(func)]
    local: list[Any] = []
    found = _walk(args, func, parts, local)
    for name, a in kwargs.items():
        parts.append(name)
        found |= _walk((a,), func, parts, [])
    if found > STAND_IN:
        out = _uncached(found, func, args, kwargs)
        mark_local(out, func, args, kwargs)
    else:
        layouts = _layouts_of(func, args, kwargs)
        key = tuple(parts) if layouts is None else (*parts, layouts)
        by_default = (*key, torch.get_default_dtype())
        prepared = _cache.get(key) or _cache.get(by_default)
        if prepared is None:
            if len(_cache) >= MOST_DECISIONS:
                _cache.clear()
            prepared = Prepared(decide(func, args, kwargs, layouts), func, args, kwargs)
            _cache[by_default if _has_default_dtype(prepared.decision, parts) else key] = prepared
        _take(func, prepared.decision)
        if now.recorder is not None:
            return now.recorder.run(prepared.decision.on(mesh_of((args, kwargs))), func, args, kwargs)
        if found:
            out = run(prepared.decision.on(mesh_of((args, kwargs))), func, args, kwargs)
            mark_local(out, func, args, kwargs)
        else:
            out = _carry_out(prepared, args, kwargs, local)
    if before is not None:
        note_inside(before)
    return out


def _uncached(found: int, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a call that has plain tensors among its arguments, or sizes that no key can hold."""
    if not found & PLAIN:
        layouts = _layouts_of(func, args, kwargs)
        with disable_proxy_modes_tracing():  # keep the arithmetic on sizes out of the graph
            decision = decide(func, args, kwargs, layouts).on(mesh_of((args, kwargs)))
        _take(func, decision)
        return run(decision.traced(), func, args, kwargs)
    if func._schema.name.startswith(FOREACH):
        return KINDS["foreach"](func, args, kwargs)
    if has_out(func):
        return KINDS["out"](func, args, kwargs)
    out = dispatch(func, (), *with_plain_wrapped(func, args, kwargs))
    if is_in_place(func) and not isinstance(args[0], DTensorType):
        mark_alike(args[0], written=True)
        return args[0]
    return out


def _layouts_of(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OperatorLayouts | None:
    """The layouts decided for a call, if this thread follows decisions and it is in them."""
    following = place()
    return None if following is None else following.find(func, (args, kwargs), mesh_of((args, kwargs)))


def _take(func: OpOverload, decision: Decision) -> None:
    """Tell what this thread follows, if anything, that a call was decided; others take it apart into further calls."""
    following = None if decision.kind else place()
    if following is not None:
        following.take(func)


def _has_default_dtype(decision: Decision, parts: Iterable[Any]) -> bool:
    """Whether a result may be of torch's default dtype: a floating-point one that neither an operand has nor the call
    names. Few calls are such, so the default is part of their keys only."""
    given = [part.dtype if isinstance(part, Spec) else part for part in parts if isinstance(part, (Spec, torch.dtype))]
    made = any(s is not None and (s.dtype.is_floating_point or s.dtype.is_complex) for s in decision.outputs)
    return made and not any(dtype.is_floating_point or dtype.is_complex for dtype in given)


def mesh_of(given: Any) -> Any:
    """The mesh of the first DTensor among the arguments, or its stand-in; None without DTensors."""
    if isinstance(given, DTensorType):
        return given._spec.mesh
    items = given.values() if isinstance(given, dict) else given if isinstance(given, (list, tuple)) else ()
    return next((mesh for item in items if (mesh := mesh_of(item)) is not None), None)


def forget() -> None:
    """Drop all cached decisions; called when the rule of an operator changes."""
    _cache.clear()
    _reads_floats.cache_clear()


@functools.cache
def _reads_floats(func: OpOverload) -> bool:
    """Whether a decision about `func` is for the very floats of its call.

    So it is for operators that torch does not have, as the shape of their results may depend on floats, and for those
    whose rule, or rule by a user, does.
    """
    return func.namespace not in ("aten", "prims") or str(func) in RULES or base_name(func) in BY_VALUE


def _walk(items: Iterable[Any], func: OpOverload, parts: list[Any], local: list[Any]) -> int:
    """Append to `parts` the key parts of the arguments of `func`, and to `local` the arguments of the local operator.

    Returns:
        The bits of what was found: STAND_IN, SYMBOLIC, PLAIN.
    """
    found = 0
    for a in items:
        kind = type(a)
        if kind is DTensorType:
            spec = a._spec
            local.append(a._local_tensor)
            if spec.real is None:
                parts.append(spec)
            else:
                parts.append(spec.real)
                found |= STAND_IN
            if not spec.static:
                found |= SYMBOLIC
        elif kind is int:
            parts.append(a)
            local.append(a)
        elif kind in ATOMS:
            parts.append(kind)
            parts.append(a)
            local.append(a)
        elif kind is float:
            # Most decisions depend only on whether a float is zero; optimizers pass a new value in every step.
            parts += (kind, a if _reads_floats(func) else a == 0)
            local.append(a)
        elif kind is list or isinstance(a, (list, tuple)):
            parts.append(kind)
            parts.append(len(a))
            inner: list[Any] = []
            found |= _walk(a, func, parts, inner)
            local.append(inner)
        else:
            found |= _other(a, parts, local)
    return found


def _other(a: Any, parts: list[Any], local: list[Any]) -> int:
    """As `_walk`, for one argument of a less common type."""
    parts.append(type(a))
    if isinstance(a, DTensorType):
        spec = a._spec
        parts.append(spec.real or spec)
        local.append(a._local_tensor)
        return (0 if spec.real is None else STAND_IN) | (0 if spec.static else SYMBOLIC)
    local.append(a)
    if isinstance(a, torch.Tensor):
        return PLAIN
    if isinstance(a, (torch.SymInt, torch.SymFloat, torch.SymBool, torch.Generator)):
        return SYMBOLIC
    parts.append(a)
    return 0


def with_plain_wrapped(
    func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the call's arguments with each plain tensor wrapped as a replicated DTensor.

    Raises:
        MixedTensorError: a plain tensor may differ between ranks, or would be written to.
    """
    operands: list[Spec] = []
    check_operands(func, args, kwargs, operands)
    mesh = operands[0].mesh
    first = args[0][0] if isinstance(args[0], (list, tuple)) else args[0]
    if is_in_place(func) and not isinstance(first, DTensorType) and not may_be_written(first):
        raise MixedTensorError(
            f"{func} would write a DTensor into a plain tensor; write x.full_tensor() to read it, and in an "
            "adapter put it on the model before that is sharded"
        )

    def replicated(a: Any) -> Any:
        if isinstance(a, (list, tuple)):
            return [replicated(item) for item in a]
        if isinstance(a, torch.Tensor) and not isinstance(a, DTensorType):
            layout = Layout.make(mesh.ndim, ((),) * a.dim(), ())
            return wrap(a, Spec.make(mesh, layout, a.shape, a.stride(), a.dtype))
        return a

    return tuple(map(replicated, args)), {k: replicated(a) for k, a in kwargs.items()}


def run(decision: Decision, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Carry out a decision of any kind, and keep track of views and writes."""
    if copies:
        freshen(decision.written, func, args, kwargs)
    out = _run(decision, func, args, kwargs)
    if func.is_view:
        remember(func, args, kwargs, out, moved=bool(decision.moves), taken_apart=bool(decision.kind))
    elif decision.written:
        _wrote(decision, args, kwargs)
    return out


def _wrote(decision: Decision, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Keep track of the writes of a call that has run."""
    if copies or is_traced():
        wrote(decision.written, args, kwargs)
    if provenance.looked_up:
        written()


def _run(decision: Decision, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if decision.kind:
        return KINDS[decision.kind](func, args, kwargs)
    if decision.writes:
        return _run_and_write_back(decision, func, args, kwargs)
    if decision.moves and strictness.active():
        strictness.check(decision, func, args, kwargs)
    moves = iter(decision.moves)

    def localized(x: Any) -> torch.Tensor:
        target = next(moves, None)
        if target is None:
            return x._local_tensor
        return redistribute_local(x._local_tensor, x._spec, target, once=once(func))

    local_args = [mapped(a, localized) for a in args]
    local_kwargs = {k: mapped(a, localized) for k, a in kwargs.items()}
    if decision.replace:
        changed, local_kwargs = replaced(func, local_args, local_kwargs, decision.replace)
        local_args = list(changed)
    if decision.local is not None:
        made = decision.local(func, tuple(local_args), local_kwargs)
    else:
        made = func(*local_args, **local_kwargs)
    return _results(decision, made, args)


def _homed(results: Any, decision: Decision) -> Any:
    """Redistribute results to their output layouts. `strict` allows it, since they are gradients of parameters."""
    places = zip(results, decision.homes, decision.outputs)
    return tuple(r if s is None or o is None else redistribute_local(r, s, o.layout, asked=True) for r, s, o in places)


def _run_and_write_back(decision: Decision, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run on redistributed copies of the written operands, then redistribute these back and copy them into place."""
    if strictness.active():
        strictness.check(decision, func, args, kwargs)
    operands: list[Any] = []
    mapped([args, list(kwargs.values())], operands.append)
    supply = iter([_moved(x, target) for x, target in zip(operands, decision.moves)])
    moved_args, moved_kwargs = [], {}
    at_hand: list[Any] = []

    def take(_: Any) -> Any:
        at_hand.append(next(supply))
        return at_hand[-1]

    moved_args = [mapped(a, take) for a in args]
    moved_kwargs = {k: mapped(a, take) for k, a in kwargs.items()}
    out = _run(replace(decision, moves=(), writes=()), func, tuple(moved_args), moved_kwargs)
    for i in decision.writes:
        back = redistribute_local(at_hand[i]._local_tensor, at_hand[i]._spec, operands[i]._spec.layout)
        operands[i]._local_tensor.copy_(back)
    return args[0] if decision.returns_self else out


def _moved(x: Any, target: Layout | None) -> Any:
    if target is None:
        return x
    return wrap(redistribute_local(x._local_tensor, x._spec, target), x._spec.with_layout(target))


__all__ = ["KINDS", "dispatch", "forget", "install", "mesh_of", "run", "with_plain_wrapped"]
