"""Running passes: which of them run on a graph, and the loop that runs, verifies and records them."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from itertools import groupby
from types import EllipsisType

from torch import fx

from dtensor.errors import ArgumentError, ArgumentTypeError, InvalidInputError, PassError
from dtensor.program import stages as progress

from .graph.compare import Simulation
from .graph.copying import copy_graph
from .graph.count import count
from .graph.groups import MeshGroups, known
from .graph.sizes import settle
from .graph.steps import limited
from .graph.verify import Seen
from .graph.verify import verify as verify_graph
from .pipeline import PIPELINE, REGISTERED, STAGES
from .stages import EXACTNESS, Compilation, Pass

MAX_ROUNDS = 32
"""The number of rounds within which simplification must reach a fixpoint."""


@dataclass(frozen=True)
class PassRecord:
    """The record of one run of one pass.

    Attributes:
        name: name of the pass.
        exactness: one of `EXACTNESS`.
        round: round of simplification, from 0; always 0 for passes that run once.
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


def select(passes: Iterable[Pass | str | EllipsisType] | None = None, disable: Iterable[str] = ()) -> tuple[Pass, ...]:
    """Return the passes to run: `passes`, or all of `PIPELINE`, without the disabled ones.

    Args:
        passes: passes or their names, in the order in which they run; `...` stands for those of `PIPELINE` that are not
            named. None for `PIPELINE`.
        disable: names of passes to leave out.

    Raises:
        ValueError: a name belongs to no pass, or a pass declares something that does not exist.
        TypeError: something is neither a pass nor the name of one.
    """
    known = {p.name: p for p in REGISTERED}
    chosen: list[Pass] = []
    given = [...] if passes is None else list(passes)
    named = {p if isinstance(p, str) else getattr(p, "name", None) for p in given}
    for p in given:
        if p is ...:
            chosen += [other for other in PIPELINE if other.name not in named]
        elif isinstance(p, str):
            chosen.append(known[_checked(p, known)])
        else:
            chosen.append(check_pass(p))
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


def check_pass(p: object) -> Pass:
    """Return `p` if it is a pass and declares what a pass declares.

    Raises:
        TypeError: it is no instance of `Pass`, or declares something of the wrong type.
        ValueError: it declares a stage or an exactness that does not exist, or that is not for it.
    """
    if isinstance(p, type) and issubclass(p, Pass):
        raise ArgumentTypeError(f"{p.__name__} is a class of passes, not a pass; write {p.__name__}()")
    if not isinstance(p, Pass):
        raise ArgumentTypeError(
            f"a pass is an instance of a subclass of dtensor.passes.Pass, or the name of one; got {p!r}"
        )
    kind = type(p).__name__
    for field in ("name", "stage", "exactness"):
        found = getattr(p, field, None)
        if not isinstance(found, str) or not found:
            raise ArgumentTypeError(f"the pass {kind} has no {field}; write {field} = {HINTS[field]!r} in its class")
    if p.exactness not in EXACTNESS:
        raise ArgumentError(
            f"the pass {p.name!r} declares the exactness {p.exactness!r}; write one of {', '.join(EXACTNESS)}"
        )
    stages = dict.fromkeys([stage.name for stage in STAGES if stage.open])
    if p.stage not in stages and p.name not in _OURS:
        found = f"the pass {p.name!r} names the stage {p.stage!r}, which "
        taken = any(stage.name == p.stage for stage in STAGES)
        why = "takes passes of this library only" if taken else "does not exist"
        raise ArgumentError(f"{found}{why}; write one of {', '.join(stages)}")
    if p.fingerprint is not None and not isinstance(p.fingerprint, str):  # pyright: ignore[reportUnnecessaryComparison]
        raise ArgumentTypeError(
            f"the fingerprint of the pass {p.name!r} is text that changes with what it does, or None for no caching; "
            f"got {p.fingerprint!r}"
        )
    return p


HINTS = {"name": "my_pass", "stage": "simplify", "exactness": "bitwise"}
_OURS = frozenset([p.name for p in REGISTERED])
_ROUNDS = frozenset([stage.name for stage in STAGES if stage.fixpoint])


def planned(compilation: Compilation, chosen: Sequence[Pass], disable: Iterable[str], communicates: bool) -> list[Pass]:
    """Return the passes that run on a graph, as they run there, in order.

    Args:
        compilation: what is known of the graph.
        chosen: the passes that options name, in the order of the options.
        disable: names of passes to leave out.
        communicates: whether there are collectives in the graph; otherwise only passes that run anywhere do.
    """
    return _planned(compilation, chosen, frozenset(disable), communicates, 0)


def _planned(
    compilation: Compilation, chosen: Sequence[Pass], off: frozenset[str], communicates: bool, first: int
) -> list[Pass]:
    """As `planned`, from the stage at this place of the table on."""
    found: list[Pass] = []
    for k, stage in enumerate(STAGES):
        if k < first or compilation.graph not in stage.graphs:
            continue
        here = replace(compilation, finished=partial(_finished, compilation, chosen, off, k + 1))
        own = {p.name for p in stage.passes}
        mine = [p for p in stage.passes if p.when and p.name not in off]
        mine += [p for p in chosen if p.stage == stage.name and not p.when and (p.name in own or p.name not in _OURS)]
        found += [taken for p in mine if (communicates or p.anywhere) and (taken := p.taking(here)) is not None]
    return found


