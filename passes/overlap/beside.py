"""The comparison of inputs travels behind the first collective of the model, and is read before that one is."""

from typing import Any

import torch
from torch import fx

from ..graph import ir, ordered
from ..graph.node_order import rearrange
from ..stages import FORWARD, Compilation, Pass

inputs_alike: Any = torch.ops.dtensor.inputs_alike.default


class Beside(Pass):
    """Starts the exchange by which ranks compare inputs after the first other collective, and waits for it first.

    Before:

        %input_numbers: i64[2] = dtensor.input_numbers([%x])
        %all_gather_into_tensor: i64[4] = _c10d_functional.all_gather_into_tensor(%input_numbers, 2, tp)
        %wait_tensor: i64[4] = _c10d_functional.wait_tensor(%all_gather_into_tensor)
        %inputs_alike: b8[1] = dtensor.inputs_alike(%wait_tensor, [2], [0], ['x'])
        %mm: f32[4,8] = aten.mm(%x, %w)
        %all_reduce: f32[4,8] = _c10d_functional.all_reduce(%mm, 'sum', tp)
        %wait_tensor_1: f32[4,8] = _c10d_functional.wait_tensor(%all_reduce)

    After:

        %mm: f32[4,8] = aten.mm(%x, %w)
        %all_reduce: f32[4,8] = _c10d_functional.all_reduce(%mm, 'sum', tp)
        %input_numbers: i64[2] = dtensor.input_numbers([%x])
        %all_gather_into_tensor: i64[4] = _c10d_functional.all_gather_into_tensor(%input_numbers, 2, tp)
        %wait_tensor: i64[4] = _c10d_functional.wait_tensor(%all_gather_into_tensor)
        %inputs_alike: b8[1] = dtensor.inputs_alike(%wait_tensor, [2], [0], ['x'])
        %wait_tensor_1: f32[4,8] = _c10d_functional.wait_tensor(%all_reduce)

    So it costs no time of its own. Ranks whose inputs have other sizes, whose messages would never arrive, are told
    before they wait for them. Values stay the same.
    """

    name = "beside"
    stage = "overlap"
    exactness = "bitwise"

    def __init__(self, compilation: Compilation | None = None) -> None:
        self.compilation: Compilation = compilation or Compilation(FORWARD)

    def taking(self, compilation: Compilation) -> Pass | None:
        return Beside(compilation)

    def __call__(self, graph: fx.Graph) -> int:
        return sum([self._move(graph, node) for node in graph.find_nodes(op="call_function", target=inputs_alike)])

    def _move(self, graph: fx.Graph, compared: fx.Node) -> int:
        nodes = list(graph.nodes)
        place = {node: k for k, node in enumerate(nodes)}
        own, sent = _own(compared), ir.communicating(graph)
        first = next((node for node in sent if node in own), None)
        if first is None:
            return 0
        others = [(node, wait) for node in sent if node not in own and (wait := _wait(node)) is not None]
        others = [(node, wait) for node, wait in others if place[wait] > place[first]]  # those before it are done
        if not others:
            return 0
        start, wait = others[0][0], min([wait for _, wait in others], key=place.__getitem__)
        mine = sorted(own, key=place.__getitem__)
        cut = mine.index(first) + 1
        if any(place[x] > place[start] for node in mine[:cut] for x in node.all_input_nodes if x not in own):
            return 0
        order: list[fx.Node] = []
        for node in nodes:
            if node is wait:
                order += mine[cut:]
            if node not in own:
                order.append(node)
            if node is start:
                order += mine[:cut]
        rearrange(graph, order)
        if self.compilation.inner == "inductor":
            ordered.after(graph, {first.all_input_nodes[0]: [start], wait: [compared]})
        return 1


def _own(compared: fx.Node) -> set[fx.Node]:
    """The comparison, what reads it, and what nothing else needs."""
    after = [compared]
    for node in after:
        after += [user for user in node.users if user.op != "output" and user not in after]
    own, todo = set(after), [compared]
    while todo:
        for x in todo.pop().all_input_nodes:
            if x.op == "call_function" and x not in own and own.issuperset(x.users):
                own.add(x)
                todo.append(x)
    return own


def _wait(start: fx.Node) -> fx.Node | None:
    return next((user for user in start.users if ordered.called(user)[0] is ir.WAIT), None)


__all__ = ["Beside"]
