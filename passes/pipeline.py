"""The pipeline: which passes run, in which order and why, and the loop that runs, verifies and records them."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Protocol

from torch import fx

from dtensor.errors import ArgumentError, InvalidInputError, PassError
from dtensor.program.stages import Stage

from .algebra.add_before_reduce import AddBeforeReduce
from .algebra.cancel_gather_shard import CancelGatherShard
from .algebra.common_subexpressions import CommonSubexpressions
from .algebra.compute_before_gather import ComputeBeforeGather
from .algebra.dead_code import DeadCode
from .algebra.fuse_all_reduce import FuseAllReduce
from .algebra.fuse_reduce_scatter import FuseReduceScatter
from .algebra.localize_replicated import LocalizeReplicated
from .algebra.merge_axes import MergeAxes
from .algebra.narrow_collectives import NarrowCollectives
from .algebra.reduce_after_scale import ReduceAfterScale
from .algebra.reduce_after_view import ReduceAfterView
from .algebra.reuse_gather import ReuseGather
from .algebra.scatter_before_reduce import ScatterBeforeReduce
from .algebra.shard_before_collective import ShardBeforeCollective
from .functional.lower import Lower
from .functional.raise_ import Raise
from .graph.compare import Simulation
from .graph.count import count
from .graph.groups import MeshGroups, known
from .graph.sizes import settle
from .graph.verify import Seen
from .graph.verify import verify as verify_graph
from .overlap.bucket import Bucket
from .overlap.regather import Regather
from .overlap.schedule import Schedule

EXACTNESS = ("bitwise", "reassociates", "casts")
"""What a pass may do to the numerical results, from the strictest to the loosest: keep every bit, add in another order,
or compute in another precision."""

MAX_ROUNDS = 32
"""The number of rounds within which simplification must reach a fixpoint."""


class Pass(Protocol):
    """A rewrite of a graph in place. It is deterministic and does the same on all ranks."""

    @property
    def name(self) -> str:
        """The name by which `run` and `select` refer to the pass."""
        ...

    @property
    def exactness(self) -> str:
        """One of `EXACTNESS`."""
        ...

    def __call__(self, graph: fx.Graph) -> int:
        """Rewrite `graph` in place and return the number of rewrites."""
        ...


PREPARE: tuple[Pass, ...] = (
    # Before everything else: the simplifying passes read redistribution operators only.
    Raise(),
)
"""Passes that bring a graph into the form the other passes read. They run once, before the others."""

SIMPLIFY: tuple[Pass, ...] = (
    # First remove duplicate and unused nodes: the passes below count users.
    CommonSubexpressions(),
    DeadCode(),
    # A collective that becomes local needs neither merging nor moving.
    LocalizeReplicated(),
    # A gather that cancels leaves reductions next to each other.
    CancelGatherShard(),
    # After cancel_gather_shard, which does not look through casts. Before fuse_all_reduce, which would leave the cast
    # next to a reduction, where it cannot move.
    NarrowCollectives(),
    # Before fuse_all_reduce: gathers of reduce_scatters whose results are combined become one gather, not two
    # all_reduces.
    ComputeBeforeGather(),
    # After compute_before_gather, which leaves a gather with two users where it is.
    ReuseGather(),
    # A shard moves above collectives over other axes, up to the collective it can merge with; this also brings
    # reductions next to each other.
    ShardBeforeCollective(),
    # Moves reductions next to each other for the next passes to merge.
    ReduceAfterView(),
    # After reduce_after_view, which is bitwise and suffices where nothing is scaled.
    ReduceAfterScale(),
    # Before fuse_reduce_scatter: a sum of all_reduces that is then sharded becomes one reduce_scatter, not two
    # reduce_scatters and a sum.
    AddBeforeReduce(),
    FuseReduceScatter(),
    # Complements fuse_reduce_scatter: there the shard is over the reduction's whole group, here over some of its axes.
    ScatterBeforeReduce(),
    # After add_before_reduce, which has merged the reduce_scatters whose sum is gathered.
    FuseAllReduce(),
    # Last: while a collective is over one axis, a pass above may still shrink or cancel it, which saves more than
    # merging it with another.
    MergeAxes(),
)
"""The algebra. These passes run in rounds until none of them changes the graph, before any collective is
asynchronous."""

PIPELINE: tuple[Pass, ...] = (
    *PREPARE,
    *SIMPLIFY,
    # On the simplified joint graph: marks nodes for the partitioner and changes nothing else.
    Regather(),
    # Turns collectives into start/wait pairs, which no pass above reads.
    Lower(),
    # Before schedule: collectives that share a buffer start together.
    Bucket(),
    # Last: no pass may change the order that it chose.
    Schedule(),
)
"""All passes, in the order in which they run."""


@dataclass(frozen=True)
class PassRecord:
    """The record of one run of one pass.

    Attributes:
        name: name of the pass.
        exactness: one of `EXACTNESS`.
        round: round of simplification, from 0; always 0 for passes outside `SIMPLIFY`.
        rewrites: number of rewrites.
        seconds: time that the rewriting took, in seconds, without verification.
        before: number of collectives of each kind in the graph before the pass.
        after: number of collectives of each kind in the graph after the pass.
    """

    name: str
    exactness: str
    round: int
    rewrites: int
    seconds: float
    before: Counter[str]
    after: Counter[str]


Observer = Callable[[int, str, fx.Graph], None]


def select(passes: Iterable[Pass | str] | None = None, disable: Iterable[str] = ()) -> tuple[Pass, ...]:
    """Return the passes to run: `passes`, or all of `PIPELINE`, without the disabled ones.

    Args:
        passes: passes or their names, in the order in which they run; None for `PIPELINE`.
        disable: names of passes to leave out.

    Raises:
        ValueError: a name belongs to no pass.
    """
    known = {p.name: p for p in PIPELINE}
    given = PIPELINE if passes is None else tuple(passes)
    chosen = [known[_checked(p, known)] if isinstance(p, str) else p for p in given]
    known.update({p.name: p for p in chosen})
    off = {_checked(name, known) for name in disable}
    return tuple([p for p in chosen if p.name not in off])


def _checked(name: str, known: Iterable[str]) -> str:
    names = list(known)
    if name in names:
        return name
    near = get_close_matches(name, names, n=1)
    advice = f"did you mean {near[0]!r}?" if near else f"write one of {', '.join(names)}"
    raise ArgumentError(f"there is no pass {name!r}; {advice}")


def run(
    gm: fx.GraphModule | fx.Graph,
    *,
    passes: Sequence[Pass | str] | None = None,
    disable: Sequence[str] = (),
    verify: bool = True,
    traced: bool = False,
    meshes: Sequence[MeshGroups] = (),
    simulate: Simulation | None = None,
    observe: Observer | None = None,
) -> list[PassRecord]:
    """Run passes on a graph, in place, and verify the graph after each pass that changed it.

    The passes of `PREPARE` run once, those of `SIMPLIFY` in rounds until none of them changes the graph, then the
    others once each. Within each of the three, they run in the order given.

    Args:
        gm: the graph to rewrite.
        passes: passes or their names; None for all of `PIPELINE`.
        disable: names of passes to leave out.
        verify: whether to verify the graph, first as it was given and then after each pass that changed it.
        traced: whether a trace has just computed the values of all nodes, so that the first verification need not
            compute them again.
        meshes: the groups of each mesh and their links. Passes know of no other relations between groups. They must be
            the same on all ranks.
        simulate: if given, the simulated ranks on which the graph is run before and after each pass that changed it, to
            compare the results.
        observe: called with a running index, "input" or the name of the pass, and the graph: once at the start and
            after each pass that changed the graph, before it is verified.

    Returns:
        One record for each run of a pass, in order.

    Raises:
        ValueError: a name belongs to no pass.
        InvalidInputError: the graph was invalid as given; nothing was changed.
        PassError: a pass left an invalid graph or changed what it computes, or simplification did not reach a fixpoint.
    """
    chosen = select(passes, disable)
    graph = gm.graph if isinstance(gm, fx.GraphModule) else gm
    numbers = settle(graph)
    runner = _Runner(graph, Seen.of(graph, traced=traced) if verify else None, simulate, observe, numbers)
    first, names = ({p.name for p in part} for part in (PREPARE, SIMPLIFY))
    with known(meshes):
        for p in chosen:
            if p.name in first:
                runner.apply(p, 0)
        runner.to_fixpoint([p for p in chosen if p.name in names])
        for p in chosen:
            if p.name not in first | names:
                runner.apply(p, 0)
    settle(graph, runner.numbers)
    if isinstance(gm, fx.GraphModule):
        gm.recompile()
    return runner.records


class _Runner:
    def __init__(
        self,
        graph: fx.Graph,
        seen: Seen | None,
        simulate: Simulation | None,
        observe: Observer | None,
        numbers: int,
    ) -> None:
        self.graph, self.seen, self.simulate, self.observe, self.numbers = graph, seen, simulate, observe, numbers
        self.records: list[PassRecord] = []
        self.stage = 0
        try:
            self.check("input")
        except PassError as error:
            raise InvalidInputError(str(error)) from error
        self.counted = count(graph)

    def check(self, name: str) -> None:
        if self.observe is not None:
            self.observe(self.stage, name, self.graph)
        if self.seen is not None:
            verify_graph(self.graph, name, self.seen)
        self.stage += 1

    def to_fixpoint(self, passes: Sequence[Pass]) -> None:
        active: list[str] = []
        for round in range(MAX_ROUNDS):
            active = [p.name for p in passes if self.apply(p, round)]
            if not active:
                return
        raise PassError(
            f"simplification did not reach a fixpoint in {MAX_ROUNDS} rounds; still active: {', '.join(active)}"
        )

    def apply(self, p: Pass, round: int) -> int:
        self.numbers = settle(self.graph, self.numbers)
        before, original = self.counted, self.snapshot()
        start = time.perf_counter()
        with Stage(f"pass {p.name}", inside=True):
            rewrites = p(self.graph)
        seconds = time.perf_counter() - start
        if rewrites:
            self.check(p.name)
            if self.simulate is not None and original is not None:
                self.compare(p, original, self.simulate)
            self.counted = count(self.graph)
        self.records.append(PassRecord(p.name, p.exactness, round, rewrites, seconds, before, self.counted))
        return rewrites

    def snapshot(self) -> fx.Graph | None:
        if self.simulate is None:
            return None
        return copy_graph(self.graph)

    def compare(self, p: Pass, original: fx.Graph, simulation: Simulation) -> None:
        try:
            simulation.check(original, self.graph, exact=p.exactness == "bitwise")
        except PassError as error:
            raise PassError(f"pass {p.name!r}, declared {p.exactness}: {error}") from error


def copy_graph(graph: fx.Graph) -> fx.Graph:
    """Return a copy of `graph` that shares its module's attributes and the values of its nodes."""
    known: dict[fx.Node, fx.Node] = {}
    new = fx.Graph(owning_module=graph.owning_module)
    for node in graph.nodes:
        known[node] = new.node_copy(node, known.__getitem__)
    return new


__all__ = [
    "EXACTNESS",
    "MAX_ROUNDS",
    "PIPELINE",
    "PREPARE",
    "SIMPLIFY",
    "Pass",
    "PassRecord",
    "copy_graph",
    "run",
    "select",
]
