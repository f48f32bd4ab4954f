"""Records a program that runs on DTensors: its operators as dispatch decides them, forward and backward.

function, inputs on fake tensors -> forward and backward, in which nothing is computed -> tape

The tape is that of the search (`dtensor.parallel.search.tape`). Unlike a tape of a model that is not sharded, it holds
what the program itself says of layouts: a redistribution is a border whose result is in a given state.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from operator import itemgetter
from typing import Any

import torch
from torch import nn

from ...dispatch.dispatch import run, wrap
from ...dispatch.global_view import global_view
from ...dispatch.whole_graph import TRANSPARENT, recorded
from ...errors import ShardingError
from ...mesh.tensor_spec import Spec
from ...rules import State
from ...tensor.tensor import DTensor, layout_in
from ...torch_private.core import (
    FakeTensorMode,
    OpOverload,
    backward_number,
    disable_current_modes,
    forward_number,
    fx_traceback,
    tree_leaves,
    tree_map,
)
from ...torch_private.symbolic_sizes import hint
from ..search.states import state_of
from ..search.tape import BORDER, INPUT, MADE, PARAMETER, Op, Tape, Value


class NotRecorded(ShardingError):
    """A program does something that cannot be recorded."""


@dataclass
class Recording:
    """A recorded program.

    Attributes:
        tape: its operators; redistributions are borders.
        fixed: input, or result of a redistribution -> its state.
        tangents: gradient with which the backward starts -> the result whose gradient it is.
        handed_back: gradients of inputs that are no parameters.
        mesh: the mesh on which most operators run, whose operators these are; None without any.
        node: operator of the backward -> the node of autograd that runs it, as in `dispatch.whole_graph.Node`.
    """

    tape: Tape = field(default_factory=Tape)
    fixed: dict[Value, State] = field(default_factory=dict[Value, State])
    tangents: dict[Value, Value] = field(default_factory=dict[Value, Value])
    handed_back: list[Value] = field(default_factory=list[Value])
    mesh: Any = None
    node: dict[Op, tuple[Op, int]] = field(default_factory=dict[Op, tuple[Op, int]])


class _Recorder:
    def __init__(self) -> None:
        self.nodes: list[tuple[int, Op]] = []
        self.recording = Recording()
        self.known: dict[int, Value] = {}
        self.alive: list[Any] = []
        self.backward = False
        self.locals: dict[Any, torch.Tensor] = {}
        self.meshes: dict[Value, Any] = {}
        self.entered: list[tuple[int, str]] = [(-1, "")]
        self.open: list[str] = []

    @contextmanager
    def in_modules(self, model: nn.Module) -> Iterator[None]:
        """Know in which module operators run, where Dynamo does not say it."""

        def enter(name: str, *_: Any) -> None:
            self.open.append(name)

        def leave(*_: Any) -> None:
            self.open.pop()

        with ExitStack() as stack:
            for name, module in model.named_modules():
                stack.callback(module.register_forward_pre_hook(partial(enter, name)).remove)
                stack.callback(module.register_forward_hook(leave, always_call=True).remove)
            yield

    def empty(self, spec: Spec) -> Any:
        """A DTensor in which nothing is. Those whose local tensors are alike have the same one."""
        key = spec.local_shape(), spec.dtype, spec.mesh.device_type
        if key not in self.locals:
            shape, dtype, device = key
            self.locals[key] = torch.empty(shape, dtype=dtype, device=device)
        return wrap(self.locals[key], spec)

    def note(self, x: DTensor, value: Value) -> Value:
        """Remember which value a tensor is, and keep the tensor so that no other gets its id."""
        self.known[id(x)] = value
        self.alive.append(x)
        return value

    def made(self, x: DTensor, kind: str, name: str = "", storage: int | None = None) -> Value:
        spec = x._spec
        real = spec.real or spec
        own = len(self.alive) if storage is None else storage
        value = Value(kind, name, tuple(spec.shape), tuple(spec.stride), spec.dtype, own)
        self.meshes[value] = real.mesh
        if kind in (INPUT, PARAMETER):
            self.recording.fixed[value] = state_of(spec.layout)
            self.recording.tape.values[kind, name] = value
        return self.note(x, value)

    def value(self, x: DTensor) -> Value:
        return self.known.get(id(x)) or self.made(x, INPUT, f"met {len(self.alive)}")

    def run(self, decision: Any, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """As `dispatch.whole_graph.Recorder`."""
        if func is torch.ops.dtensor.redistribute.default:
            return self.redistributed(args, kwargs)
        if decision.kind == "dynamic":
            raise NotRecorded(f"{func} makes results whose shape depends on values")
        if decision.kind:
            return run(decision, func, args, kwargs)
        if func in TRANSPARENT:
            (out,) = (self.empty(spec) for spec in decision.outputs)
            self.note(out, self.value(args[0]))
            return out
        operands: list[Value] = []

        def seen(a: Any) -> Any:
            if isinstance(a, DTensor):
                operands.append(self.value(a))
                return operands[-1]
            return [seen(item) for item in a] if isinstance(a, (list, tuple)) else a

        given, named = tuple([seen(a) for a in args]), {k: seen(a) for k, a in kwargs.items()}
        op = Op(func, given, named, operands, [], decision.many, self.path(), self.backward)
        self.recording.tape.ops.append(op)
        if not self.backward:
            self.nodes.append((forward_number(), op))
        elif (number := backward_number()) is not None:
            after = bisect_right(self.nodes, number, key=itemgetter(0))
            if after < len(self.nodes):
                self.recording.node[op] = self.nodes[after][1], self.nodes[after][0] - number
        if decision.returns_self:
            results = [args[0]]
        else:
            kinds = [str(r.type) for r in func._schema.returns]
            results = [
                _nothing(kind) if spec is None else self.empty(spec)
                for spec, kind in zip_longest(decision.outputs, kinds)
            ]
        storage = operands[0].storage if operands and (func.is_view or decision.returns_self) else None
        for k, x in enumerate(results):
            value = None
            if isinstance(x, DTensor):
                value = self.made(x, MADE, "", storage)
                value.maker, value.index = op, k
            op.outputs.append(value)
        return results if decision.many else next(iter(results), None)

    def becomes(self, x: DTensor, made: DTensor) -> None:
        """As `dispatch.whole_graph.Recorder`."""
        self.note(x, self.value(made))

    def redistributed(self, args: Any, kwargs: Any) -> Any:
        """A redistribution, which the program says itself."""
        x = args[0]
        given = self.value(x)
        layout = layout_in(x, args[1])
        dtype = kwargs.get("dtype") or x._spec.dtype
        out = self.empty(Spec.make(x._spec.mesh, layout, x._spec.shape, x._spec.stride, dtype))
        if layout is x._spec.layout and given in self.recording.fixed:
            self.note(out, given)
            return out
        value = self.made(out, MADE, "", given.storage)
        value.maker = Op(BORDER, (given,), {}, [given], [value], False, self.path(), self.backward, "said")
        self.recording.fixed[value] = state_of(layout)
        self.recording.tape.ops.append(value.maker)
        return out

    def on_one_mesh(self) -> Recording:
        """What was recorded, without tensors on other meshes than that of most operators."""
        found, meshes = self.recording, self.meshes

        def of(op: Op) -> Any:
            return next((meshes[v] for v in (*op.operands, *op.outputs) if v is not None), None)

        counts = Counter([id(mesh) for op in found.tape.ops if (mesh := of(op)) is not None])
        if not counts:
            return found
        most = counts.most_common(1)[0][0]
        found.mesh = next(mesh for mesh in meshes.values() if id(mesh) == most)

        def is_there(v: Value) -> bool:
            return meshes[v] is found.mesh

        tape = found.tape
        tape.ops = [op for op in tape.ops if of(op) is found.mesh]
        tape.values = {key: v for key, v in tape.values.items() if is_there(v)}
        tape.results, found.handed_back = (
            [v for v in some if is_there(v)] for some in (tape.results, found.handed_back)
        )
        tape.gradients = {
            name: g for name, g in tape.gradients.items() if is_there(g) and (PARAMETER, name) in tape.values
        }
        found.fixed = {v: s for v, s in found.fixed.items() if is_there(v)}
        found.tangents = {v: result for v, result in found.tangents.items() if is_there(v)}
        _name_by_use(tape)
        return found

    def path(self) -> str:
        """The module in whose forward an operator runs, or ran that it differentiates."""
        if not self.backward:
            meta = fx_traceback.current_meta
            path = self.open[-1] if self.open else _module_of(meta)
            if path != self.entered[-1][1]:
                self.entered.append((forward_number(), path))
            return path
        number = backward_number()
        found = [path for at, path in self.entered if number is not None and at <= number]
        return found[-1] if found else ""


def _module_of(meta: Any) -> str:
    """The name of a node's innermost module, by Dynamo's record of it."""
    stack = meta.get("nn_module_stack") or {}
    name = next(reversed(stack.values()), ("",))[0] if stack else ""
    for before, after in (("L['self'].", ""), ("._modules['", "."), ("']", ""), ("[", "."), ("]", "")):
        name = name.replace(before, after)
    return name


def _nothing(kind: str | None) -> int | None:
    """What stands for a result that is no tensor: a number, or a tensor that was not asked for."""
    return 0 if kind in ("int", "SymInt") else None


def record(
    run_forward: Callable[..., Any],
    inputs: Sequence[Any],
    parameters: Collection[int],
    inside: Mapping[str, DTensor] | None = None,
    model: nn.Module | None = None,
) -> Recording:
    """Record a program and, where gradients are enabled and its inputs require them, its backward.

    Args:
        run_forward: the program, a function of flat arguments.
        inputs: its arguments, on fake tensors. Symbolic sizes are recorded as their hints.
        parameters: indices of those that are parameters or buffers.
        inside: further parameters, by name, which the program reads from elsewhere.
        model: the model whose forward it is, if it is called as it is; Dynamo says by itself which modules run.

    Returns:
        What was recorded.

    Raises:
        NotRecorded: what it does depends on the values of tensors.
    """
    recorder = _Recorder()
    tape = recorder.recording.tape
    with ExitStack() as stack:
        stack.enter_context(disable_current_modes())
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        copies = [_with_numbers(x, recorder) for x in inputs]
        for k, x in enumerate(copies):
            if isinstance(x, DTensor):
                recorder.made(x, PARAMETER if k in parameters and x.requires_grad else INPUT, str(k))
        for name, x in (inside or {}).items():
            recorder.made(x, PARAMETER if x.requires_grad else INPUT, name)
            copies.append(x)
        if model is not None:
            stack.enter_context(recorder.in_modules(model))
        stack.enter_context(recorded(recorder))
        stack.enter_context(global_view(False))
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))  # another thread records nothing
        with torch.set_grad_enabled(torch.is_grad_enabled() and any(_wants_gradient(x) for x in copies)):
            out = [x for x in tree_leaves(run_forward(*copies[: len(inputs)])) if isinstance(x, torch.Tensor)]
        results = [x for x in out if isinstance(x, DTensor)]
        tape.results = [recorder.value(x) for x in results]
        starts = [x for x in out if x.requires_grad]
        wanted = [x for x in copies if _wants_gradient(x)]
        if starts and wanted:
            recorder.backward = True
            tangents = [_tangent(x, recorder) for x in starts]
            gradients = torch.autograd.grad(starts, wanted, tangents, allow_unused=True)
            for x, g in zip(wanted, gradients):
                if not isinstance(x, DTensor) or not isinstance(g, DTensor):
                    continue
                if recorder.value(x).kind == PARAMETER:
                    tape.gradients[recorder.value(x).name] = recorder.value(g)
                else:
                    recorder.recording.handed_back.append(recorder.value(g))
    return recorder.on_one_mesh()


def _name_by_use(tape: Tape) -> None:
    """Name parameters by the first operator that reads them, so that those of layers that are alike are known: a frame
    has them as arguments without names."""
    names: dict[Value, str] = {}
    ops: Counter[str] = Counter()
    for op in tape.ops:
        for k, v in enumerate(op.operands):
            if v.kind == PARAMETER:
                names.setdefault(v, f"{op.path}.operand {k} of operator {ops[op.path]}")
        ops[op.path] += 1
    tape.gradients = {names.get(tape.values[PARAMETER, n], n): g for n, g in tape.gradients.items()}
    for v, name in names.items():
        v.name = name
    tape.values = {(v.kind, v.name): v for v in tape.values.values()}


def _wants_gradient(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.requires_grad


def _tangent(x: torch.Tensor, recorder: _Recorder) -> torch.Tensor:
    if not isinstance(x, DTensor):
        return torch.empty_like(x)
    made = recorder.empty(x._spec.with_layout(x._spec.layout.without_partial()))
    value = recorder.made(made, MADE, f"tangent {len(recorder.recording.tangents)}")
    recorder.recording.tangents[value] = recorder.value(x)
    return made


def _with_numbers(x: Any, recorder: _Recorder) -> Any:
    """An argument of its own, with numbers in place of symbolic sizes."""
    if isinstance(x, torch.SymInt):
        return hint(x)
    if isinstance(x, DTensor):
        spec = x._spec
        shape, stride = (tuple([hint(n) for n in some]) for some in (spec.shape, spec.stride))
        made = recorder.empty(Spec.make(spec.mesh, spec.layout, shape, stride, spec.dtype))
        return made.requires_grad_(x.requires_grad)
    if isinstance(x, torch.Tensor):
        shape, stride = (tuple([hint(n) for n in some]) for some in (x.shape, x.stride()))
        made = torch.empty_strided(shape, stride, dtype=x.dtype, device=x.device)
        return made.requires_grad_(x.requires_grad)
    return tree_map(lambda a: hint(a) if isinstance(a, torch.SymInt) else a, x)


__all__ = ["NotRecorded", "Recording", "record"]
