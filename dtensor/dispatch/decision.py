"""Decides how one operator call runs, from the operator's rule and the operands' specs.

    call -> outputs on fake global tensors -> rule -> choice of layouts -> decision

`dispatch` calls `decide` for each call that is not in its cache. A call that does not run as one local operator, such
as one without a rule, gets a decision of another `kind`, which `multi_step` and `out_variants` carry out.
"""

import contextlib
import dataclasses
import functools
import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from ..comm.from_plain import take_from_source
from ..errors import MeshError, OperatorError
from ..layout.layout import Layout
from ..mesh.local_sizes import written as written_size
from ..mesh.tensor_spec import Spec
from ..rules import (
    FOR_EMPTY,
    MASKS,
    RULES,
    SHAPES,
    Call,
    LocalCall,
    Output,
    choose,
    choose_as,
    is_in_place,
    needs_whole,
    rule_of,
)
from ..rules.choose import Choice
from ..rules.rule import Rule
from ..torch_private.core import (
    FakeTensorMode,
    OpOverload,
    conjugates_resolved,
    decompositions,
    detect_fake_mode,
    disable_current_modes,
    fastest_binding,
    is_in_graph,
    on_lists_sent,
    real_object,
    tree_leaves,
    tree_map,
    without_frame,
)
from ..torch_private.own_errors import without_torch
from .empty_ranks import is_empty_somewhere, require_parts
from .fallback import fell_back
from .global_view import check_global
from .memory_order import IN_MEMORY, put_in_memory
from .plain_operands import draws_of_torch, is_alike
from .whole_graph import OperatorLayouts

COMPOSITES: dict[str, Callable[..., Any]] = {}
"""Operator name -> an implementation on DTensors in terms of other operators; `multi_step` and `composite` fill it."""

FOREACH = ("aten::_foreach_", "aten::_fused_adam", "aten::_fused_sgd", "aten::_fused_adagrad")
"""Name prefixes of the operators that work on lists of tensors, index by index."""

COLLECTIVES = ("c10d::", "_c10d_functional::", "_c10d_functional_autograd::", "c10d_functional::", "fsdp::")
"""Name prefixes of torch's own collectives, and of what FSDP2 gathers with, which take no DTensors."""

_DYNAMIC = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}


@dataclass(frozen=True)
class Decision:
    """How one operator call runs.

    Attributes:
        moves: the layout that each operand is redistributed to, None where it stays; empty if all stay.
        outputs: spec of each output, None where it is not a tensor.
        many: whether the operator returns a tuple or list.
        replace: (argument name, local shape) for each argument that holds a global shape.
        local: runs in place of the operator where the plain operator on local tensors is not enough.
        returns_self: whether the operator is in-place, so that the result is its first argument.
        writes: indices of the operands that are redistributed and written to. They are redistributed back and copied
            into the tensors that were passed.
        kind: "", or a key of `dispatch.KINDS` for a call that does not run as one local operator.
        fallback: whether operands are gathered because the operator has no rule.
        homes: for each output that is redistributed after it was computed, the spec it was computed with; None where
            it stays, empty if all stay.
        simple: whether the operator runs unchanged on the local tensors and only makes new DTensors.
        written: indices of all operands that are written to, redistributed or not.
    """

    moves: tuple[Layout | None, ...] = ()
    outputs: tuple[Spec | None, ...] = ()
    many: bool = False
    replace: tuple[tuple[str, Any], ...] = ()
    local: Callable[..., Any] | None = None
    returns_self: bool = False
    writes: tuple[int, ...] = ()
    kind: str = ""
    fallback: bool = False
    homes: tuple[Spec | None, ...] = ()
    simple: bool = False
    written: tuple[int, ...] = ()

    def on(self, mesh: DeviceMesh) -> "Decision":
        """Return the decision with its results on `mesh`, which is the decision's mesh or a stand-in for it."""
        specs = [s for s in self.outputs if s is not None]
        if not specs or specs[0].mesh is mesh:
            return self
        outputs, homes = (tuple([s and s.on(mesh) for s in some]) for some in (self.outputs, self.homes))
        return dataclasses.replace(self, outputs=outputs, homes=homes)

    def traced(self) -> "Decision":
        """Return the decision with result sizes that the graph being traced can compute."""
        if all(s is None or s.static for s in self.outputs):
            return self
        shapes = tuple([(name, [written_size(n) for n in shape]) for name, shape in self.replace])
        return dataclasses.replace(self, outputs=tuple([s and s.traced() for s in self.outputs]), replace=shapes)


