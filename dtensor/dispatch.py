"""Dispatch: runs one operator on DTensors.

    operator call -> key -> decision (cached) -> redistribute operands -> local operator -> wrap

A decision holds everything that follows from the operator, its plain arguments and the operands' specs; where all sizes
are ints it is cached, so the hot path is one dictionary lookup. An operator without a rule is decomposed if torch has a
decomposition, and runs replicated otherwise, with a warning once per operator.
"""

import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ._torch import FakeTensorMode, decompositions, detect_fake_mode, disable_current_modes
from .caches import cache
from .errors import MeshError, MixedTensorError, OperatorError
from .layout import Layout
from .redistribute import redistribute_local
from .rules import RULES, Call, LocalCall, Output, choose
from .rules.call import replaced
from .rules.choose import Choice
from .rules.rule import Rule
from .spec import Spec


@dataclass(frozen=True)
class Decision:
    """How one operator call runs.

    Attributes:
        moves: for each operand the layout it is redistributed to, None where it stays; empty if all stay.
        outputs: spec of each output, None where it is not a tensor.
        many: whether the operator returns a tuple or list.
        replace: arguments (by name) whose global shape is replaced by a local one.
        local: runs the local operator if the operator itself will not do.
        returns_self: in-place: the result is the first argument.
        kind: "" or a key of `_KINDS`, which run by other means.
    """

    moves: tuple[Layout | None, ...] = ()
    outputs: tuple[Spec | None, ...] = ()
    many: bool = False
    replace: tuple[tuple[str, Any], ...] = ()
    local: Callable[..., Any] | None = None
    returns_self: bool = False
    kind: str = ""


MOST_DECISIONS = 1 << 16
"""Decisions kept; at one more all are dropped."""

_PLAIN = object()
_cache: dict[tuple, Decision] = cache()
_warned: set[Any] = set()

wrap: Callable[[torch.Tensor, Spec], torch.Tensor]
"""Makes a DTensor of a local tensor and a spec; set by `tensor`."""
DTensorType: type
"""The DTensor class; set by `tensor`."""


def install(cls: type, make: Callable[[torch.Tensor, Spec], torch.Tensor]) -> None:
    """Tell dispatch which class carries specs and how to build it."""
    global wrap, DTensorType
    DTensorType, wrap = cls, make


def dispatch(func, args: tuple, kwargs: dict[str, Any]):
    """Run `func` on arguments some of which are DTensors.

    Raises:
        MixedTensorError: a plain tensor of one or more dimensions is among the arguments.
        MeshError: the DTensors live on different meshes.
        OperatorError: an in-place operator would have to change the layout of its tensor.
    """
    parts: list[Any] = [func]
    static = True
    for a in args:
        if type(a) is DTensorType:
            parts.append(a._spec)
            static &= a._spec.static
        else:
            static &= _key(a, parts)
    for name, a in kwargs.items():
        parts.append(name)
        static &= _key(a, parts)
    if _PLAIN in parts:
        if func._schema.name.startswith("aten::_foreach_"):
            return _foreach(func, args, kwargs)
        args, kwargs = _with_scalars_wrapped(func, args, kwargs)
        return dispatch(func, args, kwargs)
    if not static:
        return _run(_decide(func, args, kwargs), func, args, kwargs)
    key = tuple(parts)
    decision = _cache.get(key)
    if decision is None:
        if len(_cache) >= MOST_DECISIONS:
            _cache.clear()
        decision = _cache[key] = _decide(func, args, kwargs)
    return _run(decision, func, args, kwargs)


