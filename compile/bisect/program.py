"""A graph as plain data: what can be cut, rebuilt and written as Python.

    Program.of(graph)  a graph of one rank, with its example sizes in place of symbols, on the CPU
    program.build()    the graph again, with fake tensors of its own

Only what the passes read of a node's notes is kept. What cannot be rebuilt elsewhere (an operator of the program's own,
a branch, a constant of the module) becomes an input of the same kind. Outputs that are no tensors, such as meshes, are
left out.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from operator import getitem
from typing import Any

import torch
from torch import fx

from dtensor.mesh.provenance import FROM, NOTES, PART
from dtensor.passes.graph import ir
from dtensor.passes.graph.count import CollectiveInfo
from dtensor.passes.graph.source import module, source
from dtensor.torch_private.core import OpOverload
from dtensor.torch_private.symbolic_sizes import has_hint, hint

from .rebuild import Builder

FLAGS = tuple([note for note in NOTES if note.kept == "truth"])
"""Notes of which only the truth matters."""

KEPT = tuple([note for note in NOTES if note.kept == "value"])
"""Notes that are kept as they are."""

PHASE = "partitioner_tag"
"""AOTAutograd's note whether a node of a joint graph belongs to the forward or to the backward."""

NAMESPACES = frozenset(("aten", "prims", "dtensor", "_c10d_functional"))
"""Operators that exist wherever torch and this library are imported."""

PLAIN = (int, float, complex, str, bool, type(None), torch.dtype, torch.layout, torch.memory_format, CollectiveInfo)


class NotRebuilt(Exception):
    """A graph cannot be a `Program`; the message is the reason."""


@dataclass(frozen=True)
class Ref:
    """The value of the step with this name."""

    name: str


