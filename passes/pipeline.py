"""The pipeline: which passes run, in which order and why, and the loop that runs, checks and records them."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Protocol

from torch import fx

from dtensor.errors import InvalidInputError, PassError

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
"""What a pass may do to the numbers: nothing, add in another order, compute in another precision. By rising freedom."""

MAX_ROUNDS = 32
"""Rounds after which simplification must have come to rest."""


class Pass(Protocol):
    """A rewrite of a graph in place, deterministic, and the same on all ranks."""

    @property
    def name(self) -> str:
        """The name that `run` takes."""
        ...

    @property
    def exactness(self) -> str:
        """One of `EXACTNESS`."""
        ...

    def __call__(self, graph: fx.Graph) -> int:
        """Rewrite `graph` and give the number of rewrites."""
        ...


PREPARE: tuple[Pass, ...] = (
    # First of all: what simplifies reads the redistribution operators only.
    Raise(),
)
"""Bring a graph into the form that the others read, once, before them."""

SIMPLIFY: tuple[Pass, ...] = (
    # First what is there twice or for nothing: the passes below count users.
    CommonSubexpressions(),
    DeadCode(),
    # What need not communicate need not be merged, nor moved to where it might.
    LocalizeReplicated(),
    # A gather that cancels leaves reductions side by side.
    CancelGatherShard(),
    # After cancel_gather_shard, which does not look through a cast; before fuse_all_reduce, which would leave the cast
    # beside a reduction, where it stays.
    NarrowCollectives(),
    # Before fuse_all_reduce: gathers of reduce_scatters that are combined become one gather, not two all_reduces.
    ComputeBeforeGather(),
    # After compute_before_gather, which leaves a gather that has two users where it is.
    ReuseGather(),
    # Over other axes a shard moves up to the collective it belongs to, and reductions next to each other.
    ShardBeforeCollective(),
    # Brings together what the next passes merge.
    ReduceAfterView(),
    # After reduce_after_view, which is bitwise and needs no help where nothing is scaled.
    ReduceAfterScale(),
    # Before fuse_reduce_scatter: a sum of all_reduces that is then sharded becomes one reduce_scatter, not two and a
    # sum.
    AddBeforeReduce(),
    FuseReduceScatter(),
    # Beside fuse_reduce_scatter: there the shard is over the whole group of the reduction, here over a part of it.
    ScatterBeforeReduce(),
    # After add_before_reduce, which has made one of the reduce_scatters whose sum is gathered.
    FuseAllReduce(),
    # Last: a collective over one axis that a pass above can still cut or cancel is worth more than two merged.
    MergeAxes(),
)
"""Pure algebra, in rounds until nothing changes, before anything is asynchronous."""

PIPELINE: tuple[Pass, ...] = (
    *PREPARE,
    *SIMPLIFY,
    # On the joint graph, when it is simple: what the partition is told. Changes marks only.
    Regather(),
    # After it the collectives are start/wait pairs, which no pass above reads.
    Lower(),
    # Before schedule: what shares a buffer starts together.
    Bucket(),
    # Last: nothing may move what it put in order.
    Schedule(),
)
"""All passes in the order in which they run."""


@dataclass(frozen=True)
class PassRecord:
    """One run of one pass. `before` and `after` count the collectives of the graph."""

    name: str
    exactness: str
    round: int
    rewrites: int
    seconds: float
    before: Counter[str]
    after: Counter[str]


Observer = Callable[[int, str, fx.Graph], None]


def select(passes: Iterable[Pass | str] | None = None, disable: Iterable[str] = ()) -> tuple[Pass, ...]:
    """The passes to run: those given, or all of `PIPELINE`, without the disabled ones.

    Raises:
        ValueError: a name that no pass has.
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
    raise ValueError(f"there is no pass {name!r}; {advice}")


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
    """Run passes on a graph, in place, and check it after each that changed something.

    Those of `PREPARE` run once, those of `SIMPLIFY` in rounds until none changes anything, then the others once each,
    in the order given. `meshes` is what the passes may know of how groups are made of each other, the same meshes on
    all ranks. `traced` says that a trace has just computed the values of all nodes: they are not computed a second
    time before the first pass.
    `simulate` runs the graph before and after each pass on simulated ranks and compares. `observe` is called with a
    running index, "input" or the name of the pass, and the graph: at the start and after each pass that changed it,
    before the graph is checked.

    Raises:
        ValueError: an unknown pass name.
        InvalidInputError: the graph is invalid as it came; nothing was changed.
        PassError: an invalid graph, a difference in what it computes, or simplification that does not come to rest.
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
            f"simplification does not come to rest in {MAX_ROUNDS} rounds; still active: {', '.join(active)}"
        )

    def apply(self, p: Pass, round: int) -> int:
        self.numbers = settle(self.graph, self.numbers)
        before, original = self.counted, self.snapshot()
        start = time.perf_counter()
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
    """A copy of `graph` that shares its module's attributes and the values of its nodes."""
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
