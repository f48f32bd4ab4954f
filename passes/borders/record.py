"""Taps: operators that hand the values of a graph to a recorder, while something is recorded."""

import operator
from typing import Any

import torch
from torch import fx

from dtensor.mesh.provenance import ARRIVAL, INSIDE, MOVE, SPEC
from dtensor.mesh.tensor_spec import Spec
from dtensor.program.source_lines import is_users
from dtensor.torch_private.core import OpOverload

from ..graph import ir
from ..graph.source import is_of_optimizer, module, source, tell_modules
from ..stages import BACKWARD, FORWARD, INFERENCE, Compilation, Pass, Taps

COLLECTIVES = ("dtensor", "_c10d_functional")
"""The namespaces of what redistributes."""

OPTIMIZER = "optimizer"
UNNUMBERED = -1
"""The number of a result if it is unknown which of several it is."""


class Record(Pass):
    """Inserts taps: operators that hand values to the recorder.

    Before:

        %mul: f32[4] = aten.mul.Tensor(%x, 2)
        return %mul

    After:

        %empty: f32[1] = aten.empty.memory_format([1])
        %record_begin: none = dtensor.record_begin(%empty, 0)
        %record: none = dtensor.record(%x, %empty, 0)
        %mul: f32[4] = aten.mul.Tensor(%x, 2)
        %record_1: none = dtensor.record(%mul, %empty, 1)
        %record_end: none = dtensor.record_end(%empty)
        return %mul

    The other passes see the same graph with and without taps, and the order of collectives is fixed before. Tapped are
    the values that an eager run records: of a graph with DTensors every value that was the local tensor of one, with
    its spec, and otherwise the results of the operators that the program called, of which AOTAutograd may have made
    several nodes.
    """

    name = "record"
    stage = "record"
    exactness = "bitwise"
    when = "while something is recorded (`dtensor.record`)"
    required = "what runs would be missing from the record"
    anywhere = True

    def __init__(self, taps: Taps | None = None, direction: str = FORWARD) -> None:
        self.taps: Taps | None = taps
        self.direction: str = direction

    def taking(self, compilation: Compilation) -> Pass | None:
        unused = compilation.taps is None or compilation.within
        return None if unused else Record(compilation.taps, compilation.graph)

    def __call__(self, graph: fx.Graph) -> int:
        if self.taps is None or graph.find_nodes(op="call_function", target=torch.ops.dtensor.record_begin.default):
            return 0
        _Tapped(graph, self.taps, self.direction).insert()
        return 1


class _Tapped:
    def __init__(self, graph: fx.Graph, taps: Taps, direction: str) -> None:
        self.graph, self.taps, self.direction = graph, taps, direction
        self.sites: dict[fx.Node, int] = {}

    def insert(self) -> None:
        graph = self.graph
        tell_modules(graph)
        wanted = _values(graph, self.taps)
        nodes = [node for node in graph.nodes if node.op != "placeholder"]
        start, end = nodes[0], nodes[-1]
        with graph.inserting_before(start):
            token = _call(graph, torch.ops.aten.empty.memory_format, ([1],))
            token.meta["val"] = _value_of_token(graph)
            _call(graph, torch.ops.dtensor.record_begin.default, (token, self.taps.graph(self.direction)))
        inputs = [n for n in graph.find_nodes(op="placeholder") if isinstance(ir.value(n), torch.Tensor) and n.users]
        for k, node in enumerate(inputs):
            number = self.taps.site(self.phase(), "", "", "input", k, "input", _spec(node), ())
            self.tap(start, node, token, number)
        for node in wanted:
            # What a redistribution sends may be an input, such as what the forward saved.
            self.tap(start if node.op == "placeholder" else _after(node, end), node, token, self.site(node))
        with graph.inserting_before(end):
            _call(graph, torch.ops.dtensor.record_end.default, (token,))

    def tap(self, before: fx.Node, node: fx.Node, token: fx.Node, number: int) -> None:
        self.sites[node] = number
        with self.graph.inserting_before(before):
            _call(self.graph, torch.ops.dtensor.record.default, (node, token, number))

    def site(self, node: fx.Node) -> int:
        phase, path, line, spec = self.phase(node), module(node), _line(node), _spec(node)
        if _is_move(node):
            sent = self.sites.get(_sent(node) or node)
            given = () if sent is None else (sent,)
            op = f"redistribute {node.meta[MOVE]}"
            return self.taps.site(phase, path, line, op, 0, "move", spec, given)
        given = self.inputs(node)
        if ir.aliases(node) and node.target is not operator.getitem:
            return self.taps.site(phase, path, line, "view", 0, "view", spec, given)
        return self.taps.site(phase, path, line, _operator(node), _number(node), "op", spec, given)

    def phase(self, node: fx.Node | None = None) -> str:
        """The phase of a value, or of the inputs of the graph, in the words of `dtensor.runs.records.places`."""
        if node is not None and self.direction == INFERENCE and ir.in_backward(node):  # a whole step
            return BACKWARD if node.meta.get("autograd_backward") else OPTIMIZER if is_of_optimizer(node) else FORWARD
        return BACKWARD if self.direction == BACKWARD else FORWARD

    def inputs(self, node: fx.Node) -> tuple[int, ...]:
        """The nearest values before the node that have taps."""
        found: dict[int, None] = {}
        seen: set[fx.Node] = set()
        queue = list(node.all_input_nodes)
        while queue:
            each = queue.pop(0)
            if each in seen:
                continue
            seen.add(each)
            if each in self.sites:
                found[self.sites[each]] = None
            else:
                queue += each.all_input_nodes
        return tuple(found)