def _key(a, parts: list[Any]) -> bool:
    """Append what a decision depends on in argument `a`; False if that cannot be cached (symbolic sizes)."""
    kind = type(a)
    parts.append(kind)
    if kind is DTensorType or isinstance(a, DTensorType):
        parts.append(a._spec)
        return a._spec.static
    if kind is float:
        # A decision depends on a float only by its being zero; optimizers pass another one in every step.
        parts.append(a == 0)
    elif isinstance(a, torch.Tensor):
        parts.append(_PLAIN)
    elif isinstance(a, (list, tuple)):
        parts.append(len(a))
        static = True
        for item in a:
            static &= _key(item, parts)
        return static
    elif isinstance(a, (torch.SymInt, torch.SymFloat, torch.SymBool)) or isinstance(a, torch.Generator):
        return False
    else:
        parts.append(a)
    return True


def _with_scalars_wrapped(func, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """The call with plain 0-dim tensors as replicated DTensors.

    Raises:
        MixedTensorError: a plain tensor has dimensions, or is to be written to.
    """
    operands: list[Spec] = []
    _check(func, args, kwargs, operands)
    mesh = operands[0].mesh
    first = args[0][0] if isinstance(args[0], (list, tuple)) else args[0]
    if func._schema.name.endswith("_") and not isinstance(first, DTensorType):
        raise MixedTensorError(f"{func} would write a DTensor into a plain tensor; write x.full_tensor() for the operand")

    def scalar(a):
        if isinstance(a, (list, tuple)):
            return [scalar(item) for item in a]
        if isinstance(a, torch.Tensor) and not isinstance(a, DTensorType):
            return wrap(a, Spec.make(mesh, Layout.make(mesh.ndim, (), ()), (), (), a.dtype))
        return a

    return tuple(map(scalar, args)), {k: scalar(a) for k, a in kwargs.items()}


def _run(decision: Decision, func, args: tuple, kwargs: dict[str, Any]):
    if decision.kind:
        return _KINDS[decision.kind](func, args, kwargs)
    if decision.moves:
        moves = iter(decision.moves)
        local_args = [_localized(a, moves) for a in args]
        local_kwargs = {k: _localized(a, moves) for k, a in kwargs.items()}
    else:
        local_args = [a._local_tensor if type(a) is DTensorType else _local_of(a) for a in args]
        local_kwargs = {k: _local_of(a) for k, a in kwargs.items()} if kwargs else kwargs
    if decision.replace:
        changed, local_kwargs = replaced(func, tuple(local_args), local_kwargs, dict(decision.replace))
        local_args = list(changed)
    if decision.local is not None:
        result = decision.local(func, tuple(local_args), local_kwargs)
    else:
        result = func(*local_args, **local_kwargs)
    if decision.returns_self:
        return args[0]
    if not decision.many:
        spec = decision.outputs[0] if decision.outputs else None
        return result if spec is None else wrap(result, spec)
    wrapped = [r if s is None else wrap(r, s) for r, s in zip(result, decision.outputs)]
    return wrapped if isinstance(result, list) else tuple(wrapped)


def _local_of(a):
    if isinstance(a, DTensorType):
        return a._local_tensor
    if isinstance(a, (list, tuple)):
        return [_local_of(item) for item in a]
    return a


def _localized(a, moves):
    if isinstance(a, DTensorType):
        target = next(moves, None)
        local = a._local_tensor
        return local if target is None else redistribute_local(local, a._spec, target)
    if isinstance(a, (list, tuple)):
        return [_localized(item, moves) for item in a]
    return a


def _decide(func, args: tuple, kwargs: dict[str, Any]) -> Decision:
    name = func._schema.name
    if name.startswith("aten::_foreach_"):
        return Decision(kind="foreach")
    if name in COMPOSITES:
        return Decision(kind="composite")
    base = name[:-1] if name.endswith("_") and not name.endswith("__") else name
    make = RULES.get(name) or RULES.get(base)
    if make is None and not _DYNAMIC.isdisjoint(func.tags):
        return Decision(kind="dynamic")
    if make is None and func._can_decompose():
        return Decision(kind="implicit")
    if make is None and func in decompositions and not func._schema.is_mutable:
        return Decision(kind="decompose")
    operands: list[Spec] = []
    _check(func, args, kwargs, operands)
    if any(a.name == "out" and a.kwarg_only for a in func._schema.arguments) and "out" in kwargs:
        raise OperatorError(f"{name} with out= is not supported on DTensor; write out.copy_({base.split('::')[1]}(…))")
    call = _call(func, args, kwargs, operands)
    rule = make(call) if make is not None else _replicated(call)
    assert len(rule.inputs) == len(operands), f"the rule of {func} names {len(rule.inputs)} of {len(operands)} operands"
    return _decision(call, rule, in_place=func._schema.name.endswith("_"))


def _decision(call: Call, rule: Rule, in_place: bool) -> Decision:
    operands = call.operands
    pinned = operands[0].layout if in_place else None
    choice = choose(rule, operands, pinned)
    if choice is None:
        raise OperatorError(
            f"{call.func} would change the layout {operands[0].layout} of the tensor it works on in place; "
            "write the operator without the underscore, or redistribute the tensor first"
        )
    return carry_out(call, rule, choice, in_place)


def carry_out(call: Call, rule: Rule, choice: Choice, in_place: bool) -> Decision:
    """The decision that runs `call` in the layouts of `choice`."""
    operands, mesh = call.operands, call.operands[0].mesh
    specs = tuple(
        None if o is None or layout is None else Spec.make(mesh, layout, o.shape, o.stride, o.dtype)
        for o, layout in zip(call.outputs, choice.outputs)
    )
    moves = tuple(None if t is o.layout else t for t, o in zip(choice.inputs, operands))
    replace: tuple[tuple[str, Any], ...] = ()
    if rule.shape_arg is not None and specs[0] is not None:
        replace = ((rule.shape_arg, list(specs[0].local_shape())),)
    local = _local(call, rule, choice, mesh) if rule.local is not None else _LOCAL.get(call.func._schema.name)
    if operands[0].coordinate is None:
        local, replace = _outside(specs, call.many), ()
    return Decision(moves if any(moves) else (), specs, call.many, replace, local, in_place)


def _local(call: Call, rule: Rule, choice, mesh) -> Callable[..., Any]:
    run = rule.local
    assert run is not None
    return lambda func, args, kwargs: run(LocalCall(func, args, kwargs, call, mesh, choice.axes, choice.outputs))


def _reshape(func, args: tuple, kwargs: dict[str, Any]):
    """A view of a shard that is no view locally (its strides differ from the global ones) copies."""
    if args[1:] and isinstance(args[1], torch.dtype):
        return func(*args, **kwargs)
    return torch.ops.aten.reshape.default(args[0], args[1] if len(args) > 1 else kwargs["size"])


_LOCAL: dict[str, Callable[..., Any]] = dict.fromkeys(
    ("aten::view", "aten::_unsafe_view", "aten::_reshape_alias"), _reshape
)


def _outside(specs: tuple[Spec | None, ...], many: bool) -> Callable[..., Any]:
    """On a rank outside the mesh nothing is computed: outputs are empty."""

    def run(func, args, kwargs):
        made = [None if s is None else torch.empty(0, dtype=s.dtype, device=s.mesh.device_type) for s in specs]
        return made if many else made[0]

    return run


def _check(func, args: tuple, kwargs: dict[str, Any], operands: list[Spec]) -> None:
    """Collect the operands' specs; refuse plain tensors and a second mesh."""
    names = [a.name for a in func._schema.arguments]
    for name, value in [*zip(names, args), *kwargs.items()]:
        for item in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(item, DTensorType):
                operands.append(item._spec)
                if item._spec.mesh != operands[0].mesh:
                    raise MeshError(
                        f"{func}: argument '{name}' lives on {item._spec.mesh} but another one on {operands[0].mesh}; "
                        "redistribute works within one mesh: build both tensors on the same DeviceMesh"
                    )
            elif isinstance(item, torch.Tensor) and item.dim() > 0:
                raise MixedTensorError(
                    f"{func}: argument '{name}' is a plain tensor of shape {list(item.shape)}, other arguments are "
                    "DTensors; write distribute_tensor(x, device_mesh, placements) for a global tensor, or "
                    "DTensor.from_local(x, device_mesh, placements) for a local one"
                )


def _call(func, args: tuple, kwargs: dict[str, Any], operands: list[Spec]) -> Call:
    specs = _mapped(args, lambda t: t._spec), {k: _mapped(v, lambda t: t._spec) for k, v in kwargs.items()}
    outputs, many = _outputs(func, args, kwargs)
    return Call(func, tuple(specs[0]), specs[1], operands, outputs, many)


def _mapped(a, of: Callable[[Any], Any]):
    if isinstance(a, DTensorType):
        return of(a)
    if isinstance(a, (list, tuple)):
        return [_mapped(item, of) for item in a]
    return a


class _Fake(threading.local):
    """A fake mode per thread: one mode is not safe to enter from several, and ranks may be threads."""

    def __init__(self):
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)