def is_dtensor(a: Any) -> bool:
    """Whether an argument is a `dtensor` DTensor, recognised by its spec."""
    return isinstance(getattr(a, "_spec", None), Spec)


def decide(
    func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], layouts: OperatorLayouts | None = None
) -> Decision:
    """Decide how a call runs, from its operator, its plain arguments and the specs of its operands.

    Args:
        func, args, kwargs: the call.
        layouts: what was decided for it in a whole graph; None, or where its rule does not allow them: as is cheapest.

    Raises:
        MixedTensorError: a plain tensor that may differ between ranks is among the arguments.
        MeshError: operands are on different meshes.
        OperatorError: the operator would have to change the layout of a tensor that it writes to.
    """
    name = func._schema.name
    if name.startswith(FOREACH):
        return Decision(kind="foreach")
    if has_out(func):
        return Decision(kind="out")
    if name in COMPOSITES and str(func) not in RULES:
        return Decision(kind="composite")
    if torch.Tag.inplace_view in func.tags:
        return Decision(kind="inplace_view")
    in_place = is_in_place(func)
    make = rule_of(func)
    if make is not None and not _DYNAMIC.isdisjoint(func.tags) and _reads_mask(args):
        return Decision(kind="dynamic")
    operands: list[Spec] = []
    check_operands(func, args, kwargs, operands)
    if make is None and (kind := _without_rule(func, in_place, operands)):
        return Decision(kind=kind)
    call = call_of(func, args, kwargs, operands)
    rule = make(call) if make is not None else replicated(call)
    assert len(rule.inputs) == len(operands), f"the rule of {func} names {len(rule.inputs)} of {len(operands)} operands"
    return decide_by(call, rule, in_place, layouts)


def _without_rule(func: OpOverload, in_place: bool, operands: list[Spec]) -> str:
    """The kind of decision for an operator that has no rule; "" if it runs on gathered tensors."""
    if not _DYNAMIC.isdisjoint(func.tags):
        return "dynamic"
    if not any(o.layout.partial or any(o.layout.dims) for o in operands):
        return ""
    if func._can_decompose():
        return "implicit"
    if in_place:
        return "functional" if functional_of(func) is not None else ""
    return "decompose" if func in decompositions and not func._schema.is_mutable else ""


def has_out(func: OpOverload) -> bool:
    """Whether an operator writes its results to `out=` arguments."""
    return any(a.is_out for a in func._schema.arguments)


_functional: dict[Any, Any] = {}


def functional_of(func: OpOverload) -> Any:
    """The overload that returns a new tensor where `func` writes to its first argument or to `out=`; None without."""
    if func not in _functional:
        _functional[func] = _find_functional(func)
    return _functional[func]


def _find_functional(func: OpOverload) -> Any:
    space, base = func._schema.name.split("::")
    packet = getattr(getattr(torch.ops, space), base.removesuffix("_"), None)
    wanted = [(a.name, str(a.type)) for a in func._schema.arguments if not a.is_out]
    for overload in packet.overloads() if packet is not None else ():
        other = getattr(packet, overload)
        found = [(a.name, str(a.type)) for a in other._schema.arguments]
        if found == wanted and not other._schema.is_mutable:
            return other
    return None


def _reads_mask(args: tuple[Any, ...]) -> bool:
    """Whether a list among the arguments holds a mask: the shape of an indexing result then depends on its values."""
    lists = [a for a in args if isinstance(a, (list, tuple))]
    return any(getattr(item, "dtype", None) in MASKS for a in lists for item in a)


