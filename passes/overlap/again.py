"""What a backward computes again, or fetches from the host, instead of finding it in memory."""

from collections.abc import Collection
from operator import getitem

from torch import fx

from dtensor.comm.host_memory import from_host_start, to_host
from dtensor.mesh.provenance import AGAIN
from dtensor.prices.machine import Machine

from ..graph import estimate, ir, steps
from ..graph.node_order import rearrange


def compute_again(
    graph: fx.Graph, later: Collection[fx.Node], held: Collection[fx.Node], away: Collection[fx.Node] = ()
) -> int:
    """Let the nodes of a backward read copies of what they read of the forward, but for what is held.

    Args:
        graph: forward and backward, changed in place.
        later: the nodes of the backward.
        held: values of the forward that stay in memory. Others that cannot be computed again stay as well.
        away: values that are put on the host when they have been made, and fetched before they are read.

    Returns:
        How many nodes the backward has more.
    """
    again = _Again(graph, set(held), set(later), away)
    for node in [n for n in graph.nodes if n in again.later]:
        for given in node.all_input_nodes:
            if again.is_due(given):
                steps.take(given)
                node.replace_input_with(given, again.computed(given, node))
    for node in reversed(graph.nodes):
        if not node.users and node not in again.later and is_repeatable(node):
            graph.erase_node(node)
    return again.count


class _Again:
    def __init__(self, graph: fx.Graph, held: set[fx.Node], later: set[fx.Node], away: Collection[fx.Node]) -> None:
        self.held, self.later = held, later
        self.copies: dict[fx.Node, fx.Node] = {}
        self.count = 0
        self.hosts: dict[fx.Node, fx.Node] = {}
        for node in graph.nodes if away else ():
            if node in away:
                self.hosts[node] = ir.insert(node.next, to_host, (node,), like=node)

    def is_due(self, node: fx.Node) -> bool:
        return node not in self.held and node not in self.later and (node in self.hosts or is_repeatable(node))

    def computed(self, node: fx.Node, before: fx.Node) -> fx.Node:
        """The copy of `node`; one that is not there yet is inserted before `before`, with what it is computed from."""
        todo = [node]
        while todo:
            top = todo[-1]
            needed = () if top in self.hosts else top.all_input_nodes
            missing = [x for x in needed if self.is_due(x) and x not in self.copies]
            if missing:
                todo.extend(missing)
                continue
            todo.pop()
            if top not in self.copies:
                self.copies[top] = self._copied(top, before)
        return self.copies[node]

    def _copied(self, node: fx.Node, before: fx.Node) -> fx.Node:
        host = self.hosts.get(node)
        if host is not None:
            start = ir.insert(before, from_host_start, (host, ir.value(node).device), like=node)
            new = [start, ir.insert(before, ir.WAIT, (start,), like=node)]
        else:
            # One of several results is taken out right after its call: all of them are held until the last is.
            call = self.copies.get(node.all_input_nodes[0]) if node.target is getitem else None
            with before.graph.inserting_before(before if call is None else call.next):
                new = [before.graph.node_copy(node, lambda x: self.copies.get(x, x))]
            new[0].meta = dict(node.meta)
        for x in new:
            x.meta.update({"partitioner_tag": "is_backward", AGAIN: True})
        self.count += len(new)
        return new[-1]


def fetch_early(graph: fx.Graph, machine: Machine) -> None:
    """Begin to fetch what is on the host so long before it is read as it takes, where it can travel beside computation.

    Copies travel one after the other, in the order in which they are read.
    """
    starts = graph.find_nodes(op="call_function", target=from_host_start)
    if not starts or not machine.overlap:
        return
    nodes, took = list(graph.nodes), estimate.seconds(graph, machine)
    place = {node: k for k, node in enumerate(nodes)}
    at, left = len(nodes), 0.0
    puts: dict[int, list[fx.Node]] = {}
    for start in reversed(starts):
        at = min(at, place[start])
        left += estimate.bytes_of(ir.value(start)) / machine.host
        first = place[start.all_input_nodes[0]] + 1
        while at > first and left > 0 and ir.in_backward(nodes[at - 1]):
            at -= 1
            left -= took.get(nodes[at], 0.0)
        left = max(left, 0.0)
        puts.setdefault(at, []).insert(0, start)
    moved = set(starts)
    order: list[fx.Node] = []
    for k, node in enumerate(nodes):
        order += puts.get(k, [])
        order += [] if node in moved else [node]
    rearrange(graph, order)


def is_repeatable(node: fx.Node) -> bool:
    """Whether a node may be computed again: it draws no random numbers, has no other effects, and makes tensors. What
    has been put on the host stays there."""
    return ir.is_pure(node) and bool(ir.tensors(node)) and node.target is not to_host


__all__ = ["compute_again", "fetch_early", "is_repeatable"]