_fake = _Fake()


def _outputs(func, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple[Output | None, ...], bool]:
    """Global shape, stride and dtype of the outputs, by running the operator on fake global tensors."""
    locals_: list[torch.Tensor] = []
    _mapped([args, list(kwargs.values())], lambda t: locals_.append(t._local_tensor))
    symbolic = not all(_is_static(a) for a in (*args, *kwargs.values()))
    mode = detect_fake_mode(locals_) if symbolic else None

    def fake(t) -> torch.Tensor:
        s = t._spec
        return torch.empty_strided(s.shape, s.stride, dtype=s.dtype, device=t._local_tensor.device)

    with disable_current_modes(), mode or _fake.mode, torch.no_grad():
        made = func(*_mapped(args, fake), **{k: _mapped(v, fake) for k, v in kwargs.items()})
    many = isinstance(made, (list, tuple))
    results = made if many else (made,)
    described = [Output(tuple(r.shape), r.stride(), r.dtype) if isinstance(r, torch.Tensor) else None for r in results]
    return tuple(described), many


def _is_static(a) -> bool:
    if isinstance(a, DTensorType):
        return a._spec.static
    if isinstance(a, (list, tuple)):
        return all(map(_is_static, a))
    return not isinstance(a, (torch.SymInt, torch.SymFloat, torch.SymBool))


