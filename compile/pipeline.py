"""Running `dtensor.passes` on the graphs that AOTAutograd makes, and writing down what they did.

    joint graph -> raise, simplify, regather -> partition -> forward and backward -> raise, simplify, lower

Simplifying the joint graph comes first: what is saved for the backward is then decided on collectives that stay.
"""

import warnings
from collections.abc import Sequence
from functools import partial

from torch import fx

from dtensor import passes
from dtensor._torch import disable_current_modes, static_placeholders
from dtensor.collectives import group_ranks
from dtensor.errors import InvalidInputError
from dtensor.mesh import MeshFacts, known_meshes
from dtensor.passes import PARAMETER, PREPARE, SIMPLIFY, CommonSubexpressions, MeshGroups, Raise, Regather, Schedule

from .agreement import seal
from .dump import observer
from .options import Options
from .pin import pin
from .replay import simulation
from .statistics import record

# One value for forward and backward would undo what activation checkpointing recomputes.
NOT_JOINT = (CommonSubexpressions.name,)


def simplify_joint(graph: fx.Graph, options: Options) -> None:
    """Run the simplifying passes on the joint graph of forward and backward, in place.

    Raises:
        PassError: a pass left an invalid graph or, with `options.verify`, one that computes something else.
    """
    chosen = [p.name for p in passes.select(options.passes, options.disable)]
    if concerns(graph, chosen):
        joint = [p.name for p in (*PREPARE, *SIMPLIFY) if p.name in chosen and p.name not in NOT_JOINT]
        _run(graph, joint, options, "joint")


def choose_saved(graph: fx.Graph, options: Options, static: Sequence[int]) -> None:
    """Tell the partitioner which gathers of a joint graph to do again in the backward, by marks on its nodes.

    `static` are the arguments that are parameters or buffers, by their index before DTensors are taken apart.
    """
    if Regather.name in [p.name for p in passes.select(options.passes, options.disable)]:
        for node in static_placeholders(graph, static):
            node.meta[PARAMETER] = True
        passes.run(graph, passes=[Regather(options.memory_budget)], verify=False, meshes=mesh_groups())


def optimise(graph: fx.Graph, options: Options, *, inference: bool = False) -> None:
    """Run all passes on a forward, backward or inference graph, in place.

    Raises:
        PassError: a pass left an invalid graph or, with `options.verify`, one that computes something else.
    """
    chosen = [p.name for p in passes.select(options.passes, options.disable)]
    if concerns(graph, chosen):
        _run(graph, chosen, options, direction(graph, inference))
        if options.inner == "inductor" and Schedule.name in chosen:
            pin(graph)
        if options.agreement:
            seal(graph, scheduled=options.inner == "inductor")


def _run(graph: fx.Graph, chosen: list[str], options: Options, where: str) -> None:
    traced = passes.collectives(graph)
    simulate = simulation(graph, where) if options.verify else None
    observe = observer(options.dump, where) if options.dump else None
    run = partial(passes.run, passes=chosen, meshes=mesh_groups(), simulate=simulate, observe=observe)
    try:
        done = run(graph)
    except InvalidInputError as error:
        # Not our doing, and no reason to refuse the user's model: what the passes do to it goes unchecked, and is said.
        warnings.warn(
            f"the {where} graph does not verify as it came, so the passes run unchecked: {error}", stacklevel=2
        )
        done = run(graph, verify=False)
    record(where, traced, graph, done)


def mesh_groups() -> tuple[MeshGroups, ...]:
    """What is known of the meshes that tensors live on.

    Facts outlive process groups, whose names are given again: a mesh of groups that were destroyed is left out.
    """
    with disable_current_modes():
        facts = [f for f in known_meshes() if f.groups and _is_alive(f)]
    return tuple(dict.fromkeys([MeshGroups(tuple(sorted(f.groups.items())), f.network) for f in facts]))


def _is_alive(facts: MeshFacts) -> bool:
    """Whether the names of the mesh's groups stand for the ranks that the mesh has there."""
    assert facts.coordinate is not None, "a mesh has groups on its own ranks only"
    for axes, name in facts.groups.items():
        place = tuple([slice(None) if a in axes else at for a, at in enumerate(facts.coordinate)])
        try:
            ranks = group_ranks(name)
        except (RuntimeError, ValueError, KeyError):  # torch's, for a name that no group has
            return False
        if ranks != tuple(facts.mesh.mesh[place].flatten().tolist()):
            return False
    return True


def direction(graph: fx.Graph, inference: bool) -> str:
    """ "backward" for a graph that takes tangents, else "forward" or "inference"."""
    if any(n.op == "placeholder" and n.name.startswith("tangents") for n in graph.nodes):
        return "backward"
    return "inference" if inference else "forward"


def concerns(graph: fx.Graph, chosen: list[str]) -> bool:
    """Whether the graph has what the chosen passes read: `dtensor::` operators, or what `raise` makes of it."""
    spaces = {getattr(n.target, "namespace", None) for n in graph.nodes}
    return "dtensor" in spaces or (Raise.name in chosen and "_c10d_functional" in spaces)


__all__ = ["choose_saved", "concerns", "direction", "mesh_groups", "optimise", "simplify_joint"]
