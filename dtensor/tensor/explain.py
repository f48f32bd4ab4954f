"""Explain: reports what dispatch would do with a call, operator by operator, without doing it.

    call -> the same call on fake local tensors -> decision of each operator -> Explanation

The decisions come from the code that dispatch itself uses. Nothing is computed and nothing is communicated.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from html import escape
from typing import Any

import torch

from ..dispatch import dispatch, strictness
from ..dispatch.decision import Decided, carry_out, check_operands, decide, watched
from ..dispatch.fallback import uncounted
from ..dispatch.implicit_moves import Move, moves_of, named_operands
from ..errors import ArgumentTypeError, ShardingError, shown
from ..layout.layout import Layout
from ..layout.placements import Partial, Placement, Replicate, Shard
from ..mesh.mesh import mesh_shape
from ..mesh.tensor_spec import Spec
from ..rules import rule_of
from ..rules.choose import Weighed, weigh
from ..torch_private.core import (
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    TorchDispatchMode,
    UnknownValue,
    disable_current_modes,
)
from .composite_operators import inside
from .tensor import DTensor, fake_like

KINDS = {
    "rule": "runs on local tensors by its rule",
    "replicated": "has no rule: runs on full tensors on every rank",
    "dynamic": "its result depends on values: gathered, and run on every rank",
    "composite": "runs as the operators below it",
    "decomposed": "has no rule: runs as the operators of torch's decomposition below it",
    "functional": "runs as the operator below it, whose result is copied",
    "out": "runs as the operator below it, whose result is copied",
    "inplace_view": "becomes the result of the operator below it",
    "foreach": "runs list item by list item, below it",
    "redistribute": "asked for",
    "implied": "not asked for: a composite operator redistributes its operand",
}
"""Kind of an `OperatorExplanation` -> its description in the printed text."""

_KIND_OF_DECISION = {"decompose": "decomposed", "implicit": "decomposed"}


@dataclass(frozen=True)
class Option:
    """One way to run an operator on one mesh axis.

    Attributes:
        inputs: placement of each operand on the axis.
        outputs: placement of each output on the axis; None if the output is not a tensor.
        seconds: estimated time of the redistributions it needs, in seconds; None if it is refused.
        refused: why it is not possible; empty if it is.
        chosen: whether this option runs.
    """

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement | None, ...]
    seconds: float | None
    refused: str
    chosen: bool

    def __str__(self) -> str:
        return f"{', '.join(map(str, self.inputs))} -> {', '.join(map(str, self.outputs))}"


@dataclass(frozen=True)
class OperatorExplanation:
    """How one operator runs.

    Attributes:
        name: the operator, such as "aten.mm.default".
        kind: a key of `KINDS`.
        depth: 0 for an operator that was called, 1 for one that it is broken into, and so on.
        operands: argument name and spec of each tensor operand.
        options: the candidates for each mesh axis; empty if no rule applies.
        moves: the operands and computed outputs that are redistributed, with plan, bytes and seconds.
        outputs: spec of each output; None if the output is not a tensor. Empty if the operator is refused, or if only
            the operators it is broken into determine its outputs.
        error: why it is refused; empty if it is not.
    """

    name: str
    kind: str
    depth: int
    operands: tuple[tuple[str, Spec], ...]
    options: tuple[tuple[Option, ...], ...] = ()
    moves: tuple[Move, ...] = ()
    outputs: tuple[Spec | None, ...] = ()
    error: str = ""

    @property
    def bytes(self) -> float:
        """Bytes that each rank sends for this operator's redistributions."""
        return sum(m.bytes for m in self.moves)

    @property
    def seconds(self) -> float:
        """Estimated time of this operator's redistributions, in seconds."""
        return sum(m.seconds for m in self.moves)

    def __str__(self) -> str:
        return "\n".join("  " * self.depth + line for line in self._lines())

    def _lines(self) -> list[str]:
        taken = ", ".join(f"{name} {spec}" for name, spec in self.operands)
        given = " -> " + ", ".join(map(str, self.outputs)) if self.outputs else ""
        lines = [f"{self.name} [{self.kind}: {KINDS[self.kind]}]", f"  {taken}{given}"]
        for axis, options in enumerate(self.options):
            ranks = mesh_shape(self.operands[0][1].mesh)[axis]
            lines.append(f"  on mesh axis {axis} of {ranks} ranks:")
            lines += [f"  {'*' if o.chosen else ' '} {_verdict(o):>10}  {o}{_reason(o)}" for o in options]
        for m in self.moves:
            back = " and moved back" if m.returns else ""
            lines.append(f"  {m.argument} is redistributed{back}, {_cost(m.bytes, m.seconds)}:")
            lines += [f"      {step}" for step in m.steps]
        return lines + ([f"  refused: {self.error}"] if self.error else [])


def _verdict(option: Option) -> str:
    return "-" if option.seconds is None else _time(option.seconds)


def _reason(option: Option) -> str:
    return f"  ({option.refused})" if option.refused else ""


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.2f} us"