@dataclass(frozen=True)
class Decided:
    """The inputs of one decision: the call, its rule, the choice, and whether output 0 is operand 0."""

    call: Call
    rule: Rule
    choice: Choice
    in_place: bool


class _Watch(threading.local):
    seen: list[Decided] | None = None


_watch = _Watch()


@contextlib.contextmanager
def watched() -> Iterator[list[Decided]]:
    """Context that yields a growing list of the decisions by rule in this thread; only the innermost one records."""
    before, _watch.seen = _watch.seen, []
    try:
        yield _watch.seen
    finally:
        _watch.seen = before


def decide_by(call: Call, rule: Rule, in_place: bool, layouts: OperatorLayouts | None = None) -> Decision:
    """The decision for `call` in the `layouts` that were decided for it, or else the cheapest that `rule` allows."""
    choice = None
    if layouts is not None:
        choice = choose_as(rule, call.operands, layouts.inputs, layouts.outputs, in_place)
    choice = choice or choose(rule, call.operands, in_place)
    if _watch.seen is not None:
        _watch.seen.append(Decided(call, rule, choice, in_place))
    return carry_out(call, rule, choice, in_place)


def carry_out(call: Call, rule: Rule, choice: Choice, in_place: bool) -> Decision:
    """Return the decision that runs `call` in the layouts of `choice`."""
    operands, mesh = call.operands, call.operands[0].mesh
    specs = tuple(
        None if o is None or layout is None else Spec.make(mesh, layout, o.shape, o.stride, o.dtype)
        for o, layout in zip(call.outputs, choice.outputs)
    )
    moves = tuple(None if t is o.layout else t for t, o in zip(choice.inputs, operands))
    replace: tuple[tuple[str, Any], ...] = ()
    if rule.shape_arg is not None and specs[0] is not None:
        replace = ((rule.shape_arg, list(specs[0].local_shape())),)
    needed = rule.local is not None and _needs_local(rule, choice, operands)
    if needed:
        require_parts(call, rule, choice)
    local = _local(call, rule, choice, mesh) if needed else _LOCAL.get(call.func._schema.name)
    if call.func._schema.name in IN_MEMORY:
        local = put_in_memory(local, operands, views=call.func.is_view)
    if operands[0].coordinate is None:
        local, replace = _outside(specs, call.many), ()
    elif local is not None and any(map(is_empty_somewhere, operands, choice.inputs)):
        local = _holding(local, in_place)
    changed = tuple(sorted(rule.written.union(written(call))))
    writes = tuple(i for i in changed if moves[i] is not None)
    fallback = rule.local is _run_whole
    moves = moves if any(moves) else ()
    put = tuple(_put(s, operands[rule.home[i]]) if i in rule.home else s for i, s in enumerate(specs))
    homes = () if put == specs else tuple(None if a is b else a for a, b in zip(specs, put))
    stays = not (moves or replace or local or in_place or writes or homes)
    simple = stays and _is_plain(call, specs)
    return Decision(moves, put, call.many, replace, local, in_place, writes, "", fallback, homes, simple, changed)


def _put(spec: Spec | None, home: Spec) -> Spec | None:
    layout = home.layout.without_partial()
    return spec if spec is None or spec.layout is layout else spec.with_layout(layout)


def _is_plain(call: Call, outputs: tuple[Spec | None, ...]) -> bool:
    """Whether the operator returns only tensors, and no keyword argument is a tensor or a list."""
    return (
        (call.many or len(outputs) == 1)
        and None not in outputs
        and not any(isinstance(a, (Spec, list)) for a in call.kwargs.values())
    )


def written(call: Call) -> list[int]:
    """Indices of the operands that the operator's schema marks as written to."""
    found: list[int] = []
    count = 0
    for a in call.func._schema.arguments:
        given = call[a.name]
        for item in given if isinstance(given, list) else [given]:
            if isinstance(item, Spec):
                if a.alias_info is not None and a.alias_info.is_write:
                    found.append(count)
                count += 1
    return found


