"""A copy of a graph, for what may not change the graph itself."""

from torch import fx


def copy_graph(graph: fx.Graph) -> fx.Graph:
    """Return a copy of `graph` that shares its module's attributes and the values of its nodes."""
    known: dict[fx.Node, fx.Node] = {}
    new = fx.Graph(owning_module=graph.owning_module)
    for node in graph.nodes:
        known[node] = new.node_copy(node, known.__getitem__)
    return new


__all__ = ["copy_graph"]
