"""Runs `dtensor.passes` on the graphs that AOTAutograd makes, and records what they did.

    joint graph -> raise, simplify, regather -> partition -> forward and backward -> raise, simplify, lower

The joint graph is simplified first, so that the decision what to save for the backward is based on the collectives that
remain.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from torch import fx

from dtensor import passes
from dtensor.errors import InvalidInputError
from dtensor.passes import PREPARE, SIMPLIFY, CommonSubexpressions, Pass, Raise, Regather, Schedule, SplitBatch
from dtensor.passes.graph import ir
from dtensor.program.source_lines import users_level
from dtensor.program.stages import Stage
from dtensor.torch_private.compiling import check_settled, static_inputs, static_placeholders
from dtensor.torch_private.phases import PASSES, phase
from dtensor.torch_private.symbolic_sizes import binary_products

from ..estimates.estimate import flops
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

# Merging a forward node with an equal backward node would undo the recomputation of activation checkpointing.
NOT_JOINT = (CommonSubexpressions.name,)

Watcher = Callable[[fx.Graph, Sequence[Pass | str], str], None]

WATCHERS: list[Watcher] = []
"""What sees each graph before passes run on it: they are called with the graph, which they must leave as it is, the
passes and the kind of the graph, such as "joint"."""


@phase(PASSES)
def simplify_joint(graph: fx.Graph, options: Options, *, within: bool = False) -> None:
    """Run the simplifying passes on the joint graph of forward and backward, in place.

    Args:
        graph: the joint graph.
        options: the options of the compilation.
        within: whether it is the graph of a branch or a loop body in another graph.

    Raises:
        PassError: a pass left an invalid graph or, with `options.verify`, changed what it computes.
        SizesSettled: the program must be traced again.
    """
    check_settled()
    chosen = [p.name for p in passes.select(options.passes, options.disable)]
    if concerns(graph, chosen):
        joint = [p.name for p in (*PREPARE, *SIMPLIFY) if p.name in chosen and p.name not in NOT_JOINT]
        _run(graph, joint, options, "joint", within=within)


@phase(PASSES)
def prepare_partition(graph: fx.Graph, options: Options, static: Sequence[int]) -> None:
    """Prepare a joint graph for the partitioner, once it is known which inputs are parameters.

    Inputs that the graph writes to are copied if its backward reads them, the batch is split if the options require it,
    and marks for the partitioner state which gathers to recompute in the backward.

    Args:
        graph: the joint graph.
        options: the options of the compilation.
        static: indices of the arguments that are parameters or buffers, before DTensors are flattened.

    Raises:
        PassError: as in `simplify_joint`.
    """
    copy_first(graph)
    mark_parameters(graph, static)
    chosen = [p.name for p in passes.select(options.passes, options.disable)]
    if options.split_batch > 1 and concerns(graph, chosen):
        _run(graph, [SplitBatch(options.split_batch)], options, "joint", resumed=True)
    if Regather.name in chosen:
        passes.run(graph, passes=[Regather(options.memory_budget)], verify=False, meshes=mesh_groups())


def mark_parameters(graph: fx.Graph, static: Sequence[int]) -> None:
    """Mark the inputs of a graph that are parameters or buffers; `static` as `prepare_partition` takes it."""
    for node in static_placeholders(graph, static):
        node.meta[ir.PARAMETER] = True


@phase(PASSES)
def optimise(graph: fx.Graph, options: Options, *, inference: bool = False, within: bool = False) -> None:
    """Run all passes on a forward, backward or inference graph, in place.

    Args:
        graph: the graph.
        options: the options of the compilation.
        inference: whether it is an inference graph, unless it takes tangents.
        within: whether it is the graph of a branch or a loop body in another graph.

    Raises:
        PassError: a pass left an invalid graph or, with `options.verify`, changed what it computes.
        SizesSettled: an inference graph must be traced again.
    """
    if inference:
        check_settled()
    chosen = [p.name for p in passes.select(options.passes, options.disable)]
    if concerns(graph, chosen):
        split: list[Pass] = []
        if inference and not within:
            mark_parameters(graph, static_inputs())
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
    """Run passes and record what they did. `resumed`: passes have run on this graph before, and the records continue.
    `within`: nothing is recorded, since it is unknown how often the graph will run."""
    binary_products(graph)
    traced = passes.collectives(graph)
    for watcher in WATCHERS:
        watcher(graph, chosen, where)
    simulate = simulation(graph, where) if options.verify else None
    frame = current_frame()
    if options.dump and Path(options.dump) not in frame.roots:
        frame.roots.append(Path(options.dump))
    observe = None if within else stage_written(frame, where, resumed=resumed)
    run = partial(passes.run, passes=chosen, traced=True, meshes=mesh_groups(), simulate=simulate, observe=observe)
    try:
        with Stage(f"{where} graph", inside=True):
            done = run(graph)
    except InvalidInputError as error:
        # The passes did not cause this, and it is no reason to refuse the model: run them unverified, with a warning.
        warnings.warn(
            f"the {where} graph is invalid before any pass, so the passes run unverified: {error}",
            stacklevel=users_level(),
        )
        done = run(graph, verify=False)
    if within:
        return
    frame.story(where).flops = flops(graph)
    record(where, traced, graph, done)
    log_passes(frame, where, done)
    if where != "joint":
        finished(frame, where, graph)


def branches(gm: fx.GraphModule) -> Iterator[fx.GraphModule]:
    """Yield the graphs of the branches and loop bodies in a graph, recursively, inner ones first."""
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
    """Whether the graph has operators for the chosen passes: `dtensor::` ones, or those that `raise` turns into
    such."""
    spaces = {getattr(n.target, "namespace", None) for n in graph.nodes}
    return "dtensor" in spaces or (Raise.name in chosen and "_c10d_functional" in spaces)


__all__ = ["NOT_JOINT", "WATCHERS", "branches", "concerns", "direction", "mark_parameters", "optimise"]
__all__ += ["prepare_partition", "simplify_joint"]
