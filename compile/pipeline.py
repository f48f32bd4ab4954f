"""Running `dtensor.passes` on the graphs that AOTAutograd makes, and writing down what they did.

    joint graph -> raise, simplify -> partition -> forward and backward -> raise, simplify, lower -> inner compiler

Simplifying the joint graph comes first: what is saved for the backward is then decided on collectives that stay.
"""

import warnings

from torch import fx

from dtensor import passes
from dtensor.errors import InvalidInputError
from dtensor.passes import PREPARE, SIMPLIFY, CommonSubexpressions, Raise

from .agreement import seal
from .options import Options
from .statistics import record

# One value for forward and backward would undo what activation checkpointing recomputes.
NOT_JOINT = (CommonSubexpressions.name,)


def simplify_joint(graph: fx.Graph, options: Options) -> None:
    """Run the simplifying passes on the joint graph of forward and backward, in place.

    Raises:
        PassError: a pass left an invalid graph.
    """
    chosen = [p.name for p in passes.select(options.passes, options.disable)]
    if concerns(graph, chosen):
        joint = [p.name for p in (*PREPARE, *SIMPLIFY) if p.name in chosen and p.name not in NOT_JOINT]
        _run(graph, joint, options, "joint")


def optimise(graph: fx.Graph, options: Options, *, inference: bool = False) -> None:
    """Run all passes on a forward, backward or inference graph, in place.

    Raises:
        PassError: a pass left an invalid graph.
    """
    chosen = [p.name for p in passes.select(options.passes, options.disable)]
    if concerns(graph, chosen):
        _run(graph, chosen, options, direction(graph, inference))
        if options.agreement:
            seal(graph, scheduled=options.inner == "inductor")


def _run(graph: fx.Graph, chosen: list[str], options: Options, where: str) -> None:
    traced = passes.collectives(graph)
    try:
        done = passes.run(graph, passes=chosen, verify=options.verify)
    except InvalidInputError as error:
        # Not our doing, and no reason to refuse the user's model: what the passes do to it goes unchecked, and is said.
        warnings.warn(
            f"the {where} graph does not verify as it came, so the passes run unchecked: {error}", stacklevel=2
        )
        done = passes.run(graph, passes=chosen, verify=False)
    record(where, traced, graph, done)


def direction(graph: fx.Graph, inference: bool) -> str:
    """ "backward" for a graph that takes tangents, else "forward" or "inference"."""
    if any(n.op == "placeholder" and n.name.startswith("tangents") for n in graph.nodes):
        return "backward"
    return "inference" if inference else "forward"


def concerns(graph: fx.Graph, chosen: list[str]) -> bool:
    """Whether the graph has what the chosen passes read: `dtensor::` operators, or what `raise` makes of it."""
    spaces = {getattr(n.target, "namespace", None) for n in graph.nodes}
    return "dtensor" in spaces or (Raise.name in chosen and "_c10d_functional" in spaces)


__all__ = ["concerns", "direction", "optimise", "simplify_joint"]