def _warn_unless_known(func) -> None:
    if func not in _warned and func._schema.name not in REPLICATED:
        _warned.add(func)
        warnings.warn(
            f"{func} has no sharding rule: its arguments are gathered and it runs on every rank",
            stacklevel=3,
        )


def _replicated(call: Call) -> Rule:
    """The rule of last resort: everything whole on every rank."""
    _warn_unless_known(call.func)
    outs = tuple(None if o is None else ((),) * o.ndim for o in call.outputs)
    return Rule(tuple(((),) * o.ndim for o in call.operands), outs, {})


REPLICATED = (
    "aten::_local_scalar_dense",
    "aten::equal",
    "aten::is_nonzero",
    "aten::nonzero",
    "aten::masked_select",
    "aten::item",
)
"""Operators that by their meaning need whole values: no warning."""


def _foreach(func, args: tuple, kwargs: dict[str, Any]):
    """A foreach operator runs list index by list index; an index that holds only plain tensors runs as it is."""
    names = [a.name for a in func._schema.arguments]
    lists = {n: v for n, v in [*zip(names, args), *kwargs.items()] if isinstance(v, (list, tuple))}
    length = max(len(v) for v in lists.values())
    results = []
    for i in range(length):
        one = [[a[i]] if isinstance(a, (list, tuple)) else a for a in args]
        named = {k: [a[i]] if isinstance(a, (list, tuple)) else a for k, a in kwargs.items()}
        results.append(_one_of_foreach(func, tuple(one), named))
    if not func._schema.returns or all(r is None for r in results):
        return None
    if isinstance(results[0], tuple):
        return tuple([r[0] for r in rs] for rs in zip(*results))
    return [r[0] for r in results]