def _cost(sent: float, seconds: float) -> str:
    return f"{round(sent)} bytes, {_time(seconds)}"


@dataclass(frozen=True)
class Explanation:
    """The result of `explain`. It prints as text, and as a table in a notebook.

    Attributes:
        name: name of the function that was explained.
        operators: an `OperatorExplanation` for each operator, in order of execution. The operators that one is broken
            into follow it.
        stopped: why the explanation ends before the call does; empty if it covers the whole call.
    """

    name: str
    operators: tuple[OperatorExplanation, ...]
    stopped: str

    @property
    def bytes(self) -> float:
        """Bytes that each rank sends for all redistributions."""
        return sum(o.bytes for o in self.operators)

    @property
    def seconds(self) -> float:
        """Estimated time of all redistributions if they run one after the other, in seconds."""
        return sum(o.seconds for o in self.operators)

    def __str__(self) -> str:
        told = any(o.error == self.stopped for o in self.operators)
        end = [f"ends here: {self.stopped}"] if self.stopped and not told else []
        return "\n".join([f"{self.name}: {_cost(self.bytes, self.seconds)}", *map(str, self.operators), *end])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        rows = []
        for o in self.operators:
            operands = [f"{name} {spec}" for name, spec in o.operands]
            options = [f"{'*' if c.chosen else ' '} {_verdict(c)} {c}{_reason(c)}" for a in o.options for c in a]
            moves = [f"{m.argument}: {step}" for m in o.moves for step in m.steps]
            cells = (
                ["\u2003" * o.depth + o.name],
                [o.kind, o.error],
                operands,
                options,
                [*moves, _cost(o.bytes, o.seconds)],
                map(str, o.outputs),
            )
            rows.append("<tr>" + "".join(f"<td>{'<br>'.join(escape(t) for t in c if t)}</td>" for c in cells) + "</tr>")
        head = "".join(
            f"<th>{h}</th>" for h in ("operator", "kind", "operands", "candidates", "redistributions", "outputs")
        )
        title = escape(f"{self.name}: {_cost(self.bytes, self.seconds)}")
        end = f"<p>ends here: {escape(self.stopped)}</p>" if self.stopped else ""
        return f"<table><caption>{title}</caption><tr>{head}</tr>{''.join(rows)}</table>{end}"


