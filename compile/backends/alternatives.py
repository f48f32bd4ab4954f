"""What a step would take with other options: the passes run again on copies of a joint graph, and nothing runs.

Only frames that are dumped are priced, as it costs the time of the passes once more for each alternative. The prices
are those of the timeline of the graphs that would result.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from torch import fx

from dtensor import passes
from dtensor.mesh.provenance import TRACED
from dtensor.passes import MeshGroups
from dtensor.passes.graph.copying import copy_graph
from dtensor.passes.graph.groups import known
from dtensor.passes.runner import planned
from dtensor.passes.stages import JOINT, MARKED

from ..estimates.meshes import mesh_groups
from ..estimates.timeline import timeline
from ..estimates.traffic import traffic
from ..recording.folder import is_wanted
from ..recording.frames import Alternative, current_frame
from .options import Options
from .run_passes import LAST, compilation_of, concerns, direction, mark_parameters

Partitioner = Callable[..., tuple[fx.GraphModule, fx.GraphModule]]

ALL = 1 << 62
"""A memory budget that saves everything that was gathered."""


def changes(options: Options) -> Iterator[tuple[str, Options]]:
    """Yield what can be changed about options to communicate less or later, with the resulting options."""
    if options.split_batch == 1:
        yield "split_batch", replace(options, split_batch=2)
    if options.memory_budget != ALL and options.memory is None:
        yield "memory_budget", replace(options, memory_budget=ALL)
    if options.passes is not None or options.disable:
        yield "passes", replace(options, passes=None, disable=())


def price_alternatives(
    gm: fx.GraphModule, joint_inputs: Any, options: Options, partition: Partitioner, **kwargs: Any
) -> None:
    """Price the alternatives to `options` for a joint graph, before it is prepared for the partitioner, and record them
    in its frame. The graph stays as it is.

    Args:
        gm: the simplified joint graph.
        joint_inputs: its inputs.
        options: the options of the compilation.
        partition: the partitioner that splits it.
        kwargs: what the partitioner is called with.
    """
    frame = current_frame()
    if not is_wanted(frame) or not concerns(gm.graph, Options()):
        return
    meshes = mesh_groups()
    for name, other in changes(options):
        copy = fx.GraphModule(gm, copy_graph(gm.graph))
        copy.meta.update(gm.meta)
        try:
            with known(meshes):
                frame.alternatives.append(_priced(name, copy, joint_inputs, other, partition, meshes, kwargs))
        except Exception as error:  # whatever it is, the program itself compiles
            frame.alternatives.append(Alternative(name, failed=f"{type(error).__name__}: {error}".splitlines()[0]))


def _priced(
    name: str,
    gm: fx.GraphModule,
    joint_inputs: Any,
    options: Options,
    partition: Partitioner,
    meshes: tuple[MeshGroups, ...],
    kwargs: dict[str, Any],
) -> Alternative:
    def on(graph: fx.Graph, kind: str) -> None:
        compilation = compilation_of(options, kind, current_frame())
        chosen = planned(compilation, options.chosen(), options.disable, communicates=True)
        passes.run(graph, passes=[p for p in chosen if p.stage not in LAST], verify=False, meshes=meshes)

    if name == "passes":
        on(gm.graph, JOINT)
    mark_parameters(gm.graph, kwargs.get("static_lifetime_input_indices") or ())
    on(gm.graph, MARKED)
    gm.recompile()
    made = Alternative(name)
    for half in partition(gm, joint_inputs, **kwargs):
        where = direction(half.graph, False)
        on(half.graph, where)
        found = timeline(half.graph)
        made.seconds[where], made.peak[where] = found.seconds, found.peak
        exposed = {s.number: s.exposed for s in found.spans if s.communicates}
        for k, (node, _) in enumerate(traffic(half.graph)):
            numbers = node.meta.get(TRACED, ())
            for n in numbers:
                made.exposed[where, n] = made.exposed.get((where, n), 0.0) + exposed[k] / len(numbers)
    return made


__all__ = ["ALL", "changes", "price_alternatives"]
