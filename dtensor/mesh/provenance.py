"""What the nodes of a traced graph know of the DTensors they were traced from: notes in `node.meta`.

`LOCAL`, `ALIKE`, `OPERATOR` and `SHARDS` tell tracing and the passes what they may take for granted. Of the others
nothing depends: they are for texts, manifests and reports. A rewrite hands `MOVE` and `TRACED` on to what it makes;
`LAYOUT` and `SHARDS` are true of one value alone.
"""

import functools
import importlib
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..torch_private.compiling import weigh_by
from ..torch_private.core import FakeTensor, FunctionalTensor, graph_node
from ..torch_private.symbolic_sizes import has_hint

LOCAL = "dtensor_local"
"""The node is the local tensor of a computed DTensor: this rank's part, whatever it was computed from."""

ALIKE = "dtensor_alike"
"""The node is the same on all ranks, whatever it was computed from: an input of the graph, as what is around it knows,
or what a global view takes so or has written."""

OPERATOR = "dtensor_operator"
"""The node is an operator that was called on DTensors, with its numbers as they were given: the same on all ranks."""

LAYOUT = "dtensor_layout"
"""The layout of the DTensor whose local tensor the node is, as text such as `S(0)R`."""

SHARDS = "dtensor_shards"
"""The `Shards` of the DTensor whose local tensor the node is. What decides by size goes by these: all ranks know them
alike, and a local tensor's own sizes only where the shards are even."""

MOVE = "dtensor_move"
"""The `Moved` that made a collective."""

TAKEN = "dtensor_taken"
"""The `Taken` of a tensor that counts as the same on all ranks, and of what it is computed from."""

TRACED = "dtensor_traced"
"""Numbers of the collectives that the program asked for, and a collective stands for
(`dtensor.compile.recording.frames`)."""

PASSES = "dtensor_passes"
"""Names of the passes that made a collective what it is, in order."""


class Taken(NamedTuple):
    """What counts as the same on all ranks.

    Attributes:
        said: by what, and what to do where it is not: a text with a place for what it is (`replication_check`).
        groups: over which it is.
        nn_module_stack, stack_trace: where, as in a node's `meta`.
    """

    said: str
    groups: tuple[str, ...]
    nn_module_stack: dict[str, Any]
    stack_trace: str


@dataclass(frozen=True)
class Cut:
    """A dimension of so many elements that is cut over mesh axes of these sizes, in turn."""

    length: int
    parts: tuple[int, ...]


class Shards(NamedTuple):
    """The local tensors of one DTensor, over all ranks; symbolic sizes count with their example values.

    Attributes:
        largest: the shape of the largest, which is the first rank's.
        even: whether all have that shape, but for symbolic lengths, which are symbols that all ranks take alike.
        lengths: each dimension's length, or how it is cut where ranks have other lengths; None where sizes are
            symbolic.
    """

    largest: tuple[int, ...]
    even: bool
    lengths: tuple[Any, ...] | None


@dataclass(frozen=True)
class Moved:
    """One step of a redistribution.

    Attributes:
        src, dst: placements along the axes of the step, such as `P` and `S(0)`.
        asked: whether the program says `redistribute`; otherwise an operator needed its operand elsewhere.
        lengths: of each dimension of the buffer that the step is priced by, its global length (a SymInt where sizes are
            symbolic) and the mesh axes that cut it.
        count: how many times that buffer, in sizes of the axes: all of `axes` for a gather, else nothing.
        axes: the mesh axes of the step.
        itemsize: bytes per element.
        names, sizes: of the mesh's axes.
    """

    src: str
    dst: str
    asked: bool
    lengths: tuple[tuple[Any, tuple[int, ...]], ...]
    count: tuple[int, ...]
    axes: tuple[int, ...]
    itemsize: int
    names: tuple[str, ...]
    sizes: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.src}->{self.dst}"


def note_alike(x: torch.Tensor) -> None:
    """Note in the graph that is traced that `x`, which it is given, is alike on all ranks."""
    node = graph_node(x) if isinstance(x, (FakeTensor, FunctionalTensor)) else None
    if node is not None:
        node.meta[ALIKE] = True


def note_layout(local: Any, layout: str) -> None:
    """While a graph is traced: note the layout of the DTensor whose local tensor is `local`."""
    node = _node(local)
    if node is not None:
        node.meta.setdefault(LAYOUT, layout)


def note_shards(local: Any, spec: Any) -> None:
    """While a graph is traced: note that `local` is one of the shards of `spec`; nothing if a size is not known at all.

    From the first note on, torch's partitioner weighs by these notes.
    """
    node = _node(local)
    if node is not None:
        note_shards_at(node, spec)


def note_shards_at(node: torch.fx.Node, spec: Any) -> None:
    """The same, of the local tensor that `node` stands for."""
    if spec.static or all(map(has_hint, spec.shape)):
        node.meta.setdefault(SHARDS, spec.shards)
        weigh_by(_nbytes)


def shards_of(node: torch.fx.Node) -> Shards | None:
    """The shards that the value of `node` is one of; None if that was not noted. To be asked when all is traced: only
    then is it known which sizes are symbols in the end."""
    noted: Any = node.meta.get(SHARDS)
    if callable(noted):
        noted = node.meta[SHARDS] = noted()
    return noted


def _nbytes(node: torch.fx.Node) -> int:
    return _sizes().nbytes(node)


@functools.cache
def _sizes() -> Any:
    return importlib.import_module("dtensor.passes.graph.sizes")


def note_move(local: torch.Tensor, step: Any, spec: Any, asked: bool) -> None:
    """While a graph is traced: note that `step` of a plan (`dtensor.layout.planner.Step`) for a tensor of `spec` gave
    `local`."""
    node = _node(local)
    if node is None:
        return
    src, dst = ("".join([str(layout.placements[a]) for a in step.axes]) for layout in (step.src, step.dst))
    names = spec.mesh.mesh_dim_names or [f"axis{a}" for a in range(spec.mesh.ndim)]
    lengths = tuple(zip(spec.shape, step.pieces, strict=True))
    count = step.axes if step.count > 1 else ()
    moved = Moved(src, dst, asked, lengths, count, step.axes, spec.dtype.itemsize, tuple(names), tuple(spec.mesh.shape))
    node.meta.setdefault(MOVE, moved)
    node.meta[LAYOUT] = step.dst.text
    if all(map(has_hint, spec.shape)):
        node.meta[SHARDS] = spec.with_layout(step.dst).shards


def _node(local: Any) -> Any:
    return graph_node(local) if isinstance(local, (FakeTensor, FunctionalTensor)) else None


__all__ = [
    "ALIKE",
    "LAYOUT",
    "LOCAL",
    "MOVE",
    "OPERATOR",
    "PASSES",
    "SHARDS",
    "TAKEN",
    "TRACED",
    "Cut",
    "Moved",
    "Shards",
    "Taken",
    "note_alike",
    "note_layout",
    "note_move",
    "note_shards",
    "note_shards_at",
    "shards_of",
]
