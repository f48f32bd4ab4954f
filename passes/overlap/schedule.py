"""Scheduling: collectives start early and are waited for late, within a bound on the bytes in flight."""

from collections import deque
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import fx

from dtensor.job.groups import group_size
from dtensor.mesh.provenance import AGAIN, PART, SENT
from dtensor.torch_private.symbolic_sizes import hint, is_tangent

from ..graph import ir
from ..graph.node_order import Before, dependencies, floating, rearrange
from ..stages import Pass


class Schedule(Pass):
    """Reorders the nodes of a lowered graph so that communication and computation overlap as much as possible.

    Before:

        %mm: f32[4,8] = aten.mm(%x, %y)                                   needed at the end only
        %mm_1: f32[4,8] = aten.mm(%x, %z)
        %all_reduce: f32[4,8] = _c10d_functional.all_reduce(%mm_1, 'sum', tp)
        %wait_tensor: f32[4,8] = _c10d_functional.wait_tensor(%all_reduce)
        %relu: f32[4,8] = aten.relu(%wait_tensor)
        return (%mm, %relu)

    After:

        %mm_1: f32[4,8] = aten.mm(%x, %z)
        %all_reduce: f32[4,8] = _c10d_functional.all_reduce(%mm_1, 'sum', tp)
        %mm: f32[4,8] = aten.mm(%x, %y)
        %wait_tensor: f32[4,8] = _c10d_functional.wait_tensor(%all_reduce)
        %relu: f32[4,8] = aten.relu(%wait_tensor)
        return (%mm, %relu)

    The new order respects data dependencies and effects, so the values stay the same.

    The operands of collectives are computed first, in the order in which the graph starts the collectives. This order
    is kept. Each collective then starts, and the computations follow that stood before the first use of its result and
    are not needed for other collectives. A wait stands directly before the first computation with the received data.

    Before a wait, another collective may start if everything it needs was sent earlier than the collective that is
    waited for. It belongs to a second chain of collectives that does not depend on the first (another microbatch, or
    the other of two parallel layers), so that one chain computes while the other communicates. Its operand may itself
    need a wait, for a collective that started earlier than the one waited for here. So chains take turns, two at a time
    where one follows the other in the graph.

    A collective of what the backward computes again overtakes only the one before it: the further it and what it needs
    were ahead, the more memory would be held that computing again is to save.

    A collective that needs only inputs, such as the gather of a parameter, could start immediately but would then hold
    memory. It is prefetched one ahead, in the order of need: it starts when the one needed before it is waited for.
    Several may be in flight if they are small.

    A reduction whose result no other collective needs, such as that of a gradient, is waited for when too many bytes
    are in flight. So is one whose result only a collective needs that needs many more: the norm of all gradients. If
    another collective sends its result on (the sum over replicas of a reduce-scattered gradient),
    that one starts then.

    `ahead` bounds the bytes of the buffers in flight, started and not yet waited for, separately for each of these
    kinds. One buffer is always allowed. The default is the size of the largest buffer in the graph, with the buffers of
    all microbatches counted as one. An all_reduce of a computed tensor counts nothing: its result replaces its operand,
    so that waiting for it frees no memory. Nor does a collective_permute of one: an operator passes a shard, or sends
    results back, and others of the operator are still to come.

    The order of the starts follows from the graph and from the sizes of their buffers. Where shards are uneven, the
    sizes on the rank with the largest shard count. So the order is the same on all ranks.

    Args:
        ahead: bound on the bytes of the buffers in flight; None for the default.
    """

    name = "schedule"
    stage = "overlap"
    exactness = "bitwise"

    def __init__(self, ahead: int | None = None) -> None:
        self.ahead = ahead

    def __call__(self, graph: fx.Graph) -> int:
        nodes = list(graph.nodes)
        starts = [node for node in nodes if _is_plain(node)]
        if not starts:
            return 0
        parts = 1 + max([node.meta.get(PART, 0) for node in starts])
        sizes = [_in_flight(node) * (parts if PART in node.meta else 1) for node in starts]
        ahead = max(sizes) if self.ahead is None else self.ahead
        before, floats, order = dependencies(graph), floating(nodes), nodes
        for _ in range(ROUNDS):
            last, order = order, _ordered(_Facts(order, before, floats), ahead)
            if last == order:
                break
        moved = sum([a is not b for a, b in zip(nodes, order, strict=True)])
        if moved:
            rearrange(graph, order)
        return moved


