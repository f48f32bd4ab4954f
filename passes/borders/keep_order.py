"""The order of collectives where shards are uneven: each starts after the one before it."""

from itertools import pairwise

from torch import fx

from dtensor.mesh.provenance import SENT

from ..graph import ordered
from ..graph.count import between_ranks
from ..stages import Compilation, Pass


class KeepOrder(Pass):
    """Makes each collective run after the one before it, in graphs that send uneven shards.

    Before:

        %all_reduce: f32[4] = _c10d_functional.all_reduce(%x, 'sum', tp)
        %all_reduce_1: f32[4] = _c10d_functional.all_reduce(%y, 'sum', tp)

    After:

        %all_reduce: f32[4] = _c10d_functional.all_reduce(%x, 'sum', tp)
        %all_reduce_1: f32[4] = _c10d_functional.all_reduce(%y, 'sum', tp) after [%all_reduce]

    A rank with an empty shard computes less, so fewer of its collectives depend on each other, and Inductor would start
    them in another order. Values stay the same.
    """

    name = "keep_order"
    stage = "borders"
    exactness = "bitwise"
    when = "where Inductor compiles a graph that sends uneven shards"
    required = "ranks could start collectives in different orders and wait for each other forever"

    def taking(self, compilation: Compilation) -> Pass | None:
        return self if compilation.inner == "inductor" else None

    def __call__(self, graph: fx.Graph) -> int:
        found = [node for node, _ in between_ranks(graph)]
        if not any(SENT in node.meta for node in found):
            return 0
        later = {node: [before] for before, node in pairwise(found) if before not in ordered.earlier(node)}
        if later:
            ordered.after(graph, later)
        return len(later)


__all__ = ["KeepOrder"]
