"""The driver of the pipeline: runs the stages of `dtensor.passes.STAGES` on each graph, and records what they did.

    joint graph -> `simplify_joint` -> `prepare_partition` -> the partitioner -> forward and backward -> `optimise`

aot_eager, Inductor through `backend="dtensor"` and plain Inductor call these three, and nothing else here changes a
graph.
"""

import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from torch import fx

from dtensor import passes
from dtensor.comm.replication_check import drawn
from dtensor.dispatch.whole_graph import now
from dtensor.errors import ArgumentError, InvalidInputError
from dtensor.mesh.provenance import PARAMETER, keeps_specs
from dtensor.passes import STAGES, Compilation, Pass, Raise, Simulation
from dtensor.passes.graph.estimate import flops
from dtensor.passes.runner import Observer, Runner, planned
from dtensor.passes.stages import BACKWARD, FORWARD, HALVES, INFERENCE, JOINT, MARKED
from dtensor.program.source_lines import users_level
from dtensor.program.stages import Stage
from dtensor.torch_private.compiling import check_settled, static_inputs, static_placeholders
from dtensor.torch_private.partitioning import tag_backward
from dtensor.torch_private.phases import PASSES, current, phase
from dtensor.torch_private.symbolic_sizes import binary_products

from ..estimates.meshes import mesh_groups
from ..recording.frames import Frame, current_frame
from ..recording.logs import log_passes
from ..recording.statistics import record
from ..recording.taps import FrameTaps
from ..recording.watch_compiles import finished, sent_counted, stage_written
from .compare_ranks import hear
from .options import Options
from .replay import simulation

Watcher = Callable[[fx.Graph, Sequence[Pass], str], None]

WATCHERS: list[Watcher] = []
"""What sees each graph before passes run on it: they are called with the graph, which they must leave as it is, the
passes and the kind of the graph, such as "joint"."""

LAST = frozenset([stage.name for stage in STAGES if not stage.open])
"""The stages that change nothing about what a graph sends and computes: they insert calls for others."""

OURS = re.compile(r"^FSDP|(?<=forward)_\d+$")
"""What this library adds to the names of classes and of their forwards."""


@phase(PASSES)
def simplify_joint(graph: fx.Graph, options: Options, *, within: bool = False) -> None:
    """Run the stages of the joint graph of forward and backward, in place.

    Args:
        graph: the joint graph.
        options: the options of the compilation.
        within: whether it is the graph of a branch or a loop body in another graph.

    Raises:
        PassError: a pass left an invalid graph or, with `options.verify`, changed what it computes.
        SizesSettled: the program must be traced again.
    """
    check_settled()
    _run(graph, options, JOINT, within)


@phase(PASSES)
def prepare_partition(graph: fx.Graph, options: Options, static: Sequence[int]) -> None:
    """Run the stages of a joint graph once it is known which inputs are parameters, before it is partitioned.

    Args:
        graph: the joint graph.
        options: the options of the compilation.
        static: indices of the arguments that are parameters or buffers, before DTensors are flattened.

    Raises:
        PassError: as in `simplify_joint`.
        ValueError: the option `memory` is given, which is for whole steps.
    """
    if options.memory is not None:
        raise ArgumentError(
            f"memory={options.memory:,} bounds what a whole training step holds, and this graph ends with gradients; "
            "compile the step, optimizer included, by dtensor.compile.step(train, memory=...)"
        )
    mark_parameters(graph, static)
    _run(graph, options, MARKED)


