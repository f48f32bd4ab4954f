"""Running `dtensor.passes` on one graph that AOTAutograd made, and writing down what they did."""

from torch import fx

from dtensor import passes

from .options import Options
from .statistics import record


def optimise(gm: fx.GraphModule, options: Options, *, inference: bool = False) -> None:
    """Run the passes on `gm` in place.

    Raises:
        PassError: a pass left an invalid graph.
    """
    traced = passes.collectives(gm.graph)
    if not traced and not _has_ours(gm.graph):
        return
    done = passes.run(gm, passes=options.passes, disable=options.disable, verify=options.verify)
    record(direction(gm.graph, inference), traced, gm.graph, done)


def direction(graph: fx.Graph, inference: bool) -> str:
    """ "backward" for a graph that takes tangents, else "forward" or "inference"."""
    if any(n.op == "placeholder" and n.name.startswith("tangents") for n in graph.nodes):
        return "backward"
    return "inference" if inference else "forward"


def _has_ours(graph: fx.Graph) -> bool:
    return any(getattr(n.target, "namespace", None) == "dtensor" for n in graph.nodes)


__all__ = ["direction", "optimise"]
