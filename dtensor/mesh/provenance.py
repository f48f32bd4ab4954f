"""Notes in `node.meta` that record from which DTensors the nodes of a traced graph come.

`LOCAL`, `ALIKE`, `OPERATOR` and `SHARDS` state facts that tracing and the passes rely on. Nothing depends on the other
notes: they are for texts, manifests and reports. A rewrite passes `MOVE` and `TRACED` on to the nodes that it makes;
`LAYOUT` and `SHARDS` hold for a single value only.
"""

import functools
import importlib
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..torch_private.core import FakeTensor, FunctionalTensor, graph_node
from ..torch_private.partitioning import weigh_by
from ..torch_private.symbolic_sizes import has_hint

LOCAL = "dtensor_local"
"""The node is the local tensor of a computed DTensor: this rank's shard, whatever it was computed from."""

ALIKE = "dtensor_alike"
"""The node is the same on all ranks, whatever it was computed from: an input of the graph that the code around it knows
to be replicated, or a tensor that a global view takes as replicated or has written to."""

OPERATOR = "dtensor_operator"
"""The node is an operator as it was called on DTensors, so its numeric arguments are the same on all ranks."""

LAYOUT = "dtensor_layout"
"""For the local tensor of a DTensor: the layout of that DTensor, as text such as `S(0)R`."""

SHARDS = "dtensor_shards"
"""For the local tensor of a DTensor: the `Shards` of that DTensor. Decisions that depend on sizes use these, because
they are the same on all ranks; the sizes of a local tensor are so only if the shards are even."""

SPEC = "dtensor_spec"
"""For the local tensor of a DTensor, while something is recorded (`dtensor.record`): the `Spec` of that DTensor."""

INSIDE = "dtensor_inside"
"""While something is recorded: the node is one of those that an operator on DTensors is carried out by."""

MOVE = "dtensor_move"
"""The `Moved` that a collective comes from."""

TAKEN = "dtensor_taken"
"""The `Taken` of a tensor that is assumed to be the same on all ranks, and of the nodes it is computed from."""

TRACED = "dtensor_traced"
"""Numbers of the program's collectives that this collective stands for (`dtensor.compile.recording.frames`)."""

PASSES = "dtensor_passes"
"""Names of the passes that made or changed a collective, in order."""


class Taken(NamedTuple):
    """The assumption that a tensor is the same on all ranks.

    Attributes:
        said: Text for an error message: what assumes it and what to do if it does not hold, with a placeholder for
            the tensor (`dtensor.comm.replication_check`).
        groups: Names of the process groups whose ranks must have the same values.
        nn_module_stack, stack_trace: The place in the program, as in a node's `meta`.
    """

    said: str
    groups: tuple[str, ...]
    nn_module_stack: dict[str, Any]
    stack_trace: str


@dataclass(frozen=True)
class Cut:
    """A sharded dimension.

    Attributes:
        length: Number of elements.
        parts: Sizes of the mesh axes that split it, one after the other.
    """

    length: int
    parts: tuple[int, ...]


class Shards(NamedTuple):
    """The shapes of the local tensors of one DTensor, over all ranks. Symbolic sizes count as their example values.

    Attributes:
        largest: Shape of the largest shard, which is that of the first rank.
        even: Whether all shards have that shape. Symbolic lengths do not matter: their symbols are the same on all
            ranks.
        lengths: For each dimension its local length, or a `Cut` if ranks have different lengths; None if sizes are
            symbolic.
    """

    largest: tuple[int, ...]
    even: bool
    lengths: tuple[Any, ...] | None