def _local(call: Call, rule: Rule, choice: Any, mesh: DeviceMesh) -> Callable[..., Any]:
    run = rule.local
    assert run is not None
    return lambda func, args, kwargs: run(LocalCall(func, args, kwargs, call, mesh, choice.axes, choice.outputs))


def _needs_local(rule: Rule, choice: Choice, operands: list[Spec]) -> bool:
    """Whether the rule's `local` differs from the plain operator in the layouts of `choice`."""
    across = rule.across is not None and any(choice.axes.get(f) for f in rule.across)
    if rule.local in FOR_EMPTY:
        static = all(o.static for o in operands)
        return across or not static or any(map(is_empty_somewhere, operands, choice.inputs))
    return across or rule.across is None


def _holding(run: Callable[..., Any], in_place: bool) -> Callable[..., Any]:
    """Wrap `run` so that in a graph its results depend on all operands, whether it reads them or not.

    Some operators take another path on an empty shard and do not read all their operands there. That rank would drop
    the collectives that produce the unread ones from its graph, and the other ranks would wait for it. So all ranks
    keep all operands alive with `dtensor::hold`. Its text names the call and the result: otherwise zeros of the same
    shape, made for different results, would be merged into one value on that rank, and so would the collectives on
    them.
    """

    def held(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = run(func, args, kwargs)
        if not is_in_graph():
            return out
        flat = tree_leaves((args, kwargs))
        given = [a for a in flat if isinstance(a, torch.Tensor)]
        call = " ".join([str(func), *[str(a) for a in flat if not isinstance(a, torch.Tensor)]])
        count = itertools.count()

        def hold(x: Any) -> Any:
            what = f"{call} {next(count)}"
            return torch.ops.dtensor.hold(x, given, what) if isinstance(x, torch.Tensor) else x

        if in_place:
            args[0].copy_(hold(args[0]))
            return out
        return tree_map(hold, out)

    return held


def reshaped(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """View the shard, or copy it where its strides differ from the global ones so that no local view exists."""
    if args[1:] and isinstance(args[1], torch.dtype):
        return func(*args, **kwargs)
    return torch.reshape(args[0], args[1] if len(args) > 1 else kwargs["size"])


def _resolved(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute a conjugate or negative at once: the DTensor would not know of a lazy bit on its local tensor."""
    return func(*args, **kwargs).resolve_conj().resolve_neg()


_CONJUGATING = ("aten::linalg_pinv", "aten::linalg_lstsq")
"""Operators whose kernels call others with lazy conjugates. No others of torch's operators on complex numbers compute
something else on DTensors for it; `tests/sweep` tries them."""


def called(func: OpOverload) -> Callable[..., Any]:
    """`func` as it is called on local tensors: those in `_CONJUGATING` may call others with lazy conjugates.

    Inside `__torch_dispatch__` torch leaves out the dispatch keys that resolve them, and such a kernel would silently
    compute with the values that are not conjugated.
    """
    if func._schema.name not in _CONJUGATING:
        return func

    def running(*args: Any, **kwargs: Any) -> Any:
        with conjugates_resolved():
            return func(*args, **kwargs)

    return running


def _called(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return called(func)(*args, **kwargs)


_LOCAL: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(_CONJUGATING, _called),
    **dict.fromkeys(("aten::view", "aten::_unsafe_view", "aten::_reshape_alias"), reshaped),
    **dict.fromkeys(("aten::_conj", "aten::_neg_view"), _resolved),
}


def _outside(specs: tuple[Spec | None, ...], many: bool) -> Callable[..., Any]:
    """What runs on a rank outside the mesh: it computes nothing and returns empty outputs."""

    def run(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        made = [None if s is None else torch.empty(0, dtype=s.dtype, device=s.mesh.device_type) for s in specs]
        return made if many else made[0]

    return run


def check_operands(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], operands: list[Spec]) -> None:
    """Append the operands' specs to `operands`. Plain tensors that a torch function drew are taken from the first rank.

    Raises:
        MeshError: two operands live on different meshes.
        MixedTensorError: a plain tensor may differ between ranks.
        OperatorError: the operator is a collective of torch.
    """
    if func._schema.name.startswith(COLLECTIVES):
        _refuse_collective((args, kwargs))
    names, plain = [a.name for a in func._schema.arguments], []
    for name, value in [*zip(names, args), *kwargs.items()]:
        for item in value if isinstance(value, (list, tuple)) else (value,):
            if is_dtensor(item):
                operands.append(item._spec)
                if item._spec.mesh != operands[0].mesh:
                    raise MeshError(
                        f"{func}: argument '{name}' lives on {real_object(item._spec.mesh)} but another one on "
                        f"{real_object(operands[0].mesh)}; "
                        "write x.redistribute(device_mesh, placements) to bring one of them to the other's mesh"
                    )
            elif isinstance(item, torch.Tensor):
                plain.append((name, item))
    for name, item in plain:
        if is_alike(item):
            continue
        drawn = draws_of_torch(item)
        if drawn:
            take_from_source(item, operands[0].mesh, 0)
        elif drawn is None:
            check_global(func, name, item, operands[0].mesh)


def _refuse_collective(given: Any) -> None:
    """Refuse a collective of torch that was given a DTensor."""
    held = next((x for x in tree_leaves(given) if is_dtensor(x)), None)
    if held is not None:
        raise OperatorError(
            f"torch.distributed was given a DTensor, {held._spec}, and its collectives take plain tensors; write "
            "x.full_tensor() for the whole value, x.redistribute(placements=[Replicate()]) to gather it or to add up a "
            "Partial(), or give the collective this rank's part, x.to_local(); around a model, write fully_shard and "
            "the styles of dtensor.parallel in place of torch's"
        )


on_lists_sent(_refuse_collective)


def call_of(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], operands: list[Spec]) -> Call:
    """The call as rules see it: with specs in place of DTensors, on the mesh itself rather than a stand-in."""
    specs = tuple([mapped(a, _real_spec) for a in args]), {k: mapped(v, _real_spec) for k, v in kwargs.items()}
    outputs, many = _outputs(func, args, kwargs)
    return Call(func, *specs, [o.real or o for o in operands], outputs, many)


def _real_spec(x: Any) -> Spec:
    return x._spec.real or x._spec


def mapped(a: Any, of: Callable[[Any], Any]) -> Any:
    """An argument with `of(x)` in place of each DTensor x; of lists and tuples, a list."""
    if is_dtensor(a):
        return of(a)
    if isinstance(a, (list, tuple)):
        return [mapped(item, of) for item in a]
    return a


class _Fake(threading.local):
    """One fake mode per thread: ranks may be threads, and a mode is not safe to enter from several. Made when the
    thread first decides: torch imports Dynamo for it."""

    @functools.cached_property
    def mode(self) -> FakeTensorMode:
        return FakeTensorMode(allow_non_fake_inputs=True)


_fake = _Fake()


def _outputs(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Output | None, ...], bool]:
    """Global shape, stride and dtype of each output, and whether there are many, from a run on fake global tensors.

    They are the same for all layouts, so torch's operators run once for arguments of equal sizes.
    """
    run: Any = SHAPES.get(func._schema.name, func)
    symbolic = not all(_is_static(a) for a in (*args, *kwargs.values()))
    parts: list[Any] = [run, torch.get_default_dtype(), *kwargs]
    if symbolic or func.namespace not in ("aten", "prims") or not _sizes_in(parts, (*args, *kwargs.values())):
        return _made_by(run, args, kwargs, symbolic)
    key = tuple(parts)
    known = _known_outputs.get(key)
    if known is None:
        if len(_known_outputs) >= MOST_OUTPUTS:
            _known_outputs.clear()
        known = _known_outputs[key] = _made_by(run, args, kwargs, symbolic)
    return known


MOST_OUTPUTS = 10_000
"""As many outputs are kept."""

_known_outputs: dict[tuple[Any, ...], tuple[tuple[Output | None, ...], bool]] = {}


def _sizes_in(parts: list[Any], given: Any) -> bool:
    """Append to `parts` what outputs follow from; False if that is more than a key can hold."""
    for a in given:
        kind = type(a)
        if is_dtensor(a):
            s = a._spec
            parts += (kind, s.shape, s.stride, s.dtype, a._local_tensor.device)
        elif kind in (list, tuple):
            parts += (kind, len(a))
            if not _sizes_in(parts, a):
                return False
        elif a is None or kind in _IN_A_KEY:
            parts += (kind, a)
        else:
            return False
    return True


_IN_A_KEY = (int, float, bool, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format)


def _made_by(run: Any, args: Any, kwargs: Any, symbolic: bool) -> tuple[tuple[Output | None, ...], bool]:
    locals_: list[torch.Tensor] = []
    if symbolic:
        mapped([args, list(kwargs.values())], lambda t: locals_.append(t._local_tensor))
    mode = detect_fake_mode(locals_) if symbolic else None
    with without_torch(), disable_current_modes(), mode or _fake.mode, torch.no_grad():
        given = _faked(args, kwargs)
        made = run(*given[0], **given[1])
    many = isinstance(made, (list, tuple))
    results = made if many else (made,)
    described = [Output(tuple(r.shape), r.stride(), r.dtype) if isinstance(r, torch.Tensor) else None for r in results]
    return tuple(described), many


def binding_of(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
    """What is called in place of `func` on local tensors, with arguments of these types: the same call in less time."""
    if func._schema.name in SHAPES:
        return without_frame(func)
    kinds = (func, *_kinds(args), *kwargs, *_kinds(kwargs.values()))
    if kinds not in _bindings:
        with without_torch(), disable_current_modes(), _fake.mode, torch.no_grad():
            _bindings[kinds] = fastest_binding(func, *_faked(args, kwargs))
    return _bindings[kinds]


_bindings: dict[tuple[Any, ...], Callable[..., Any]] = {}


def _kinds(given: Any) -> Iterator[Any]:
    """The types of arguments, and of what is in lists."""
    for a in given:
        yield type(a)
        if isinstance(a, (list, tuple)):
            yield from (len(a), *_kinds(a))


def _faked(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The arguments with fake global tensors in place of DTensors."""

    def fake(t: Any) -> torch.Tensor:
        s = t._spec
        return torch.empty_strided(s.shape, s.stride, dtype=s.dtype, device=t._local_tensor.device)

    return mapped(args, fake), {k: mapped(v, fake) for k, v in kwargs.items()}


def _is_static(a: Any) -> bool:
    if is_dtensor(a):
        return a._spec.static
    if isinstance(a, (list, tuple)):
        return all(map(_is_static, a))
    return not isinstance(a, (torch.SymInt, torch.SymFloat, torch.SymBool))


def replicated(call: Call) -> Rule:
    """The rule of last resort: all operands replicated, counted as a fallback if one of them has to be gathered."""
    outs = tuple(None if o is None else ((),) * o.ndim for o in call.outputs)
    gathers = any(not o.layout.is_replicated for o in call.operands)
    return Rule(tuple(((),) * o.ndim for o in call.operands), outs, {}, local=_run_whole if gathers else None)


def _run_whole(call: LocalCall) -> Any:
    if not needs_whole(call.func):
        fell_back(call.func)
    return call.run()


__all__ = [
    "COMPOSITES",
    "FOREACH",
    "Decided",
    "Decision",
    "binding_of",
    "call_of",
    "called",
    "carry_out",
    "check_operands",
    "decide",
    "decide_by",
    "functional_of",
    "has_out",
    "is_dtensor",
    "mapped",
    "replicated",
    "reshaped",
    "watched",
]