ROUNDS = 8
"""The largest number of orders tried until one no longer changes; after the second round few change."""


CHAINED = 4
"""A collective that needs the results of more than so many others is no link of a chain: the norm of all gradients
needs those of all their reductions. (Attention needs the three of queries, keys and values.)"""


def _ordered(facts: "_Facts", ahead: int) -> list[fx.Node]:
    first = _Walk(facts, ahead)
    first.run()
    return _Walk(facts, ahead, first.demanded).run()


def _is_plain(node: fx.Node) -> bool:
    """Whether `node` starts one tensor, which is waited for once."""
    wait = ir.only_user(node) if node.target in ir.STARTS and isinstance(node.args[0], fx.Node) else None
    return wait is not None and wait.target is ir.WAIT


def _in_flight(start: fx.Node) -> int:
    """Bytes held between a start and its wait, on the rank that holds most."""
    sent = start.meta.get(SENT)
    if sent is None:
        return _bytes(ir.value(start)) + _bytes(ir.value(start.all_input_nodes[0]))
    op, n = ir.STARTS[start.target], group_size(str(start.args[-1]))
    return sent + (sent * n if op == "all_gather" else sent // n if op == "reduce_scatter" else sent)


def _bytes(val: torch.Tensor) -> int:
    return hint(val.numel()) * val.element_size()


class _Facts:
    """Facts about the nodes of a graph in a given order. `before` lists what each needs, `floats` which of them float.

    Attributes:
        nodes: the nodes in the given order.
        before: the direct dependencies of each node.
        place: the position of each node.
        needed: the position of the first computation that needs the node.
        computed: whether the node depends on more than inputs and operators that only move their elements.
        next: waits for a computed tensor -> the starts that send it on, with no computation in between.
        behind: the waits for computed tensors that each node needs, leaving out most of those that another of them
            needs.
        then: starts -> the starts whose operands are computed from their results.
        anchors: the computations.
        again: the starts that send what the backward computes again.
        following: starts of computed tensors -> the next of them in the given order.
    """

    def __init__(self, nodes: list[fx.Node], before: Before, floats: frozenset[fx.Node]) -> None:
        self.nodes, self.before = nodes, before
        self.place = {node: k for k, node in enumerate(nodes)}
        self.needed = _first_need(nodes, before, floats, self.place)
        self.computed = _is_computed(nodes, before, floats)
        self.next = _next(nodes, before, floats, self.computed)
        self.behind = _behind(nodes, before, self.computed)
        self.then = _then(nodes, self.behind, {start for starts in self.next.values() for start in starts})
        self.anchors = [node for node in nodes if node not in floats and node.op != "output"]
        starts = [node for node in nodes if _is_plain(node) and self.computed[node]]
        self.following = dict(pairwise(starts))
        gradients = _gradients(nodes, before, floats)
        half = any(is_tangent(node) for node in gradients)
        self.again = {s for s in starts if s not in gradients and (half or ir.in_backward(s))}


class _Walk:
    """One pass over a graph that places its nodes in a new order.

    `prefetched` are the starts that need only inputs, in the order in which they are needed. A walk without them finds
    that order and leaves it in `demanded`.
    """

    def __init__(self, facts: _Facts, ahead: int, prefetched: Sequence[fx.Node] = ()) -> None:
        self.nodes, self.before, self.ahead = facts.nodes, facts.before, ahead
        self.place, self.needed, self.computed = facts.place, facts.needed, facts.computed
        self.next, self.anchors, self.behind, self.then = facts.next, facts.anchors, facts.behind, facts.then
        self.again, self.following = facts.again, facts.following
        self.ready: set[fx.Node] = set()
        self.filled, self.passed = 0, list[fx.Node]()
        self.order: dict[fx.Node, int] = {}
        self.ongoing: set[fx.Node] = set()
        self.wanted, self.overtaking = set[fx.Node](), False
        self.left, self.demanded = deque(prefetched), list[fx.Node]()
        self.later = {start for starts in self.next.values() for start in starts}
        self.flying: dict[str, dict[fx.Node, int]] = {}

    def run(self) -> list[fx.Node]:
        """Return the new order."""
        for node in self.nodes:
            if node.op in ("placeholder", "get_attr"):
                self.put(node)
        self.prefetch()
        starts = [node for node in self.nodes if _is_plain(node) and self.computed[node]]
        self.ready.update([s for s in starts if not self.behind[s] and s not in self.later])
        for start in sorted(starts, key=self.later.__contains__):
            self.wanted.add(start)
            self.need(start)
        for node in self.nodes:
            self.need(node)
        return list(self.order)

    def need(self, node: fx.Node) -> None:
        """Place `node` after everything it needs, in the old order."""
        for x in self.missing(node):
            if x not in self.order:
                self.put(x)

    def missing(self, node: fx.Node) -> list[fx.Node]:
        """`node` and what it needs, as far as not placed yet, in the old order."""
        if node in self.order:
            return []
        todo, found = [node], {node}
        while todo:
            for x in self.before[todo.pop()]:
                if x not in self.order and x not in found:
                    found.add(x)
                    todo.append(x)
        return sorted(found, key=self.place.__getitem__)

    def put(self, node: fx.Node) -> None:
        """Place `node`, whose needs are placed; around starts and waits also place what goes with them."""
        if node.target is ir.WAIT and _is_plain(node.all_input_nodes[0]):
            self.arrive(node, node.all_input_nodes[0])
        elif _is_plain(node) and self.computed[node] and node not in self.then:
            self.make_room(node)
        if node not in self.order:
            self.order[node] = len(self.order)
            self.ready.discard(node)
            if _is_plain(node):
                self.like(node)[node] = self.held(node)
                self.ready.update([s for s in self.then.get(node, ()) if s not in self.later and s not in self.order])
            for start in self.next.get(node, ()):
                if all(x.target is not ir.WAIT for x in self.missing(start)):
                    self.need(start)

    def arrive(self, wait: fx.Node, start: fx.Node) -> None:
        """Place before a wait what can be computed without it, and the start of what is needed next."""
        if wait in self.ongoing:
            return
        self.ongoing.add(wait)
        if not self.overtaking:
            if self.computed[start]:
                self.overtake(start)
            self.fill(self.needed[wait], start)
        self.like(start).pop(start, None)
        if not self.computed[start]:
            self.demanded.append(start)
            self.prefetch()

    def overtake(self, start: fx.Node) -> None:
        """Place before the wait for `start` the first start that needs nothing sent after it, if there is room."""
        for other in sorted(self.ready, key=self.place.__getitem__):
            if other in self.wanted or (other in self.again and self.following.get(start) is not other):
                continue
            if not self.comes_before(other, start):
                continue
            flying = [x for x in self.like(other) if x is not start and _wait_of(x) not in self.behind[other]]
            gathered = [x for x in self.missing(other) if x.target is ir.WAIT and not self.computed[x]]
            if not flying and not gathered:
                self.wanted.add(other)
                self.overtaking = True
                self.need(other)
                self.overtaking = False
            return

    def comes_before(self, node: fx.Node, start: fx.Node) -> bool:
        """Whether everything computed and sent that `node` needs was sent before `start`."""
        waits = [wait for wait in self.behind[node] if wait not in self.order]
        return all(self.order.get(wait.all_input_nodes[0], len(self.order)) < self.order[start] for wait in waits)

    def fill(self, end: int, start: fx.Node) -> None:
        """Place the computations that stood before `end`, except those that need what is sent after `start`."""
        while self.filled < len(self.anchors) and self.place[self.anchors[self.filled]] < end:
            self.passed.append(self.anchors[self.filled])
            self.filled += 1
        passed, self.passed = self.passed, []
        for node in passed:
            if node not in self.order and self.computed[start] and not self.comes_before(node, start):
                self.passed.append(node)
            else:
                self.need(node)

    def prefetch(self) -> None:
        """Start the collectives needed next, as far as there is room, and at least one."""
        while self.left:
            start = self.left[0]
            flying = self.like(start)
            missing = self.missing(start)
            full = flying and sum(flying.values()) + _in_flight(start) > self.ahead
            # A gather in two steps cannot start its second step before the first is waited for.
            if missing and (full or any(x.target is ir.WAIT for x in missing)):
                return
            self.left.popleft()
            self.need(start)

    def make_room(self, start: fx.Node) -> None:
        """Wait for the oldest starts until there is room for `start`."""
        flying = self.like(start)
        while flying and self.held(start) and sum(flying.values()) + self.held(start) > self.ahead:
            oldest = next(iter(flying))
            self.ongoing.add(_wait_of(oldest))
            self.need(_wait_of(oldest))
            flying.pop(oldest, None)

    def held(self, start: fx.Node) -> int:
        """Bytes in flight that an earlier wait would free, or that a later start would not take up yet."""
        free = self.computed[start] and ir.STARTS[start.target] in ("all_reduce", "collective_permute")
        return 0 if free else _in_flight(start)

    def like(self, start: fx.Node) -> dict[fx.Node, int]:
        """The bytes in flight for each start of the same kind."""
        if not self.computed[start]:
            return self.flying.setdefault("of inputs", {})
        kind = "sent on" if start in self.later else "chained" if start in self.then else "last"
        return self.flying.setdefault(kind, {})


def _wait_of(start: fx.Node) -> fx.Node:
    return next(iter(start.users))


def _first_need(
    nodes: list[fx.Node], before: Before, floats: frozenset[fx.Node], place: dict[fx.Node, int]
) -> dict[fx.Node, int]:
    found = {node: len(nodes) for node in nodes}
    for node in reversed(nodes):
        mine = found[node] if node in floats else place[node]
        for x in before[node]:
            found[x] = min(found[x], mine)
    return found


def _next(
    nodes: list[fx.Node], before: Before, floats: frozenset[fx.Node], computed: dict[fx.Node, bool]
) -> dict[fx.Node, list[fx.Node]]:
    found: dict[fx.Node, list[fx.Node]] = {}
    above: dict[fx.Node, dict[fx.Node, None]] = {}
    for node in nodes:
        above[node] = {}
        if node.target is ir.WAIT and computed[node]:
            above[node] = {node: None}
        elif node in floats:
            above[node] = {wait: None for x in before[node] for wait in above[x]}
        if _is_plain(node) and all(x in floats for x in before[node]):
            for wait in above[node]:
                found.setdefault(wait, []).append(node)
    return found


def _behind(nodes: list[fx.Node], before: Before, computed: dict[fx.Node, bool]) -> dict[fx.Node, dict[fx.Node, None]]:
    found: dict[fx.Node, dict[fx.Node, None]] = {}
    for node in nodes:
        waits: dict[fx.Node, None] = {}
        for x in before[node]:
            waits.update({x: None} if x.target is ir.WAIT and computed[x] else found[x])
        above = {w for wait in waits for w in found[wait]} if len(waits) > 1 else ()
        found[node] = {wait: None for wait in waits if wait not in above}
    return found


def _then(
    nodes: list[fx.Node], behind: dict[fx.Node, dict[fx.Node, None]], sent_on: set[fx.Node]
) -> dict[fx.Node, list[fx.Node]]:
    found: dict[fx.Node, list[fx.Node]] = {}
    for node in nodes:
        if _is_plain(node) and node not in sent_on and len(behind[node]) <= CHAINED:
            for wait in behind[node]:
                found.setdefault(wait.all_input_nodes[0], []).append(node)
    return found


def _gradients(nodes: list[fx.Node], before: Before, floats: frozenset[fx.Node]) -> set[fx.Node]:
    """The nodes that depend on gradients. What a backward computes and moves of other values it computes again."""
    found: set[fx.Node] = set()
    for node in nodes:
        own = ir.in_backward(node) and node not in floats and AGAIN not in node.meta
        if own or (node.op == "placeholder" and is_tangent(node)) or any(x in found for x in before[node]):
            found.add(node)
    return found


def _is_computed(nodes: list[fx.Node], before: Before, floats: frozenset[fx.Node]) -> dict[fx.Node, bool]:
    found: dict[fx.Node, bool] = {}
    for node in nodes:
        found[node] = node not in floats or any(found[x] for x in before[node])
    return found


__all__ = ["Schedule"]
