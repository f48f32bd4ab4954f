"""Recomputing: the backward of a whole step computes values of the forward again, instead of holding them."""

from collections.abc import Callable

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from dtensor.mesh.provenance import PARAMETER
from dtensor.torch_private.partitioning import hold_between_regions, saved_for_backward

from ..graph import ir
from ..stages import INFERENCE, Compilation, Pass
from .again import compute_again, is_repeatable
from .fitting import applied, fitted
from .needed import machine_of


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

    With a bound on memory, `dtensor.passes.overlap.fitting` says what is held, and what is put on the host instead:

        %dropped: f32[64,64] = aten.mul(%mask, %x)                                  not to be drawn again
        %to_host: f32[64,64] = dtensor.to_host(%dropped)
        %from_host_start: f32[64,64] = dtensor.from_host_start(%to_host, cuda:0)    so early that it is there in time
        %wait_tensor: f32[64,64] = _c10d_functional.wait_tensor(%from_host_start)   backward

    Args:
        memory: bytes that a rank may hold, inputs included; None for no bound.
        finished: as in `dtensor.passes.Compilation`.
        fused: whether a compiler fuses operators.
        spare: bytes of the memory that are left free.
    """

    name = "recompute"
    stage = "divide"
    exactness = "bitwise"

    def __init__(
        self,
        memory: int | None = None,
        finished: Callable[[fx.Graph], fx.Graph] = lambda graph: graph,
        fused: bool = False,
        spare: int = 0,
    ) -> None:
        self.memory, self.finished, self.fused, self.spare = memory, finished, fused, spare

    def taking(self, compilation: Compilation) -> Pass | None:
        if compilation.graph != INFERENCE or compilation.within:
            return None
        return Recompute(compilation.memory, compilation.finished, compilation.inner == "inductor", compilation.spare)

    def __call__(self, graph: fx.Graph) -> int:
        later = {node for node in graph.nodes if ir.in_backward(node)}
        if not later:
            return 0
        hold_between_regions(graph)
        if self.memory is not None:
            policy = fitted(graph, later, self.memory, self.finished, fused=self.fused, spare=self.spare)
            return applied(graph, later, policy, machine_of(graph))
        for node in graph.nodes:
            if node not in later and not is_repeatable(node):
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        parameters = {node for node in graph.find_nodes(op="placeholder") if node.meta.get(PARAMETER)}
        held = saved_for_backward(graph, later, parameters)
        count = compute_again(graph, later, held)
        for node in held:
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE  # also where this pass runs again
        return count


__all__ = ["Recompute"]