def _value_of_token(graph: fx.Graph) -> torch.Tensor:
    like = next(x for node in graph.nodes for x in ir.tensors(node))
    return like.new_empty([1], dtype=torch.float32)


def _call(graph: fx.Graph, target: OpOverload, args: tuple[object, ...]) -> fx.Node:
    node = graph.call_function(target, args)  # pyright: ignore[reportArgumentType]
    node.meta["val"] = None
    return node


def _after(node: fx.Node, end: fx.Node) -> fx.Node:
    """Where to insert what comes after `node`: behind all results, if it is one of several."""
    return end if node.next.op == "root" else node.next


def _values(graph: fx.Graph, taps: Taps) -> list[fx.Node]:
    """The nodes to tap, in order."""
    computed = [n for n in graph.nodes if n.op == "call_function" and isinstance(n.meta.get("val"), torch.Tensor)]
    computed = [n for n in computed if n.target is operator.getitem or not ir.aliases(n) or _is_move(n)]
    sources = {source for n in computed if _is_move(n) and (source := _sent(n)) is not None}
    computed = [n for n in computed if taps.holds_new_value(_operator(n))]
    distributed = {_group(n) for n in computed if SPEC in n.meta}
    results: dict[object, fx.Node] = {n: n for n in computed if SPEC in n.meta}
    for node in computed:
        plain = INSIDE not in node.meta and getattr(node.target, "namespace", "") not in COLLECTIVES
        if plain and _group(node) not in distributed and _is_result(node):
            results[_group(node), tuple(node.meta["val"].shape), node if _is_whole(node) else None] = node
    wanted = set(results.values()) | sources
    return [n for n in graph.nodes if n in wanted]


def _group(node: fx.Node) -> object:
    return _operator(node), node.meta.get("seq_nr")


def _is_whole(node: fx.Node) -> bool:
    """Whether a node is the operator that the program called, and not one of those it was decomposed into."""
    call = node.args[0] if node.target is operator.getitem else node
    return isinstance(call, fx.Node) and str(call.target) == str(call.meta.get("original_aten", call.target))


def _is_result(node: fx.Node) -> bool:
    """Whether a node is used by others than those that its operator was decomposed into."""
    return any(_group(user) != _group(node) for user in node.users)


def _operator(node: fx.Node) -> str:
    found = node.meta.get("original_aten") or node.target
    return found._schema.name if isinstance(found, OpOverload) else str(found)


def _spec(node: fx.Node) -> Spec | None:
    spec: Any = node.meta.get(SPEC)
    return spec if spec is not None and spec.static else None


def _line(node: fx.Node) -> str:
    """The line of the user's code; "" if only torch and this library were on the stack."""
    found = source(node)
    return str(found) if found is not None and is_users(found.file) else ""


def _is_move(node: fx.Node) -> bool:
    """Whether the value is the result of a step of a redistribution."""
    return SPEC in node.meta and _is_of_collective(node)


def _sent(move: fx.Node) -> fx.Node | None:
    """The local tensor that a step of a redistribution starts from; None if a pass has put something in between."""
    given: Any = move
    while isinstance(given, fx.Node) and (given is move or _is_of_collective(given)):
        given = given.args[0]
    return given if isinstance(given, fx.Node) and _spec(given) is not None else None


def _is_of_collective(node: fx.Node) -> bool:
    return MOVE in node.meta and (getattr(node.target, "namespace", "") in COLLECTIVES or ARRIVAL in node.meta)


def _number(node: fx.Node) -> int:
    """Which of several results a node is; `UNNUMBERED` if the operator was decomposed."""
    if node.target is operator.getitem:
        return node.args[1] if isinstance(node.args[1], int) else 0
    return 0 if SPEC in node.meta or _is_whole(node) else UNNUMBERED


__all__ = ["Record"]
