"""What a backward needs of its forward: which values, in which ways each may be there, and what that takes."""

from collections.abc import Collection
from dataclasses import dataclass, field
from operator import getitem
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from dtensor.comm.collectives import KEPT
from dtensor.comm.host_memory import to_host
from dtensor.prices.machine import Machine
from dtensor.prices.operators import is_fused

from ..graph import estimate, groups, ir, sizes
from ..graph.lifetimes import is_view
from .again import is_repeatable

LEAST = 4096
"""Bytes of values that are worth a copy to the host."""


@dataclass(eq=False)
class Value:
    """A value of the forward that the backward may need: one tensor, with its views.

    Attributes:
        node: makes its memory.
        call: the call that computes it, of which it may be one of several results.
        place: of the node.
        bytes: on the rank that has most of it.
        reads: places in the backward that read it.
        last: place of the last node of the forward that reads it.
        made_of: values of which it is computed.
        kinds: the ways in which it may be there: "held", "away", "again".
        makes: values that are computed of it.
        seconds: that it takes to compute it again.
        writing: seconds that it takes to hold it, if it is written for that alone.
        unwritten: whether it is computed where it is read, and never written, if it is not held.
    """

    node: fx.Node
    call: fx.Node
    place: int
    bytes: int
    reads: list[int] = field(default_factory=list[int])
    last: int = 0
    made_of: list["Value"] = field(default_factory=list["Value"])
    kinds: tuple[str, ...] = ()
    makes: list["Value"] = field(default_factory=list["Value"])
    seconds: float = 0.0
    writing: float = 0.0
    unwritten: bool = False


def needed_values(
    graph: fx.Graph, later: Collection[fx.Node], machine: Machine, *, fused: bool, host: bool = True
) -> list[Value]:
    """The values of a forward that its backward needs, or of which these may be computed, in the order of the graph.

    Args:
        graph: forward and backward of a whole step.
        later: the nodes of the backward.
        machine: what the graph runs on.
        fused: whether a compiler fuses operators.
        host: whether values may be put on the host.
    """
    return _Values(graph, later, machine, fused, host).found()


class _Values:
    def __init__(self, graph: fx.Graph, later: Collection[fx.Node], machine: Machine, fused: bool, host: bool) -> None:
        self.nodes, self.later, self.machine, self.fused, self.host = list(graph.nodes), later, machine, fused, host
        self.place = {node: k for k, node in enumerate(self.nodes)}
        self.home: dict[fx.Node, fx.Node] = {}
        for node in self.nodes:
            self.home[node] = self.home[node.all_input_nodes[0]] if is_view(node) else node
        self.values: dict[fx.Node, Value] = {}

    def found(self) -> list[Value]:
        self._find()
        for value in self.values.values():
            value.kinds = self._kinds(value)
            readers = [x for x in value.node.users if x not in self.later]
            value.unwritten = self.fused and is_fused(value.call.target)
            alone = value.unwritten and all(is_fused(x.target) or is_view(x) for x in readers)
            value.writing = value.bytes / self.machine.memory if alone else 0.0
            value.seconds = self._seconds(value)
        return sorted(self.values.values(), key=lambda v: v.place)

    def _find(self) -> None:
        returned = {self.home[x] for node in self.nodes if node.op == "output" for x in node.all_input_nodes}
        todo: list[Value] = []
        for node in self.nodes:
            for x in node.all_input_nodes:
                home = self.home[x]
                if node in self.later and self._is_open(home, returned):
                    value = self._value(home, todo)
                    value.reads.append(self.place[node])
        while todo:
            value = todo.pop()
            for home in dict.fromkeys([self.home[x] for x in value.call.all_input_nodes]):
                if self._is_open(home, returned):
                    value.made_of.append(self._value(home, todo))
        for node in self.nodes:
            for x in node.all_input_nodes:
                value = self.values.get(self.home[x])
                if value is not None and node not in self.later:
                    value.last = max(value.last, self.place[node])
        for value in self.values.values():
            for x in value.made_of:
                x.makes.append(value)

    def _is_open(self, home: fx.Node, returned: Collection[fx.Node]) -> bool:
        """Whether it is to be decided where the backward has a value from."""
        made = home.op == "call_function" and home not in self.later and home not in returned
        made = made and home.target is not to_host
        return made and isinstance(ir.value(home), torch.Tensor)

    def _value(self, node: fx.Node, todo: list[Value]) -> Value:
        if node not in self.values:
            call = node.all_input_nodes[0] if node.target is getitem else node
            self.values[node] = Value(node, call, self.place[node], sizes.nbytes(node), last=self.place[node])
            todo.append(self.values[node])
        return self.values[node]

    def _kinds(self, value: Value) -> tuple[str, ...]:
        mark, kept = value.node.meta.get("recompute"), KEPT in value.node.meta.get("custom", ())
        again = is_repeatable(value.call) and is_repeatable(value.node) and not ir.is_written(value.node)
        if again and mark in (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE):
            return ("again",)
        saved = kept or mark in (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)
        dense = ir.memory_order(ir.value(value.node)) is not None and not ir.is_written(value.node)
        away = self.host and not kept and dense and value.bytes >= LEAST
        return ("held", *(["away"] if away else []), *(["again"] if again and not saved else []))

    def _seconds(self, value: Value) -> float:
        """Seconds that it takes to compute a value again; of one of several results, what all of them take."""
        call, machine = value.call, self.machine
        if value.unwritten:
            return 0.5 * value.bytes / machine.memory
        moved = sum([sizes.nbytes(x) for x in (*call.all_input_nodes, value.node)])
        found = machine.seconds(estimate.flops_of(call), moved, ir.value(value.node).dtype)
        c = ir.collective(call)
        if c is not None and c.op != "shard":
            found += groups.seconds(c.op, max(value.bytes, sizes.nbytes(c.x)), c.group)
        return found


def machine_of(graph: fx.Graph) -> Machine:
    """What most values of a graph are on, as all ranks know it."""
    kinds: list[Any] = [x.device.type for n in graph.nodes for x in ir.tensors(n)]
    return groups.machine("cuda" if kinds.count("cuda") > len(kinds) / 2 else "cpu")


__all__ = ["Value", "machine_of", "needed_values"]