def _finished(
    compilation: Compilation, chosen: Sequence[Pass], off: frozenset[str], first: int, graph: fx.Graph
) -> fx.Graph:
    """What the stages from this place of the table on make of a graph, but for those that change nothing about what it
    sends and computes."""
    found, last = copy_graph(graph), {stage.name for stage in STAGES if not stage.open}
    with limited():
        for p in _planned(compilation, chosen, off, True, first):
            if p.stage not in last:
                p(found)
    return found


def run(
    gm: fx.GraphModule | fx.Graph,
    *,
    passes: Sequence[Pass | str | EllipsisType] | None = None,
    disable: Sequence[str] = (),
    verify: bool = True,
    traced: bool = False,
    meshes: Sequence[MeshGroups] = (),
    simulate: Simulation | None = None,
    observe: Observer | None = None,
) -> list[PassRecord]:
    """Run passes on a graph, in place and in the order given, and verify the graph after each that changed it.

    Passes of the stage "simplify" that follow each other run in rounds until none of them changes the graph, the others
    once each.

    Args:
        gm: the graph to rewrite.
        passes: passes or their names, as `select` takes them; None for all of `PIPELINE`.
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
        ValueError, TypeError: as `select`.
        InvalidInputError: the graph was invalid as given; nothing was changed.
        PassError: a pass left an invalid graph or changes what it computes, or simplification did not reach a fixpoint.
    """
    chosen = select(passes, disable)
    graph = gm.graph if isinstance(gm, fx.GraphModule) else gm
    runner = Runner(graph, verify=verify, traced=traced, simulate=simulate, observe=observe)
    runner.run(chosen, meshes)
    if isinstance(gm, fx.GraphModule):
        gm.recompile()
    return runner.records


class Runner:
    """Runs passes on one graph, several lists of them one after the other. The arguments are those of `run`.

    Attributes:
        records: one record for each run of a pass, in order.

    Raises:
        InvalidInputError: the graph was invalid as given; nothing was changed.
    """

    def __init__(
        self,
        graph: fx.Graph,
        *,
        verify: bool = True,
        traced: bool = False,
        simulate: Simulation | None = None,
        observe: Observer | None = None,
    ) -> None:
        self.graph, self.simulate, self.observe = graph, simulate, observe
        self.records: list[PassRecord] = []
        self.numbers: int = settle(graph)
        self.seen: Seen | None = Seen.of(graph, traced=traced) if verify else None
        self.changes: int = 0
        try:
            self._check("input")
        except PassError as error:
            raise InvalidInputError(str(error)) from error
        self.counted: Counter[str] = count(graph)

    def run(self, passes: Sequence[Pass], meshes: Sequence[MeshGroups] = ()) -> None:
        """Run passes.

        Raises:
            PassError: as `dtensor.passes.run`.
        """
        with known(meshes):
            for rounds, group in groupby(passes, lambda p: p.stage in _ROUNDS):
                if rounds:
                    self._to_fixpoint(list(group))
                else:
                    for p in group:
                        self._apply(p, 0)
        settle(self.graph, self.numbers)

    def _check(self, name: str) -> None:
        if self.observe is not None:
            self.observe(self.changes, name, self.graph)
        if self.seen is not None:
            verify_graph(self.graph, name, self.seen)
        self.changes += 1

    def _to_fixpoint(self, passes: Sequence[Pass]) -> None:
        active: list[str] = []
        for round in range(MAX_ROUNDS):
            active = [p.name for p in passes if self._apply(p, round)]
            if not active:
                return
        raise PassError(
            f"simplification did not reach a fixpoint in {MAX_ROUNDS} rounds; still active: {', '.join(active)}"
        )

    def _apply(self, p: Pass, round: int) -> int:
        self.numbers = settle(self.graph, self.numbers)
        before, original = self.counted, copy_graph(self.graph) if self.simulate is not None else None
        start = time.perf_counter()
        with progress.Stage(f"pass {p.name}", inside=True):
            rewrites = p(self.graph)
        seconds = time.perf_counter() - start
        if rewrites:
            self._check(p.name)
            if self.simulate is not None and original is not None:
                self._compare(p, original, self.simulate)
            self.counted = count(self.graph)
        self.records.append(PassRecord(p.name, p.exactness, round, rewrites, seconds, before, self.counted))
        return rewrites

    def _compare(self, p: Pass, original: fx.Graph, simulation: Simulation) -> None:
        try:
            simulation.check(original, self.graph, exact=p.exactness == "bitwise")
        except PassError as error:
            raise PassError(f"pass {p.name!r}, declared {p.exactness}: {error}") from error


__all__ = ["MAX_ROUNDS", "PassRecord", "Runner", "check_pass", "planned", "run", "select"]