def explain(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Explains what calling `op` would do: the candidates of each operator, the choice, and its redistributions.

    The call runs on fake local tensors: nothing is computed, no argument is written to and nothing is communicated. If
    sharding makes the call fail, the explanation ends there with the error. It also ends at an operator whose result
    depends on values, because what follows is unknown.

    Args:
        op: any callable that takes DTensors: a torch function such as `torch.matmul` or `F.linear`, a method such as
            `torch.Tensor.view`, an operator of `torch.ops`, a custom operator or a module.
        *args: its arguments. DTensors may also be inside lists, tuples and dicts.
        **kwargs: its keyword arguments, likewise.

    Returns:
        An `Explanation`, with bytes sent by each rank and times estimated by `dtensor.prices.links`, in seconds.

    Raises:
        TypeError: `op` is not callable.
        Exception: whatever `op` raises for reasons other than sharding, such as incompatible shapes.

    >>> print(dtensor.explain(torch.matmul, x, w))
    matmul: 256 bytes, 10.03 us
    aten.mm.default [rule: runs on local tensors by its rule]
      self torch.float32[8, 16] S(0), mat2 torch.float32[16, 32] S(1) -> torch.float32[8, 32] S(1)
      on mesh axis 0 of 2 ranks:
          20.13 us  R, R -> R
          10.10 us  S(0), R -> S(0)
          20.06 us  S(1), S(0) -> P
      *   10.03 us  R, S(1) -> S(1)
          21.13 us  P, R -> P
          21.13 us  P(avg), R -> P(avg)
          21.15 us  R, P -> P
          21.15 us  R, P(avg) -> P(avg)
      self is redistributed, 256 bytes, 10.03 us:
          S(0) -> R: all_gather over axis 0, 256 B
    """
    if not callable(op):
        raise ArgumentTypeError(
            f"explain takes a callable, and then its arguments; got {shown(op)}, write explain(torch.add, x, y)"
        )
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    recorder = _Recorder(mode)
    stopped = ""
    with ExitStack() as stack:
        for context in (disable_current_modes(), uncounted(), strictness.suspended(), mode, recorder):
            stack.enter_context(context)
        try:
            op(*recorder.faked(args), **recorder.faked(kwargs))
        except ShardingError as error:
            stopped = str(error)
        except UnknownValue:
            stopped = "what follows depends on values"
    name = getattr(op, "__name__", None) or type(op).__name__
    return Explanation(name, tuple(recorder.found), stopped)


class _Recorder(TorchDispatchMode):
    """Intercepts each operator on DTensors before DTensor does, records its decision and runs it on fake tensors."""

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()
        self.mode = mode
        self.found: list[OperatorExplanation] = []
        self.depth = 0
        self.known: dict[int, tuple[Any, Any]] = {}

    def faked(self, a: Any) -> Any:
        """`a` with each DTensor in it on a fake local tensor. A DTensor that occurs twice is faked once."""
        if isinstance(a, DTensor):
            if isinstance(a._local_tensor, FakeTensor):
                return a
            if id(a) not in self.known:
                with self.mode:
                    self.known[id(a)] = a, fake_like(a)
            return self.known[id(a)][1]
        if isinstance(a, dict):
            return {k: self.faked(v) for k, v in a.items()}
        return type(a)(map(self.faked, a)) if type(a) in (list, tuple) else a

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not any(issubclass(t, DTensor) for t in types):
            return func(*args, **kwargs)
        args, kwargs = self.faked(tuple(args)), dict(self.faked(kwargs))
        if _has_plain(args, kwargs) and "_foreach_" not in func.name():
            args, kwargs = dispatch.with_plain_wrapped(func, args, kwargs)
        with watched() as seen:
            try:
                decision = decide(func, args, kwargs)
            except ShardingError as error:
                self._refuse(func, args, kwargs, seen, error)
                raise
        if decision.kind:
            return self._detour(decision.kind, func, args, kwargs)
        self.found += [self._by_rule(d, str(func)) for d in seen]
        return dispatch.run(decision, func, args, kwargs)

    def _detour(self, kind: str, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        operands = tuple(named_operands(func, args, kwargs))
        note = OperatorExplanation(str(func), _KIND_OF_DECISION.get(kind, kind), self.depth, operands)
        if kind == "dynamic" or func.name() == "dtensor::redistribute":
            self.found.append(_moved(note, func, args, kwargs))
            return dispatch.KINDS[kind](func, args, kwargs)
        self.found.append(note)
        self.depth += 1
        try:
            with self, watched() as seen:
                return dispatch.KINDS[kind](func, args, kwargs)
        finally:
            self.found += [self._by_rule(d, str(func)) for d in seen]
            self.depth -= 1

    def _by_rule(self, d: Decided, name: str, error: str = "") -> OperatorExplanation:
        operands = named_operands(d.call.func, d.call.args, d.call.kwargs)
        options = tuple(tuple(map(_option, rows)) for rows in weigh(d.rule, d.call.operands, d.in_place))
        kind = "replicated" if rule_of(d.call.func) is None else "rule"
        decision = carry_out(d.call, d.rule, d.choice, d.in_place)
        moves = tuple(moves_of(operands, decision.moves, decision.writes))
        made = [(f"output {i}", spec) for i, spec in enumerate(decision.homes)]
        homes = [o.layout if s and o else None for s, o in zip(decision.homes, decision.outputs)]
        moves += tuple(moves_of(made, homes))  # pyright: ignore[reportArgumentType]
        outputs = (operands[0][1],) if d.in_place else decision.outputs
        return OperatorExplanation(name, kind, self.depth, tuple(operands), options, moves, outputs, error)

    def _refuse(
        self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], seen: list[Decided], error: ShardingError
    ) -> None:
        if seen:
            self.found += [self._by_rule(d, str(func), str(error)) for d in seen]
        else:
            operands = tuple(named_operands(func, args, kwargs))
            self.found.append(OperatorExplanation(str(func), "rule", self.depth, operands, error=str(error)))


def _moved(
    note: OperatorExplanation, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> OperatorExplanation:
    """The explanation of an operator that determines the layouts of its operands itself."""
    specs: list[Spec] = []
    check_operands(func, args, kwargs, specs)
    if note.kind == "dynamic":
        targets = [Layout.make(s.mesh.ndim, ((),) * s.ndim, ()) for s in specs]
        return OperatorExplanation(note.name, "dynamic", note.depth, note.operands, (), _moves(note, targets))
    target = Layout.parse(args[1], specs[0].ndim) if args[1] else specs[0].layout
    outputs = (specs[0].with_layout(target),)
    moves = _moves(note, [target])
    kind = "implied" if inside.name else "redistribute"
    name = inside.name or note.name
    return OperatorExplanation(name, kind, note.depth, note.operands, (), moves, outputs)


def _moves(note: OperatorExplanation, targets: list[Layout]) -> tuple[Move, ...]:
    return tuple(moves_of(list(note.operands), targets))


def _has_plain(*values: Any) -> bool:
    """Whether a plain tensor is among the arguments."""
    return any(
        _has_plain(*(v.values() if isinstance(v, dict) else v))
        if isinstance(v, (list, tuple, dict))
        else isinstance(v, torch.Tensor) and not isinstance(v, DTensor)
        for v in values
    )


def _option(w: Weighed) -> Option:
    inputs = tuple(map(_placement, w.candidate.inputs))
    return Option(inputs, tuple(map(_placement, w.candidate.outputs)), w.seconds, w.refused, w.chosen)


def _placement(state: int | str | None) -> Placement:
    if isinstance(state, int):
        return Shard(state)
    return Replicate() if state is None else Partial(state)


__all__ = ["KINDS", "Explanation", "OperatorExplanation", "Option", "explain"]
