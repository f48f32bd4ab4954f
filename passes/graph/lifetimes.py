"""Which bytes a graph holds when: each tensor from the call that makes it to the last that reads it or a view of it.

A call makes all of its results at once, and they are held together until the last of them is taken out.
"""

from collections.abc import Sequence
from operator import getitem
from typing import Any

import torch
from torch import fx

from dtensor.comm.host_memory import to_host
from dtensor.prices.operators import is_fused

from . import estimate, ir, ordered, sizes
from .ordered import called


class Lifetimes:
    """The bytes of a graph as it stands, on the rank that has most of each tensor.

    A compiler writes what it fuses only where something else reads it; until then what it is made of is held. Orders
    of graphs that have been through all passes are kept by what runs them, up to small differences.

    Args:
        graph: the graph.
        fused: whether a compiler fuses operators, as `dtensor.prices.kernels` says.

    Attributes:
        nodes: the nodes, in order.
        memory: node -> the node that made its memory.
        bytes: node -> bytes that it has allocated; one that takes a result out has those of the result, its call those
            of results that nobody takes. Inputs, and what is on the host, have none.
        results: call -> the nodes that take its results out.
        last: node that made memory -> the place of the last node that reads it; the number of nodes if it is returned.
        held: for each place the bytes of tensors that the graph has made, while the node there runs.
        given: bytes of the inputs.
    """

    def __init__(self, graph: fx.Graph, *, fused: bool) -> None:
        self.nodes: list[fx.Node] = list(graph.nodes)
        self.memory: dict[fx.Node, fx.Node] = {}
        for node in self.nodes:
            self.memory[node] = self.memory[node.all_input_nodes[0]] if is_view(node) else node
        unwritten = _unwritten(graph) if fused else set[fx.Node]()
        self.bytes: dict[fx.Node, int] = {
            node: 0 if node in unwritten or self.memory[node] is not node else _made(node) for node in self.nodes
        }
        self.results: dict[fx.Node, list[fx.Node]] = {}
        for node in self.nodes:
            if ir.is_result(node) and self.memory[node] is node:
                self.results.setdefault(node.all_input_nodes[0], []).append(node)
        self.given: int = sum([sizes.nbytes(node) for node in self.nodes if node.op in ("placeholder", "get_attr")])
        self.last: dict[fx.Node, int] = self._last_reads(unwritten)
        self.held: list[int] = self._profile(self._calls() if fused else range(len(self.nodes)))

    @property
    def peak(self) -> int:
        """The most bytes held at once, inputs included."""
        return self.given + max(self.held, default=0)

    def _last_reads(self, unwritten: set[fx.Node]) -> dict[fx.Node, int]:
        last: dict[fx.Node, int] = {}
        for k in range(len(self.nodes) - 1, -1, -1):
            node = self.nodes[k]
            own = self.memory[node]
            read = max(k, last.get(own, k)) if node in unwritten else len(self.nodes) if node.op == "output" else k
            last[own] = max(k, last.get(own, k))
            for x in node.all_input_nodes:
                last[self.memory[x]] = max(read, last.get(self.memory[x], read))
        for call, results in self.results.items():
            taken = last[call]
            for x in results:
                last[x] = max(taken, last[x])
        return last

    def _calls(self) -> Sequence[int]:
        """For each place the last one of the same call: on a CPU generated kernels that follow each other are one."""
        ends = list(range(len(self.nodes)))
        for k in range(len(self.nodes) - 2, -1, -1):
            if _is_generated(self.nodes[k]) and _is_generated(self.nodes[k + 1]):
                ends[k] = ends[k + 1]
        return ends

    def _profile(self, ends: Sequence[int]) -> list[int]:
        dies: dict[int, list[fx.Node]] = {}
        for node, place in self.last.items():
            dies.setdefault(ends[place] if place < len(ends) else place, []).append(node)
        found: list[int] = []
        now = 0
        for k, node in enumerate(self.nodes):
            now += 0 if ir.is_result(node) else sum([self.bytes[x] for x in (node, *self.results.get(node, ()))])
            found.append(now)
            now -= sum([self.bytes[x] for x in dies.get(k, ())])
        return found


def is_view(node: fx.Node) -> bool:
    """Whether a call hands on the memory of its first operand; one of several results of a call has its own."""
    if ordered.is_wrapped(node):
        return False  # but for waits, which take no memory either
    if node.op != "call_function" or not node.all_input_nodes or not ir.aliases(node):
        return False
    whole = node.all_input_nodes[0]
    return node.target is not getitem or isinstance(ir.value(whole), torch.Tensor) or is_view(whole)


def _is_generated(node: fx.Node) -> bool:
    """Whether a node is in a kernel that a compiler generates for a CPU, or takes no time between two of them."""
    if node.op != "call_function":
        return False
    found = ir.tensors(node)
    return is_view(node) or (is_fused(called(node)[0]) and all(x.device.type == "cpu" for x in found))


def _made(node: fx.Node) -> int:
    """Bytes that a node has allocated, as `Lifetimes.bytes`."""
    if node.op != "call_function" or called(node)[0] is to_host:
        return 0
    if isinstance(ir.value(node), torch.Tensor):
        return sizes.nbytes(node)
    results: Any = ir.value(node) if isinstance(ir.value(node), (tuple, list)) else ()
    taken: list[Any] = [user.args[1] for user in node.users]
    left = [x for k, x in enumerate(results) if k not in taken and isinstance(x, torch.Tensor)]
    return sum(map(estimate.bytes_of, left))


def _unwritten(graph: fx.Graph) -> set[fx.Node]:
    """What is computed within a kernel and never written; a copy is made again by each kernel that reads it.

    A reduction is written, as its operand would have to wait for what reads it.
    """
    found = {
        node
        for node, share in estimate.moved(graph, apart=True).items()
        if is_fused(called(node)[0]) and not any(share.written) and not ir.mutates(node) and not _reduces(node)
    }
    copies = graph.find_nodes(op="call_function", target=ir.aten.clone.default)
    return found | {node for node in copies if all(is_fused(called(x)[0]) for x in _readers(node))}


def _reduces(node: fx.Node) -> bool:
    """Whether a node is smaller than what it reads."""
    return any(estimate.bytes_of(x) > sizes.nbytes(node) for given in node.all_input_nodes for x in ir.tensors(given))


def _readers(node: fx.Node) -> list[fx.Node]:
    """What reads a node, or a view of it."""
    found: list[fx.Node] = []
    todo = list(node.users)
    while todo:
        user = todo.pop()
        if is_view(user):
            todo += user.users
        else:
            found.append(user)
    return found


__all__ = ["Lifetimes", "is_view"]