@dataclass(frozen=True)
class Kind:
    """A tensor without its data."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    strides: tuple[int, ...]


@dataclass(frozen=True)
class ProgramStep:
    """An input, or a call.

    Attributes:
        name: name of the node.
        target: the operator; None for an input.
        args, kwargs: the arguments of a call, with a `Ref` for each node among them.
        kind: the kind of the value: a `Kind`, or a tuple of kinds.
        meta: the notes that passes read.
        origin: where the node came from in the program, as text; "" if unknown.
    """

    name: str
    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    kind: Any
    meta: Mapping[str, Any] = field(default_factory=dict[str, Any])
    origin: str = ""

    @property
    def is_effect(self) -> bool:
        """Whether the call does more than compute its value."""
        return isinstance(self.target, OpOverload) and (
            ir.schema(self.target).is_mutable or not ir.schema(self.target).returns
        )


@dataclass(frozen=True)
class Program:
    """The steps of a graph in order, and what it returns."""

    steps: tuple[ProgramStep, ...]
    outputs: tuple[Any, ...]

    def __len__(self) -> int:
        return len(self.steps)

    @staticmethod
    def of(graph: fx.Graph) -> "Program":
        """Return the program of a graph, with all its inputs in their order.

        Raises:
            NotRebuilt: an input is no tensor, or a call that cannot be rebuilt returns something else than tensors.
        """
        return _Reader().read(graph)

    def build(self, groups: Mapping[str, str] | None = None) -> fx.Graph:
        """Build the graph; `groups` is as for `Builder`.

        Raises:
            Exception: whatever an operator raises on arguments of kinds that it does not accept.
        """
        builder = Builder(groups)
        known: dict[str, fx.Node] = {}

        def decoded(arg: Any) -> Any:
            return walked(arg, lambda x: known[x.name] if isinstance(x, Ref) else _faked(builder, x))

        for step in sorted(self.steps, key=lambda s: s.target is not None):
            meta = {**decoded(dict(step.meta)), FROM: step.origin}
            if step.target is None:
                known[step.name] = builder.input(step.name, step.kind.shape, step.kind.dtype, step.kind.strides, meta)
            else:
                args, kwargs = decoded(step.args), decoded(dict(step.kwargs))
                known[step.name] = builder.call(step.name, step.target, args, kwargs, meta)
        return builder.output(*decoded(self.outputs))

    def pruned(self) -> "Program":
        """Leave out the steps whose value nothing needs. Calls with effects stay."""
        needed = set(refs(self.outputs))
        kept: list[ProgramStep] = []
        for step in reversed(self.steps):
            if step.name in needed or step.is_effect:
                kept.append(step)
                needed.update(refs((step.args, step.kwargs)))
        return replace(self, steps=tuple(reversed(kept)))

    def returning(self, outputs: Iterable[Any]) -> "Program":
        """The program that returns `outputs` only."""
        return replace(self, outputs=tuple(outputs)).pruned()

    def cut(self, names: Iterable[str]) -> "Program":
        """Make inputs of the calls with these names: each gives any tensor of the kind that it gave. A call that gives
        several is removed, and what reads one of them becomes an input. Effects are left out."""
        chosen = set(names)
        several = {s.name for s in self.steps if s.name in chosen and not isinstance(s.kind, Kind)}
        chosen |= {s.name for s in self.steps if s.target is getitem and set(refs(s.args)) & several}
        changed: dict[str, Any] = {}
        kept: list[ProgramStep] = []
        for step in self.steps:
            if step.name not in chosen or step.target is None:
                kept.append(_substituted(step, changed))
            elif step.is_effect:
                first = next(iter(refs(step.args)), None)
                changed[step.name] = None if first is None else changed.get(first, Ref(first))
            elif isinstance(step.kind, Kind):
                kept.append(ProgramStep(step.name, None, (), {}, step.kind, _of_input(step.meta), step.origin))
        return Program(tuple(kept), _replaced(self.outputs, changed)).pruned()

    def without(self, name: str, instead: str) -> "Program":
        """Let everything that reads the call `name` read `instead`."""
        changed = {name: Ref(instead)}
        kept = [_substituted(s, changed) for s in self.steps if s.name != name]
        return Program(tuple(kept), _replaced(self.outputs, changed)).pruned()

    def resized(self, old: int, new: int) -> "Program":
        """Write `new` for every size and every number among the arguments that is `old`. The kinds of calls are then
        not known any more; `Program.of(program.build())` finds them."""

        def number(x: Any) -> Any:
            if isinstance(x, Kind):
                shape = tuple([new if n == old else n for n in x.shape])
                return replace(x, shape=shape, strides=tuple(_restrided(x, shape)))
            return new if type(x) is int and x == old else x

        steps = [
            replace(s, args=walked(s.args, number), kwargs=walked(s.kwargs, number), kind=walked(s.kind, number))
            for s in self.steps
        ]
        return Program(tuple(steps), self.outputs)


def _restrided(x: Kind, shape: tuple[int, ...]) -> list[int]:
    order = sorted(range(len(shape)), key=lambda dim: (-x.strides[dim], dim))
    return ir.dense_strides(shape, order)


def _of_input(meta: Mapping[str, Any]) -> dict[str, Any]:
    return {key: meta[key] for key in (PHASE, PART) if key in meta}


def _substituted(step: ProgramStep, changed: Mapping[str, Any]) -> ProgramStep:
    if not changed or not set(refs((step.args, step.kwargs))) & changed.keys():
        return step
    return replace(step, args=_replaced(step.args, changed), kwargs=_replaced(step.kwargs, changed))


def _replaced(arg: Any, changed: Mapping[str, Any]) -> Any:
    return walked(arg, lambda x: changed.get(x.name, x) if isinstance(x, Ref) else x)


def _faked(builder: Builder, x: Any) -> Any:
    return builder.fake(x.shape, x.dtype, x.strides) if isinstance(x, Kind) else x


def walked(arg: Any, change: Callable[[Any], Any]) -> Any:
    """Return `arg` with every leaf of its tuples, lists, dicts and slices changed."""
    if isinstance(arg, (tuple, list)):
        return type(arg)([walked(item, change) for item in arg]) if type(arg) in (tuple, list) else change(arg)
    if isinstance(arg, dict):
        return {key: walked(item, change) for key, item in arg.items()}
    if isinstance(arg, slice):
        return slice(*[walked(x, change) for x in (arg.start, arg.stop, arg.step)])
    return change(arg)


def refs(arg: Any) -> list[str]:
    """Return the names of the steps that an argument reads."""
    found: list[str] = []
    walked(arg, lambda x: found.append(x.name) if isinstance(x, Ref) else None)
    return found


class _Opaque:
    """What a call that cannot be rebuilt gives, where that is not one tensor."""


class _Reader:
    def __init__(self) -> None:
        self.known: dict[fx.Node, Any] = {}
        self.steps: list[ProgramStep] = []

    def read(self, graph: fx.Graph) -> Program:
        for node in graph.nodes:
            if node.op == "output":
                outputs = [x for x in _flat(node.args[0]) if not isinstance(self.known.get(x), _Opaque)]
                return Program(tuple(self.steps), self.argument(tuple(outputs)))
            self.known[node] = self.step(node)
        raise NotRebuilt("the graph returns nothing")

    def step(self, node: fx.Node) -> Any:
        val = _constant(node) if node.op == "get_attr" and "val" not in node.meta else ir.value(node)
        if isinstance(val, (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool)):
            return _number(val)
        if node.op == "call_function" and self.is_known(node):
            args, kwargs = self.argument(tuple(node.args)), self.argument(dict(node.kwargs))
            self.steps.append(
                ProgramStep(node.name, node.target, args, kwargs, _kind(val), self.notes(node), origin_of(node))
            )
            return Ref(node.name)
        if isinstance(val, torch.Tensor):
            self.steps.append(ProgramStep(node.name, None, (), {}, _kind(val), self.notes(node), origin_of(node)))
            return Ref(node.name)
        return _Opaque()

    def is_known(self, node: fx.Node) -> bool:
        own = isinstance(node.target, OpOverload) and node.target.namespace in NAMESPACES
        if not own and node.target is not getitem:
            return False
        try:
            self.argument((tuple(node.args), dict(node.kwargs)))
            _kind(ir.value(node))
        except NotRebuilt:
            return False
        return True

    def argument(self, arg: Any) -> Any:
        return walked(_plain_list(arg), self.leaf)

    def leaf(self, x: Any) -> Any:
        if isinstance(x, fx.Node):
            found = self.known.get(x)
            if x not in self.known or isinstance(found, _Opaque):
                raise NotRebuilt(f"{x.format_node()} gives something else than a tensor")
            return found
        if isinstance(x, torch.device):
            return torch.device("cpu")
        if isinstance(x, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return _number(x)
        if isinstance(x, torch.Tensor):
            return _kind(x)
        if isinstance(x, PLAIN):
            return x
        raise NotRebuilt(f"{type(x).__name__} among the arguments")

    def notes(self, node: fx.Node) -> dict[str, Any]:
        found: dict[str, Any] = {key: True for key in FLAGS if node.meta.get(key)}
        if node.meta.get(PHASE) is not None:
            found[PHASE] = str(node.meta[PHASE])
        for key in KEPT:
            if key in node.meta:
                found[key] = self.argument(node.meta[key])
        return found


def _constant(node: fx.Node) -> Any:
    """The attribute of the module that `node` reads."""
    found: Any = node.graph.owning_module
    for name in str(node.target).split("."):
        found = getattr(found, name, None)
    return found


def _plain_list(arg: Any) -> Any:
    """fx's immutable lists and dicts, and torch.Size, as plain ones."""
    if isinstance(arg, tuple):
        return tuple([_plain_list(item) for item in arg])
    if isinstance(arg, list):
        return [_plain_list(item) for item in arg]
    if isinstance(arg, dict):
        return {key: _plain_list(item) for key, item in arg.items()}
    return arg


def _flat(out: Any) -> list[Any]:
    return [leaf for item in out for leaf in _flat(item)] if isinstance(out, (tuple, list)) else [out]


def _number(x: Any) -> Any:
    if isinstance(x, (int, float)):
        return x
    if isinstance(x, torch.SymInt) and has_hint(x):
        return hint(x)
    if x.node.hint is None:
        raise NotRebuilt("sizes that depend on data")
    return x.node.hint


def _kind(val: Any) -> Any:
    if isinstance(val, torch.Tensor):
        if val.layout != torch.strided:
            raise NotRebuilt(f"a tensor of layout {val.layout}")
        return Kind(tuple(map(_number, val.shape)), val.dtype, tuple(map(_number, val.stride())))
    if isinstance(val, (tuple, list)):
        return tuple([_kind(item) for item in val])
    return val if val is None else _number(val) if isinstance(val, (int, float, torch.SymInt)) else None


def origin_of(node: fx.Node) -> str:
    """The module and the line of the program that a node came from."""
    if FROM in node.meta:
        return node.meta[FROM]
    return "; ".join([str(part) for part in (module(node), source(node)) if part])


__all__ = ["Kind", "NotRebuilt", "Program", "ProgramStep", "Ref", "refs", "walked"]
