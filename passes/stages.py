"""What the table of the pipeline is made of: passes, stages, and what is known of a graph that is compiled.

A pass is one rewrite of graphs. It declares its stage, what it may do to the numbers, and in `taking` what it takes of
the `Compilation`. A stage is a row of `dtensor.passes.pipeline.STAGES`: passes that run one after the other on one kind
of graph.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol
from uuid import uuid4

from torch import fx

from .graph.groups import MeshGroups

EXACTNESS = ("bitwise", "reassociates", "casts")
"""What a pass may do to the numerical results, from the strictest to the loosest: keep every bit, add in another order,
or compute in another precision."""

JOINT, MARKED = "joint", "marked joint"
"""The graph of forward and backward as it was traced; the same when it is known which of its inputs are parameters."""

FORWARD, BACKWARD, INFERENCE = "forward", "backward", "inference"
HALVES = (FORWARD, BACKWARD, INFERENCE)
"""What the partitioner makes of a joint graph, and a graph without a backward."""


_PROCESS = uuid4().hex


class Taps(Protocol):
    """Where a recorder learns of the values of a compiled graph."""

    def graph(self, direction: str) -> int:
        """Register a graph; returns its number."""
        ...

    def site(
        self, phase: str, module: str, line: str, op: str, number: int, kind: str, spec: Any, inputs: tuple[int, ...]
    ) -> int:
        """Register a value of a graph; returns its number. The arguments are the fields of
        `dtensor.runs.records.taps.Site`; "op" is the name in torch's schema."""
        ...

    def holds_new_value(self, op: str) -> bool:
        """Whether the result of an operator of that name holds a value, other than what it was given."""
        ...


@dataclass(frozen=True)
class Compilation:
    """What is known when a graph is compiled: all that a pass may take besides the graph.

    Attributes:
        graph: the kind of the graph: `JOINT`, `MARKED` or one of `HALVES`.
        inner: what runs the graph: "inductor", which reorders independent nodes, or "aot_eager".
        passes: names of the passes that were chosen.
        memory_budget: the option of that name: bytes of gathered tensors that may be saved for the backward, or None.
        memory: the option of that name: bytes that a rank may hold in a whole step, or None.
        spare: bytes of these that are left to what the inner compiler makes of the graph.
        split_batch: the option of that name: the number of microbatches.
        agreement: whether ranks compare what a graph communicates before it first runs.
        within: whether it is the graph of a branch or of a loop body in another graph.
        meshes: the groups of each mesh and their links; the same on all ranks.
        name: what the compiled function is called in the program.
        module_of: gives the path of the module that requested a collective, by the number of the collective in the
            program; "" if it is unknown.
        drawn: names of the groups whose ranks are taken to draw the same random numbers.
        taps: where values are recorded; None if nothing is recorded.
        finished: makes of a graph, which it leaves as it is, the one that the later stages will make of it.
    """

    graph: str
    inner: str = "aot_eager"
    passes: frozenset[str] = frozenset()
    memory_budget: int | None = None
    memory: int | None = None
    spare: int = 0
    split_batch: int = 1
    agreement: bool = True
    within: bool = False
    meshes: tuple[MeshGroups, ...] = ()
    name: str = "graph"
    module_of: Callable[[int], str] = field(default=lambda number: "", repr=False)
    drawn: tuple[str, ...] = ()
    taps: Taps | None = None
    finished: Callable[[fx.Graph], fx.Graph] = field(default=lambda graph: graph, repr=False)


class Pass(ABC):
    """A rewrite of a graph in place. It is deterministic, does the same on all ranks, and changes only the graph.

    Subclass it, here or in a program: `torch.compile(model, backend="dtensor", options={"passes": [..., Mine()]})`.

    Attributes:
        name: the name by which options, dumps and errors refer to the pass.
        stage: name of the stage of `dtensor.passes.STAGES` that it runs in.
        exactness: one of `EXACTNESS`; what results may differ by is checked with the option `verify`.
        fingerprint: text that changes whenever the pass would do something else, for the keys under which compiled code
            is kept. None: what is compiled with this pass is neither kept nor taken from anywhere. (The passes of this
            library need none: a hash of its source is in every key.)
        when: when a pass of this library runs, in words, if that is not for the options `passes` and `disable` to say.
        required: why it cannot be left out, in words; "" if it can.
        anywhere: whether it also runs on graphs that communicate nothing.
    """

    name: str
    stage: str
    exactness: str
    fingerprint: str | None = None
    when: str = ""
    required: str = ""
    anywhere: bool = False

    @abstractmethod
    def __call__(self, graph: fx.Graph) -> int:
        """Rewrite `graph` in place and return the number of rewrites: 0 if the graph is as it was."""

    def taking(self, compilation: Compilation) -> "Pass | None":
        """Return the pass as it runs in a compilation; None if there it has nothing to do."""
        return self

    def __repr__(self) -> str:
        """What it declares, as part of the keys of packages: without a fingerprint it is another text each time."""
        known = self.fingerprint if self.fingerprint is not None else f"{id(self):x} of {_PROCESS}"
        return f"{type(self).__name__}({self.name!r}, {self.stage!r}, {self.exactness!r}, {known!r})"


@dataclass(frozen=True)
class Stage:
    """A row of the table: what runs at one point of the order of compilation.

    Attributes:
        name: name of the stage; rows of one name are the same stage on different graphs.
        graphs: the kinds of graphs that it works on.
        passes: the passes of this library, in order.
        why: the reason for its place.
        fixpoint: whether the passes run in rounds until none of them changes the graph; otherwise once each.
        open: whether passes of a program may run in it, after those of this library unless the option `passes` gives
            another order.
    """

    name: str
    graphs: tuple[str, ...]
    passes: tuple[Pass, ...]
    why: str
    fixpoint: bool = False
    open: bool = True


__all__ = [
    "BACKWARD",
    "EXACTNESS",
    "FORWARD",
    "HALVES",
    "INFERENCE",
    "JOINT",
    "MARKED",
    "Compilation",
    "Pass",
    "Stage",
    "Taps",
]
