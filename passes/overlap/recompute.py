"""Recomputing: the backward of a whole step computes values of the forward again, instead of holding them."""

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from dtensor.mesh.provenance import PARAMETER
from dtensor.torch_private.partitioning import saved_for_backward

from ..graph import ir, steps
from ..stages import INFERENCE, Compilation, Pass


class Recompute(Pass):
    """Lets the backward of a whole training step compute again what would take memory until then.

    Before:

        %all_gather: f32[8,4] = dtensor.all_gather(%parameter, 0, 8, dp)            marked by `regather`
        %mm: f32[2,4] = aten.mm(%x, %all_gather)
        %tanh: f32[2,4] = aten.tanh(%mm)
        %mm_1: f32[2,8] = aten.mm(%gradient, %all_gather.t())                       backward

    After:

        %all_gather: f32[8,4] = dtensor.all_gather(%parameter, 0, 8, dp)
        %mm: f32[2,4] = aten.mm(%x, %all_gather)
        %tanh: f32[2,4] = aten.tanh(%mm)
        %all_gather_1: f32[8,4] = dtensor.all_gather(%parameter, 0, 8, dp)          only the shard is held
        %mm_1: f32[2,8] = aten.mm(%gradient, %all_gather_1.t())

    Where forward and backward are two graphs, torch's partitioner has each compute what it needs. A whole step
    (`dtensor.compile.step`) is one graph, in which the same minimum cut (`torch._functorch.partitioners`) says what is
    held. All else that the backward reads is computed again right before it is read first, by the same operators. What
    draws random numbers or has other effects is never computed again.
    """

    name = "recompute"
    stage = "divide"
    exactness = "bitwise"

    def taking(self, compilation: Compilation) -> Pass | None:
        return self if compilation.graph == INFERENCE and not compilation.within else None

    def __call__(self, graph: fx.Graph) -> int:
        later = {node for node in graph.nodes if ir.in_backward(node)}
        if not later:
            return 0
        for node in graph.nodes:
            if node not in later and not _is_repeatable(node):
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        parameters = {node for node in graph.find_nodes(op="placeholder") if node.meta.get(PARAMETER)}
        held = saved_for_backward(graph, later, parameters)
        again = _Again(held, later)
        for node in [n for n in graph.nodes if n in later]:
            for given in node.all_input_nodes:
                if again.is_due(given):
                    steps.take(given)
                    node.replace_input_with(given, again.computed(given, node))
        for node in held:
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE  # also where this pass runs again
        for node in reversed(graph.nodes):
            if not node.users and node not in later and _is_repeatable(node):
                graph.erase_node(node)
        return len(again.copies)


class _Again:
    """What the backward computes again."""

    def __init__(self, held: set[fx.Node], later: set[fx.Node]) -> None:
        self.held, self.later = held, later
        self.copies: dict[fx.Node, fx.Node] = {}

    def is_due(self, node: fx.Node) -> bool:
        return node not in self.held and node not in self.later and _is_repeatable(node)

    def computed(self, node: fx.Node, before: fx.Node) -> fx.Node:
        """The copy of `node`; one that is not there yet is inserted before `before`, with what it is computed from."""
        todo = [node]
        while todo:
            top = todo[-1]
            missing = [x for x in top.all_input_nodes if self.is_due(x) and x not in self.copies]
            if missing:
                todo.extend(missing)
                continue
            todo.pop()
            if top not in self.copies:
                with before.graph.inserting_before(before):
                    self.copies[top] = before.graph.node_copy(top, lambda x: self.copies.get(x, x))
                self.copies[top].meta = {**top.meta, "partitioner_tag": "is_backward"}
        return self.copies[node]


def _is_repeatable(node: fx.Node) -> bool:
    return ir.is_pure(node) and bool(ir.tensors(node))


__all__ = ["Recompute"]
