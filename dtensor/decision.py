"""Decision: how one operator call runs, worked out from the operator's rule and the operands' specs.

    call -> outputs on fake global tensors -> rule -> choice of layouts -> decision

What an operator without a rule does instead is a kind of decision; `detours` carries those out.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ._torch import FakeTensorMode, decompositions, detect_fake_mode, disable_current_modes
from .errors import MeshError, MixedTensorError, OperatorError
from .fallback import fell_back
from .layout import Layout
from .moves import moves_of, named_operands
from .rules import RULES, Call, LocalCall, Output, choose, rule_of
from .rules.choose import Choice
from .rules.rule import Rule
from .spec import Spec

COMPOSITES: dict[str, Callable[..., Any]] = {}
"""Operators written in terms of others, on DTensors; `detours` and `composite` fill it."""

_DYNAMIC = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}


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
        kind: "" or a key of `dispatch.KINDS`, which run by other means.
        fallback: whether the operator has no rule and runs whole on every rank.
    """

    moves: tuple[Layout | None, ...] = ()
    outputs: tuple[Spec | None, ...] = ()
    many: bool = False
    replace: tuple[tuple[str, Any], ...] = ()
    local: Callable[..., Any] | None = None
    returns_self: bool = False
    kind: str = ""
    fallback: bool = False


def is_dtensor(a: Any) -> bool:
    """Whether an argument is a DTensor of ours: what carries a spec."""
    return isinstance(getattr(a, "_spec", None), Spec)


def decide(func, args: tuple, kwargs: dict[str, Any]) -> Decision:
    name = func._schema.name
    if name.startswith("aten::_foreach_"):
        return Decision(kind="foreach")
    if name in COMPOSITES and str(func) not in RULES:
        return Decision(kind="composite")
    base = name[:-1] if name.endswith("_") and not name.endswith("__") else name
    make = rule_of(func)
    if make is None and not _DYNAMIC.isdisjoint(func.tags):
        return Decision(kind="dynamic")
    if make is None and func._can_decompose():
        return Decision(kind="implicit")
    if make is None and func in decompositions and not func._schema.is_mutable:
        return Decision(kind="decompose")
    operands: list[Spec] = []
    check_operands(func, args, kwargs, operands)
    if any(a.name == "out" and a.kwarg_only for a in func._schema.arguments) and "out" in kwargs:
        raise OperatorError(f"{name} with out= is not supported on DTensor; write out.copy_({base.split('::')[1]}(…))")
    call = call_of(func, args, kwargs, operands)
    rule = make(call) if make is not None else replicated(call)
    assert len(rule.inputs) == len(operands), f"the rule of {func} names {len(rule.inputs)} of {len(operands)} operands"
    decision = decide_by(call, rule, in_place=func._schema.name.endswith("_"))
    if decision.moves and func._schema.is_mutable:
        _check_writes(call, decision)
    return decision