def _one_of_foreach(func, args: tuple, kwargs: dict[str, Any]):
    tensors: list[Any] = []
    _tensors([args, list(kwargs.values())], tensors)
    if not any(isinstance(t, DTensorType) for t in tensors):
        return func(*args, **kwargs)
    if not all(isinstance(t, DTensorType) for t in tensors):
        args, kwargs = _with_scalars_wrapped(func, args, kwargs)
    base = func._schema.name.removeprefix("aten::_foreach_")
    if base.rstrip("_") in FOREACH_COMPOSITES:
        return [FOREACH_COMPOSITES[base](*[a[0] if isinstance(a, list) else a for a in args], **kwargs)]
    operands: list[Spec] = []
    _check(func, args, kwargs, operands)
    call = _call(func, args, kwargs, operands)
    in_place = base.endswith("_")
    make = RULES.get(f"aten::{base.removesuffix('_')}")
    if (in_place and not call.outputs) or call.outputs == (None,):
        first = operands[0]
        call.outputs, call.many = (Output(first.shape, first.stride, first.dtype),), True
    rule = make(call) if make is not None else _replicated(call)
    return _run(_decision(call, rule, in_place), func, args, kwargs)


def _tensors(a, found: list[Any]) -> None:
    if isinstance(a, torch.Tensor):
        found.append(a)
    elif isinstance(a, (list, tuple)):
        for item in a:
            _tensors(item, found)


def _decompose(func, args: tuple, kwargs: dict[str, Any]):
    return decompositions[func](*args, **kwargs)


_DYNAMIC = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}


def _implicit(func, args: tuple, kwargs: dict[str, Any]):
    """An operator that torch itself writes in terms of others; arrives here only from within a decomposition."""
    return func.decompose(*args, **kwargs)


def _dynamic(func, args: tuple, kwargs: dict[str, Any]):
    """An operator whose result is a number, or of a shape, that depends on values: runs whole, results replicated."""
    operands: list[Spec] = []
    _check(func, args, kwargs, operands)
    _warn_unless_known(func)
    mesh = operands[0].mesh

    def whole(x):
        return redistribute_local(x._local_tensor, x._spec, Layout.make(mesh.ndim, ((),) * x._spec.ndim, ()))

    def wrapped(t):
        if not isinstance(t, torch.Tensor):
            return t
        layout = Layout.make(mesh.ndim, ((),) * t.dim(), ())
        return wrap(t, Spec.make(mesh, layout, t.shape, t.stride(), t.dtype))

    made = func(*_mapped(args, whole), **{k: _mapped(v, whole) for k, v in kwargs.items()})
    return type(made)(map(wrapped, made)) if isinstance(made, (list, tuple)) else wrapped(made)


def _composite(func, args: tuple, kwargs: dict[str, Any]):
    return COMPOSITES[func._schema.name](*args, **kwargs)


def vector_norm(x, ord=2, dim=None, keepdim=False, *, dtype=None):
    """`linalg_vector_norm` by operators that have rules, so that only the reduced value is communicated."""
    x = x.to(dtype) if dtype is not None else x
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


COMPOSITES: dict[str, Callable[..., Any]] = {"aten::linalg_vector_norm": vector_norm}
"""Operators written in terms of others, on DTensors."""
FOREACH_COMPOSITES: dict[str, Callable[..., Any]] = {"norm": vector_norm}

_KINDS = {
    "foreach": _foreach,
    "composite": _composite,
    "decompose": _decompose,
    "implicit": _implicit,
    "dynamic": _dynamic,
}

__all__ = ["COMPOSITES", "Decision", "dispatch", "install"]
