"""Dead code: unused calls are removed, collectives included."""

import operator

from torch import fx

from ..graph import ir
from ..stages import Pass


class DeadCode(Pass):
    """Removes calls without users, backwards from the output.

    Before:

        %all_reduce: f32[4] = _c10d_functional.all_reduce(%x, 'sum', tp)
        %wait_tensor: f32[4] = _c10d_functional.wait_tensor(%all_reduce)
        return %x

    After:

        return %x

    FX's own dead code elimination keeps every `wait_tensor`, because it may wait on a buffer that is written in place.
    This pass removes a wait if it waits for the fresh result of a functional start. All ranks run the same graph, so
    all of them drop the same collectives.
    """

    name = "dead_code"
    stage = "simplify"
    exactness = "bitwise"

    def __call__(self, graph: fx.Graph) -> int:
        rewrites = 0
        for node in reversed(list(graph.nodes)):
            if not node.users and is_removable(node):
                graph.erase_node(node)
                rewrites += 1
        return rewrites


def is_removable(node: fx.Node) -> bool:
    """Whether removing `node` loses nothing but its result."""
    if node.op == "get_attr":
        return True
    if node.target is ir.WAIT:
        return _is_start(node.args[0])
    return node.target in ir.STARTS or ir.is_collective(node) or not node.is_impure()


def _is_start(x: object) -> bool:
    if not isinstance(x, fx.Node):
        return False
    return _is_start(x.args[0]) if x.target is operator.getitem else x.target in ir.STARTS


__all__ = ["DeadCode"]
