"""Running `dtensor.passes` on the graphs that AOTAutograd makes, and writing down what they did.

    joint graph -> raise, simplify, regather -> partition -> forward and backward -> raise, simplify, lower

Simplifying the joint graph comes first: what is saved for the backward is then decided on collectives that stay.
"""

import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from torch import fx

from dtensor import passes
from dtensor.errors import InvalidInputError
from dtensor.passes import PREPARE, SIMPLIFY, CommonSubexpressions, Pass, Raise, Regather, Schedule, SplitBatch
from dtensor.passes.graph import ir
from dtensor.torch_private.compiling import check_settled, static_inputs, static_placeholders
from dtensor.torch_private.symbolic_sizes import binary_products

from ..estimates.meshes import mesh_groups
from ..recording.frames import current_frame
from ..recording.logs import log_passes
from ..recording.statistics import record
from ..recording.watch_compiles import finished, stage_written
from .insert_agreement import seal
from .options import Options
from .pin_order import pin
from .replay import simulation
from .written_inputs import copy_first

# One value for forward and backward would undo what activation checkpointing recomputes.
NOT_JOINT = (CommonSubexpressions.name,)


def simplify_joint(graph: fx.Graph, options: Options, *, within: bool = False) -> None:
    """Run the simplifying passes on the joint graph of forward and backward, in place.

    `within`: it is the graph of a branch or a body in another graph.

    Raises:
        PassError: a pass left an invalid graph or, with `options.verify`, one that computes something else.
        SizesSettled: it is to be traced again.
    """
    check_settled()
    chosen = [p.name for p in passes.select(options.passes, options.disable)]
    if concerns(graph, chosen):
        joint = [p.name for p in (*PREPARE, *SIMPLIFY) if p.name in chosen and p.name not in NOT_JOINT]
        _run(graph, joint, options, "joint", within=within)


def prepare_partition(graph: fx.Graph, options: Options, static: Sequence[int]) -> None:
    """What is done to a joint graph once it is known what its parameters are.

    Inputs that it writes to are copied if its backward reads them, the batch is split, where options say so, and marks
    tell the partitioner which gathers to do again in the backward.

    `static` are the arguments that are parameters or buffers, by their index before DTensors are taken apart.

    Raises:
        PassError: as `simplify_joint`.
    """
    copy_first(graph)
    _mark_parameters(graph, static)
    chosen = [p.name for p in passes.select(options.passes, options.disable)]
    if options.split_batch > 1 and concerns(graph, chosen):
        _run(graph, [SplitBatch(options.split_batch)], options, "joint", resumed=True)
    if Regather.name in chosen:
        passes.run(graph, passes=[Regather(options.memory_budget)], verify=False, meshes=mesh_groups())


def _mark_parameters(graph: fx.Graph, static: Sequence[int]) -> None:
    for node in static_placeholders(graph, static):
        node.meta[ir.PARAMETER] = True


def optimise(graph: fx.Graph, options: Options, *, inference: bool = False, within: bool = False) -> None:
    """Run all passes on a forward, backward or inference graph, in place.

    `within`: it is the graph of a branch or a body in another graph.

    Raises:
        PassError: a pass left an invalid graph or, with `options.verify`, one that computes something else.
        SizesSettled: an inference graph is to be traced again.
    """
    if inference:
        check_settled()
    chosen = [p.name for p in passes.select(options.passes, options.disable)]
    if concerns(graph, chosen):
        split: list[Pass] = []
        if inference and not within:
            _mark_parameters(graph, static_inputs())
            split = [SplitBatch(options.split_batch)] if options.split_batch > 1 else []
        where = direction(graph, inference)
        _run(graph, [*split, *chosen], options, where, within=within)
        if options.inner == "inductor" and Schedule.name in chosen:
            pin(graph)
        seal(graph, where, scheduled=options.inner == "inductor", agreement=options.agreement)


def _run(
    graph: fx.Graph,
    chosen: Sequence[Pass | str],
    options: Options,
    where: str,
    *,
    resumed: bool = False,
    within: bool = False,
) -> None:
    """`resumed`: passes have run on this graph before, of which the records go on. `within`: nothing is taken down, as
    it is not known how often the graph will run."""
    binary_products(graph)
    traced = passes.collectives(graph)
    simulate = simulation(graph, where) if options.verify else None
    frame = current_frame()
    if options.dump and Path(options.dump) not in frame.roots:
        frame.roots.append(Path(options.dump))
    observe = None if within else stage_written(frame, where, resumed=resumed)
    run = partial(passes.run, passes=chosen, traced=True, meshes=mesh_groups(), simulate=simulate, observe=observe)
    try:
        done = run(graph)
    except InvalidInputError as error:
        # Not our doing, and no reason to refuse the user's model: what the passes do to it goes unchecked, and is said.
        warnings.warn(
            f"the {where} graph does not verify as it came, so the passes run unchecked: {error}", stacklevel=2
        )
        done = run(graph, verify=False)
    if within:
        return
    record(where, traced, graph, done)
    log_passes(frame, where, done)
    if where != "joint":
        finished(frame, where, graph)


def branches(gm: fx.GraphModule) -> Iterator[fx.GraphModule]:
    """The graphs of the branches and bodies in a graph, and in these, inner ones first."""
    used = {str(node.target) for node in gm.graph.find_nodes(op="get_attr")}
    for name, child in gm.named_children():
        if name in used and isinstance(child, fx.GraphModule):
            yield from branches(child)
            yield child


def direction(graph: fx.Graph, inference: bool) -> str:
    """ "backward" for a graph that takes tangents, else "forward" or "inference"."""
    if any(n.op == "placeholder" and n.name.startswith("tangents") for n in graph.nodes):
        return "backward"
    return "inference" if inference else "forward"


def concerns(graph: fx.Graph, chosen: list[str]) -> bool:
    """Whether the graph has what the chosen passes read: `dtensor::` operators, or what `raise` makes of it."""
    spaces = {getattr(n.target, "namespace", None) for n in graph.nodes}
    return "dtensor" in spaces or (Raise.name in chosen and "_c10d_functional" in spaces)


__all__ = ["branches", "concerns", "direction", "optimise", "prepare_partition", "simplify_joint"]
