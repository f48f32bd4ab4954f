"""Running `dtensor.passes` on the graphs that AOTAutograd makes, and writing down what they did.

    joint graph -> simplify -> partition -> forward and backward graph -> simplify, lower -> inner compiler

Simplifying the joint graph comes first: what is saved for the backward is then decided on collectives that stay.
"""

import warnings

from torch import fx

from dtensor import mesh, passes
from dtensor.errors import InvalidInputError
from dtensor.passes import SIMPLIFY, CommonSubexpressions, MeshGroups

from .options import Options
from .statistics import record

# One value for forward and backward would undo what activation checkpointing recomputes.
NOT_JOINT = (CommonSubexpressions.name,)


def simplify_joint(graph: fx.Graph, options: Options) -> None:
    """Run the simplifying passes on the joint graph of forward and backward, in place.

    Raises:
        PassError: a pass left an invalid graph.
    """
    if not has_ours(graph):
        return
    chosen = [p.name for p in passes.select(options.passes, options.disable)]
    simplify = [p.name for p in SIMPLIFY if p.name in chosen and p.name not in NOT_JOINT]
    _run(graph, simplify, options, "joint")


def optimise(graph: fx.Graph, options: Options, *, inference: bool = False) -> None:
    """Run all passes on a forward, backward or inference graph, in place.

    Raises:
        PassError: a pass left an invalid graph.
    """
    if has_ours(graph):
        chosen = [p.name for p in passes.select(options.passes, options.disable)]
        _run(graph, chosen, options, direction(graph, inference))


def _run(graph: fx.Graph, chosen: list[str], options: Options, where: str) -> None:
    traced = passes.collectives(graph)
    try:
        done = passes.run(graph, passes=chosen, verify=options.verify, meshes=mesh_groups())
    except InvalidInputError as error:
        # Not our doing, and no reason to refuse the user's model: what the passes do to it goes unchecked, and is said.
        warnings.warn(
            f"the {where} graph does not verify as it came, so the passes run unchecked: {error}", stacklevel=2
        )
        done = passes.run(graph, passes=chosen, verify=False, meshes=mesh_groups())
    record(where, traced, graph, done)


def mesh_groups() -> tuple[MeshGroups, ...]:
    """Of the meshes that tensors live on, those with several groups: the others tell the passes nothing."""
    facts = [f for f in mesh._facts.values() if len(f.groups) > 1]
    return tuple(dict.fromkeys([MeshGroups(tuple(sorted(f.groups.items())), f.network) for f in facts]))


def direction(graph: fx.Graph, inference: bool) -> str:
    """ "backward" for a graph that takes tangents, else "forward" or "inference"."""
    if any(n.op == "placeholder" and n.name.startswith("tangents") for n in graph.nodes):
        return "backward"
    return "inference" if inference else "forward"


def has_ours(graph: fx.Graph) -> bool:
    """Whether the graph calls one of the `dtensor::` operators."""
    return any(getattr(n.target, "namespace", None) == "dtensor" for n in graph.nodes)


__all__ = ["direction", "has_ours", "mesh_groups", "optimise", "simplify_joint"]
