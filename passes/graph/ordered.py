"""Nodes that run after others on which they do not depend: Inductor wraps their calls, so that it keeps the order.

%mm: f32[4,4] = aten.mm(%x, %w) after [%all_reduce]
"""

from collections.abc import Mapping
from typing import Any

from torch import fx
from torch.fx.node import map_arg

from dtensor.torch_private.compiling import control_deps, order_after

from . import steps


def called(node: fx.Node) -> tuple[Any, tuple[Any, ...]]:
    """Return the operator and arguments of a call, without the wrapper that Inductor puts around it for ordering."""
    if node.target is control_deps and len(node.args) > 1:
        inner: Any = getattr(node.graph.owning_module, str(getattr(node.args[1], "target", "")), None)
        calls = [n for n in inner.graph.nodes if n.op == "call_function"] if inner is not None else []
        if inner is not None and len(calls) == 1:
            outer = dict(zip([n for n in inner.graph.nodes if n.op == "placeholder"], node.args[2:]))
            return calls[0].target, tuple(map_arg(calls[0].args, lambda n: outer.get(n, n)))
    return node.target, node.args


def is_wrapped(node: fx.Node) -> bool:
    """Whether a node is wrapped, to run after others."""
    return node.target is control_deps


def is_wrapper(node: fx.Node) -> bool:
    """Whether a node only holds the call of a wrapped node."""
    return node.op == "get_attr" and any(user.target is control_deps and user.args[1] is node for user in node.users)


def earlier(node: fx.Node) -> tuple[fx.Node, ...]:
    """Return the nodes that a wrapped node runs after; none for another node."""
    found: Any = node.args[0] if node.target is control_deps else ()
    return tuple(found)


def wrapped(graph: fx.Graph) -> list[fx.Node]:
    """Return the wrapped nodes of a graph, in no order."""
    return list(graph.find_nodes(op="call_function", target=control_deps, sort=False))


def after(graph: fx.Graph, later: Mapping[fx.Node, list[fx.Node]]) -> None:
    """Make each node run after those listed for it, one step at a time (`steps`); also one that runs after others."""
    if graph.owning_module is None:
        fx.GraphModule({}, graph)
    made: dict[fx.Node, fx.Node] = {}
    for node, before in later.items():
        steps.take(node)
        if is_wrapped(node):
            node.args = ((*earlier(node), *[made.get(x, x) for x in before]), *node.args[1:])
            continue
        following = node.next
        order_after(graph, {node: [made.get(x, x) for x in before]})
        made[node] = following.prev


__all__ = ["after", "called", "earlier", "is_wrapped", "is_wrapper", "wrapped"]