def _check_writes(call: Call, decision: Decision) -> None:
    """Refuse to redistribute an argument that is written to: what is written would be lost with the copy."""
    written = {a.name for a in call.func._schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    for move in moves_of(named_operands(call.func, call.args, call.kwargs), decision.moves):
        if move.argument.partition("[")[0] in written:
            raise OperatorError(
                f"{call.func} writes to '{move.argument}', which it takes in {move.target} but which is in "
                f"{move.spec.layout}; write {move.as_call()} first"
            )


@dataclass(frozen=True)
class Decided:
    """What a decision was made from: the call, its rule, the layout an in-place operator must keep, and the choice."""

    call: Call
    rule: Rule
    pinned: Layout | None
    choice: Choice | None

    @property
    def fallback(self) -> bool:
        """Whether there was no rule, so that everything is whole."""
        return self.rule.local is _run_whole


class _Watch(threading.local):
    seen: list[Decided] | None = None


_watch = _Watch()


@contextlib.contextmanager
def watched() -> Iterator[list[Decided]]:
    """Context that gives the list of what is decided by a rule in this thread, from here on; the innermost one sees."""
    before, _watch.seen = _watch.seen, []
    try:
        yield _watch.seen
    finally:
        _watch.seen = before


def decide_by(call: Call, rule: Rule, in_place: bool) -> Decision:
    operands = call.operands
    pinned = operands[0].layout if in_place else None
    choice = choose(rule, operands, pinned)
    if _watch.seen is not None:
        _watch.seen.append(Decided(call, rule, pinned, choice))
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
    fallback = rule.local is _run_whole
    return Decision(moves if any(moves) else (), specs, call.many, replace, local, in_place, fallback=fallback)


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


def check_operands(func, args: tuple, kwargs: dict[str, Any], operands: list[Spec]) -> None:
    """Collect the operands' specs; refuse plain tensors and a second mesh."""
    names = [a.name for a in func._schema.arguments]
    for name, value in [*zip(names, args), *kwargs.items()]:
        for item in value if isinstance(value, (list, tuple)) else (value,):
            if is_dtensor(item):
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


def call_of(func, args: tuple, kwargs: dict[str, Any], operands: list[Spec]) -> Call:
    specs = mapped(args, lambda t: t._spec), {k: mapped(v, lambda t: t._spec) for k, v in kwargs.items()}
    outputs, many = _outputs(func, args, kwargs)
    return Call(func, tuple(specs[0]), specs[1], operands, outputs, many)


def mapped(a, of: Callable[[Any], Any]):
    if is_dtensor(a):
        return of(a)
    if isinstance(a, (list, tuple)):
        return [mapped(item, of) for item in a]
    return a


class _Fake(threading.local):
    """A fake mode per thread: one mode is not safe to enter from several, and ranks may be threads."""

    def __init__(self):
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)


_fake = _Fake()


def _outputs(func, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple[Output | None, ...], bool]:
    """Global shape, stride and dtype of the outputs, by running the operator on fake global tensors."""
    locals_: list[torch.Tensor] = []
    mapped([args, list(kwargs.values())], lambda t: locals_.append(t._local_tensor))
    symbolic = not all(_is_static(a) for a in (*args, *kwargs.values()))
    mode = detect_fake_mode(locals_) if symbolic else None

    def fake(t) -> torch.Tensor:
        s = t._spec
        return torch.empty_strided(s.shape, s.stride, dtype=s.dtype, device=t._local_tensor.device)

    with disable_current_modes(), mode or _fake.mode, torch.no_grad():
        made = func(*mapped(args, fake), **{k: mapped(v, fake) for k, v in kwargs.items()})
    many = isinstance(made, (list, tuple))
    results = made if many else (made,)
    described = [Output(tuple(r.shape), r.stride(), r.dtype) if isinstance(r, torch.Tensor) else None for r in results]
    return tuple(described), many


def _is_static(a) -> bool:
    if is_dtensor(a):
        return a._spec.static
    if isinstance(a, (list, tuple)):
        return all(map(_is_static, a))
    return not isinstance(a, (torch.SymInt, torch.SymFloat, torch.SymBool))


def replicated(call: Call) -> Rule:
    """The rule of last resort: everything whole on every rank."""
    outs = tuple(None if o is None else ((),) * o.ndim for o in call.outputs)
    return Rule(tuple(((),) * o.ndim for o in call.operands), outs, {}, local=_run_whole)


def _run_whole(call: LocalCall):
    fell_back(call.func)
    return call.run()


REPLICATED = (
    "aten::_local_scalar_dense",
    "aten::equal",
    "aten::is_nonzero",
    "aten::nonzero",
    "aten::masked_select",
    "aten::item",
)
"""Operators that by their meaning need whole values: no fallback."""

__all__ = [
    "COMPOSITES",
    "REPLICATED",
    "Decided",
    "Decision",
    "call_of",
    "carry_out",
    "check_operands",
    "decide",
    "decide_by",
    "is_dtensor",
    "mapped",
    "replicated",
    "watched",
]
