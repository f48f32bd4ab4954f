"""Notes in `node.meta`: from which DTensors, operators and redistributions the nodes of a traced graph come, and what
passes record of the nodes that they make.

Each note has a type, and a rule for how it travels when a pass makes a node like another one. `LOCAL`, `ALIKE`,
`OPERATOR`, `SHARDS` and `PARAMETER` state facts that tracing and the passes rely on. `NOTES` lists all of them.
"""

import functools
import importlib
import threading
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import torch
from torch import fx

from ..torch_private.core import FakeTensor, FunctionalTensor, graph_node
from ..torch_private.partitioning import weigh_by
from ..torch_private.symbolic_sizes import has_hint

T = TypeVar("T")


class Travels(Enum):
    """What happens to a note when a pass makes a node like another one, and puts it in that one's place."""

    WITH_THE_PLACE = "each node that is made like this one gets it, too"
    WITH_THE_CALL = "a node that is made like this one gets it if it calls the same operator"
    TO_THE_NEXT = "only the node that is put in the place of this one gets it, unless it has its own"
    NEVER = "it holds for this value alone"


NOTES: list["Note[Any]"] = []
"""All notes."""


class Note(str, Generic[T]):
    """The key of a note, of which `node.meta` holds a `T`.

    Attributes:
        travels: how it travels.
        kept: what a bisection keeps of it in a graph that it writes to a file: the "value", only the "truth", or
            nothing.
    """

    travels: Travels
    kept: Literal["value", "truth", ""]

    def __new__(cls, key: str, travels: Travels, kept: Literal["value", "truth", ""] = "") -> "Note[T]":
        note = super().__new__(cls, key)
        note.travels, note.kept = travels, kept
        NOTES.append(note)
        return note

    def of(self, node: fx.Node) -> T | None:
        """The note on a node; None if it has none."""
        return node.meta.get(self)

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)


LOCAL = Note[bool]("dtensor_local", Travels.WITH_THE_PLACE, "truth")
"""The node is the local tensor of a computed DTensor: this rank's shard, whatever it was computed from."""

ALIKE = Note[bool]("dtensor_alike", Travels.WITH_THE_PLACE, "truth")
"""The node is the same on all ranks, whatever it was computed from: an input of the graph that the code around it knows
to be replicated, or a tensor that a global view takes as replicated or has written to."""

OPERATOR = Note[bool]("dtensor_operator", Travels.WITH_THE_CALL, "truth")
"""The node is an operator as it was called on DTensors, so its numeric arguments are the same on all ranks."""

LAYOUT = Note[str]("dtensor_layout", Travels.NEVER)
"""For the local tensor of a DTensor: the layout of that DTensor, as text such as `S(0)R`."""

SHARDS = Note[Any]("dtensor_shards", Travels.NEVER)
"""For the local tensor of a DTensor: the `Shards` of that DTensor. Decisions that depend on sizes use these, because
they are the same on all ranks; the sizes of a local tensor are so only if the shards are even."""

SPEC = Note[Any]("dtensor_spec", Travels.TO_THE_NEXT)
"""For the local tensor of a DTensor, while something is recorded (`dtensor.record`): the `Spec` of that DTensor."""

INSIDE = Note[bool]("dtensor_inside", Travels.WITH_THE_PLACE)
"""While something is recorded: the node is one of those that an operator on DTensors is carried out by."""

MOVE = Note[Any]("dtensor_move", Travels.WITH_THE_PLACE)
"""The `Moved` that a collective comes from."""

TAKEN = Note[Any]("dtensor_taken", Travels.WITH_THE_PLACE)
"""The `Taken` of a tensor that is assumed to be the same on all ranks, and of the nodes it is computed from."""

TRACED = Note[tuple[int, ...]]("dtensor_traced", Travels.WITH_THE_PLACE)
"""Numbers of the program's collectives that this collective stands for (`dtensor.compile.recording.frames`)."""

PASSES = Note[tuple[str, ...]]("dtensor_passes", Travels.WITH_THE_PLACE)
"""Names of the passes that made or changed a collective, in order."""

PARAMETER = Note[bool]("dtensor_parameter", Travels.WITH_THE_PLACE, "truth")
"""On a placeholder: it is a parameter or a buffer, which the caller holds anyway."""

PART = Note[int]("dtensor_part", Travels.WITH_THE_PLACE, "value")
"""On the nodes that run on one microbatch: which one; by `split_batch`."""

AGAIN = Note[bool]("dtensor_again", Travels.WITH_THE_PLACE, "truth")
"""In a whole step, on the nodes of the backward that compute a value of the forward again."""

RECORD = Note[Any]("dtensor_collective", Travels.NEVER, "value")
"""On a start: the `CollectiveInfo` of the operator that `lower` lowered."""

ORIGIN = Note[Any]("dtensor_lowered", Travels.NEVER, "value")
"""On a start: the operator that `lower` lowered, and the values of its arguments."""

SENT = Note[int]("dtensor_sent", Travels.NEVER, "value")
"""On a start, where shards are uneven: the bytes sent by the rank that sends most."""

WRITTEN = Note[bool]("dtensor_written", Travels.NEVER, "truth")
"""Next to `SENT`: whether the sent tensor is written to later. The graph of a rank that pads it does not show that:
there a copy is sent."""

PARTS = Note[list[Any]]("dtensor_parts", Travels.NEVER, "value")
"""On a start that `bucket` made: the values of the tensors that travel together."""

PLACES = Note[list[Any]]("dtensor_places", Travels.NEVER, "value")
"""Next to `PARTS`: for each of these tensors, the position of the backward's result that it becomes, or None."""

ARRIVAL = Note[bool]("dtensor_arrival", Travels.NEVER, "truth")
"""On the nodes that `lower` inserts after a wait to reduce the data that arrived. They count as part of the
collective."""

SIZE = Note[tuple[int, bool]]("dtensor_size", Travels.NEVER)
"""Where `dtensor.passes.graph.sizes` keeps its results."""

FROM = Note[str]("dtensor_from", Travels.WITH_THE_PLACE)
"""In a graph that was built from a file: where the node came from in the program, as text."""


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
    look_up_each(int(wanted) - int(keeps))
    keeps = wanted


looked_up: int = 0
"""How many reasons there are for dispatch to look up each operator, rather than take its quick path."""

_counting = threading.Lock()


def look_up_each(more: int) -> None:
    """Count one more such reason, or with -1 one less."""
    global looked_up
    with _counting:  # ranks may be threads
        looked_up += more


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
    "ARRIVAL",
    "FROM",
    "INSIDE",
    "LAYOUT",
    "LOCAL",
    "MOVE",
    "NOTES",
    "OPERATOR",
    "ORIGIN",
    "PARAMETER",
    "PART",
    "PARTS",
    "PASSES",
    "PLACES",
    "RECORD",
    "SENT",
    "SHARDS",
    "SIZE",
    "SPEC",
    "TAKEN",
    "TRACED",
    "WRITTEN",
    "Cut",
    "Moved",
    "Note",
    "Shards",
    "Taken",
    "Travels",
    "keep_specs",
    "keeps_specs",
    "look_up_each",
    "note_alike",
    "note_inside",
    "note_layout",
    "note_move",
    "note_shards",
    "note_shards_at",
    "shards_of",
]