@phase(PASSES)
def optimise(graph: fx.Graph, options: Options, *, inference: bool = False, within: bool = False) -> None:
    """Run the stages of a forward, backward or inference graph, in place.

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
        if not within:
            mark_parameters(graph, static_inputs())
            tag_backward(graph)
    _run(graph, options, direction(graph, inference), within)


def partitioned(
    gm: fx.GraphModule, joint_inputs: Any, options: Options, partition: Callable[..., Any], **kwargs: Any
) -> Any:
    """Run the stages before the partitioner, then `partition`, and return what it returns."""
    prepare_partition(gm.graph, options, kwargs.get("static_lifetime_input_indices") or ())
    gm.recompile()
    return partition(gm, joint_inputs, **kwargs)


def mark_parameters(graph: fx.Graph, static: Sequence[int]) -> None:
    """Mark the inputs of a graph that are parameters or buffers; `static` as `prepare_partition` takes it."""
    for node in static_placeholders(graph, static):
        node.meta[PARAMETER] = True


_spare: ContextVar[int] = ContextVar("spare", default=0)


@contextmanager
def sparing(bytes: int) -> Iterator[None]:
    """Context in which so much of the memory that a step may hold is left to what a compiler makes of its graph."""
    token = _spare.set(bytes)
    try:
        yield
    finally:
        _spare.reset(token)


def compilation_of(options: Options, kind: str, frame: Frame, within: bool = False) -> Compilation:
    """Return what passes may take when a graph of that kind is compiled."""
    return Compilation(
        kind,
        options.inner,
        frozenset([p.name for p in options.chosen()]),
        options.memory_budget,
        options.memory,
        _spare.get(),
        options.split_batch,
        options.agreement,
        within,
        mesh_groups(),
        frame_name(frame),
        lambda number: frame.asked[number].module if number in frame.asked else "",
        drawn(),
        FrameTaps(frame) if keeps_specs() else None,
    )


def frame_name(frame: Frame) -> str:
    """The name of a compiled function as the program has it, such as "MLP.forward"."""
    compilation = current()
    name = frame.name if compilation is None else compilation.name.removesuffix(" (backward)")
    return OURS.sub("", name)


def run_anywhere(graph: fx.Graph, kind: str, *, within: bool = False) -> None:
    """Run, on a graph that communicates nothing or is to be left alone, only the passes that run anywhere.

    Args:
        graph: the graph.
        kind: its kind, as in `dtensor.passes.Compilation`.
        within: whether it is the graph of a branch or a loop body in another graph.
    """
    taps = FrameTaps(current_frame()) if keeps_specs() else None
    chosen = planned(Compilation(kind, within=within, taps=taps), (), (), communicates=False)
    if chosen:
        _runner(graph, kind).run(chosen)


def _run(graph: fx.Graph, options: Options, kind: str, within: bool = False) -> None:
    """Run the stages of a kind of graph, and record what they did. Of a graph within another, which runs unknown times,
    nothing is recorded."""
    if not concerns(graph, options):
        return run_anywhere(graph, kind, within=within)
    frame, where = current_frame(), JOINT if kind == MARKED else kind
    compilation = compilation_of(options, kind, frame, within)
    chosen = planned(compilation, options.chosen(), options.disable, communicates=True)
    binary_products(graph)
    traced = passes.collectives(graph)
    for watcher in WATCHERS:
        watcher(graph, chosen, where)
    if kind in (JOINT, INFERENCE) and not within:
        frame.decided = now.told
    if options.dump and Path(options.dump) not in frame.roots:
        frame.roots.append(Path(options.dump))
    simulate = simulation(graph, where) if options.verify else None
    observe = None if within else stage_written(frame, where, resumed=kind == MARKED)
    with Stage(f"{where} graph", inside=True):
        runner = _runner(graph, where, simulate, observe)
        runner.run([p for p in chosen if p.stage not in LAST], compilation.meshes)
        sent = passes.collectives(graph)
        if kind in HALVES:
            _as_it_runs(graph, frame, where, options, within)
        elif kind == JOINT and not within:
            frame.story(where).flops = flops(graph)
        runner.run([p for p in chosen if p.stage in LAST], compilation.meshes)
    if not within:
        record(where, traced, sent, runner.records, resumed=kind == MARKED)
        log_passes(frame, where, runner.records)
        if kind in HALVES:
            finished(frame)
    return None


def _runner(graph: fx.Graph, where: str, simulate: Simulation | None = None, observe: Observer | None = None) -> Runner:
    try:
        return Runner(graph, traced=True, simulate=simulate, observe=observe)
    except InvalidInputError as error:
        # The passes did not cause this, and it is no reason to refuse the model: run them unverified, with a warning.
        warnings.warn(
            f"the {where} graph is invalid before any pass, so the passes run unverified: {error}",
            stacklevel=users_level(),
        )
        return Runner(graph, verify=False, simulate=simulate, observe=observe)


def _as_it_runs(graph: fx.Graph, frame: Frame, where: str, options: Options, within: bool) -> None:
    """Record what a graph sends and computes, before calls for others are inserted, which cost nothing."""
    if options.agreement:
        hear(graph)
    if not within:
        frame.story(where).flops = flops(graph)
        sent_counted(frame, where, graph)


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
        return BACKWARD
    return INFERENCE if inference else FORWARD


def concerns(graph: fx.Graph, options: Options) -> bool:
    """Whether the graph has operators for the chosen passes: `dtensor::` ones, or those that `raise` turns into
    such."""
    spaces = {getattr(n.target, "namespace", None) for n in graph.nodes}
    raised = any(p.name == Raise.name for p in options.chosen())
    return "dtensor" in spaces or (raised and "_c10d_functional" in spaces)


__all__ = ["LAST", "WATCHERS", "branches", "compilation_of", "concerns", "direction", "frame_name", "mark_parameters"]
__all__ += ["optimise", "partitioned", "prepare_partition", "run_anywhere", "simplify_joint"]