@dataclass(frozen=True)
class Moved:
    """One step of a redistribution.

    Attributes:
        src, dst: Placements along the axes of the step, such as `P` and `S(0)`.
        asked: Whether the program calls `redistribute`; otherwise an operator needed its operand in another layout.
        lengths: For each dimension of the buffer that the cost depends on, its global length (a SymInt if sizes are
            symbolic) and the mesh axes that shard it.
        count: The mesh axes whose sizes multiply to the number of such buffers: those of the step, or none for a single
            buffer.
        axes: The mesh axes of the step.
        itemsize: Bytes per element.
        names, sizes: Names and sizes of all axes of the mesh.
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


keeps: bool = False
"""Whether specs are noted. What is compiled meanwhile has taps, and no cache may hold it."""


def keep_specs(wanted: bool) -> None:
    """Note the specs of local tensors (`SPEC`) from now on, or no longer."""
    global keeps
    keeps = wanted


def keeps_specs() -> bool:
    """Whether they are noted now."""
    return keeps


def note_alike(x: torch.Tensor) -> None:
    """While a graph is traced: note that its input `x` is the same on all ranks."""
    node = graph_node(x) if isinstance(x, (FakeTensor, FunctionalTensor)) else None
    if node is not None:
        node.meta[ALIKE] = True


def note_layout(local: Any, layout: str) -> None:
    """While a graph is traced: note that `local` is the local tensor of a DTensor in `layout`."""
    node = _node(local)
    if node is not None:
        node.meta.setdefault(LAYOUT, layout)


def note_shards(local: Any, spec: Any) -> None:
    """While a graph is traced: note that `local` is one of the shards of `spec`, unless a size has no example value.

    From the first note on, torch's partitioner weighs tensors by these notes.
    """
    node = _node(local)
    if node is not None:
        note_shards_at(node, spec)


def note_shards_at(node: torch.fx.Node, spec: Any) -> None:
    """Like `note_shards`, for the local tensor that `node` stands for."""
    if keeps and spec.static:
        node.meta.setdefault(SPEC, spec.real or spec)
    if spec.static or all(map(has_hint, spec.shape)):
        node.meta.setdefault(SHARDS, spec.shards)
        weigh_by(_nbytes)


def shards_of(node: torch.fx.Node) -> Shards | None:
    """The shards of the DTensor whose local tensor `node` is; None if that was not noted.

    Call it only when tracing has finished: before, it is not known which sizes remain symbols.
    """
    noted: Any = node.meta.get(SHARDS)
    if callable(noted):
        noted = node.meta[SHARDS] = noted()
    return noted


def _nbytes(node: torch.fx.Node) -> int:
    return _sizes().nbytes(node)


@functools.cache
def _sizes() -> Any:
    return importlib.import_module("dtensor.passes.graph.sizes")


def note_inside(last: torch.fx.Node) -> None:
    """Note that every node of the graph after `last` carries out one operator on DTensors."""
    while (last := last.next).op != "root":
        last.meta[INSIDE] = True


def note_move(local: torch.Tensor, step: Any, spec: Any, asked: bool) -> None:
    """While a graph is traced: note that `local` is the result of `step`, a `dtensor.layout.planner.Step`.

    `spec` is that of the redistributed tensor; `asked` is as in `Moved`.
    """
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
    if keeps and spec.static:
        node.meta[SPEC] = (spec.real or spec).with_layout(step.dst)
    if all(map(has_hint, spec.shape)):
        node.meta[SHARDS] = spec.with_layout(step.dst).shards


def _node(local: Any) -> Any:
    return graph_node(local) if isinstance(local, (FakeTensor, FunctionalTensor)) else None


__all__ = [
    "ALIKE",
    "INSIDE",
    "LAYOUT",
    "LOCAL",
    "MOVE",
    "OPERATOR",
    "PASSES",
    "SHARDS",
    "SPEC",
    "TAKEN",
    "TRACED",
    "Cut",
    "Moved",
    "Shards",
    "Taken",
    "keep_specs",
    "keeps_specs",
    "note_alike",
    "note_inside",
    "note_layout",
    "note_move",
    "note_shards",
    "note_shards_at",
    "shards_of",
]
