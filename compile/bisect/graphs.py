"""Bisects one graph: the first pass after which it is wrong, the step of that pass, and a small graph that shows it."""

from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from difflib import unified_diff

from torch import fx

from dtensor import passes
from dtensor.errors import PassError
from dtensor.passes import MeshGroups, Pass, Simulation, text
from dtensor.passes.graph.copying import copy_graph
from dtensor.passes.graph.verify import Seen, verify
from dtensor.torch_private.core import disable_current_modes

from .judging import Problem, Reference, Suspect, first_wrong_step, raised
from .program import NotRebuilt, Program, origin_of
from .shrink import Small, shrink

SECONDS = 60.0
"""How long a graph is made smaller."""

LINES = 60
"""As many lines of a graph a report shows."""


@dataclass(frozen=True)
class GraphFinding:
    """A pass that went wrong on a graph.

    Attributes:
        where: the graph: "joint", "forward", "backward" or "inference".
        suspect: the pass.
        round: the round of simplification, from 0.
        problem: what is wrong after the pass.
        before: the graph before the pass, and all that the pass has made of it.
        after: the graph after the pass.
        step: the number of the pass's first wrong step, from 1; 0 if it is none of them.
        steps: number of the pass's steps.
        node: name of the node that this step replaced or moved; "" if unknown.
        origins: the modules and lines of the program that the nodes around it came from.
        small: a small graph that shows the same; None if none could be made.
        why_not_small: why none could be made.
        labels: name of a process group -> what to print for it.
    """

    where: str
    suspect: Suspect
    round: int
    problem: Problem
    before: fx.Graph
    after: fx.Graph
    step: int = 0
    steps: int = 0
    node: str = ""
    origins: tuple[str, ...] = ()
    small: Small | None = None
    why_not_small: str = ""
    labels: dict[str, str] | None = None

    @property
    def name(self) -> str:
        """Name of the pass."""
        return self.suspect.rewrite.name

    def __str__(self) -> str:
        lines = [
            f"The pass {self.name!r} is to blame (round {self.round}, on the {self.where} graph, declared "
            f"{self.suspect.rewrite.exactness}).",
            f"After it: {self.problem.text}.",
        ]
        if self.step:
            lines.append(
                f"Its step {self.step} of {self.steps} is the first wrong one; it replaces or moves %{self.node}."
            )
        lines += [f"From {origin}." for origin in self.origins]
        return "\n".join([*lines, "", *self._graphs()])

    def _graphs(self) -> list[str]:
        if self.small is None:
            before, after = (text(g, self.labels).splitlines() for g in (self.before, self.after))
            shown = list(unified_diff(before, after, "before the pass", "after the pass", lineterm="", n=1))
            return [f"It was not made small: {self.why_not_small}.", "", *_cut(shown)]
        before, after = self.small.before.build(), self.small.trial.after
        return [
            f"A graph of {len(self.small.before)} nodes, made of {len(self.before.nodes)}, shows it. Before the pass:",
            "",
            *_cut(text(before, self.labels).splitlines()),
            "",
            f"After it ({self.small.trial.problem.text if self.small.trial.problem else ''}):",
            "",
            *_cut(text(after, self.labels).splitlines()),
        ]


def _cut(lines: list[str]) -> list[str]:
    return lines if len(lines) <= LINES else [*lines[:LINES], f"… and {len(lines) - LINES} lines more"]


def examine(
    graph: fx.Graph,
    simulation: Simulation,
    *,
    chosen: Sequence[Pass | str] | None = None,
    meshes: Sequence[MeshGroups] = (),
    where: str = "given",
    labels: dict[str, str] | None = None,
    seconds: float = SECONDS,
    known: Container[str] = (),
) -> GraphFinding | None:
    """Run passes on a copy of `graph`, one after the other, and find the first that goes wrong.

    A pass goes wrong if it raises, if the graph is not valid after it or does not run on the simulated ranks, or if
    values differ by more than the pass declares (`exactness`). The graph itself is left as it is.

    Args:
        graph: the graph.
        simulation: the simulated ranks.
        chosen: passes or their names; None for all.
        meshes: the meshes that the passes know.
        where: what to call the graph in the report.
        labels: name of a process group -> what to print for it.
        seconds: how long the graph is made smaller at most; 0 leaves it as it is.
        known: names of passes of which only the name is wanted; of others the step and a small graph are looked for.

    Returns:
        The finding; None if all passes do right.

    Raises:
        PassError: the graph is not valid, or does not run on the simulated ranks, before any pass.
        ValueError: a name belongs to no pass.
    """
    with disable_current_modes():
        verify(graph, "input", Seen.of(graph))
        Reference(graph, simulation).judge(graph, exact=False)
        found = _found(copy_graph(graph), simulation, passes.select(chosen), tuple(meshes), where)
        if found is None:
            return None
        found = replace(found, labels=labels)
        if found.name in known:
            return replace(found, why_not_small="the pass is known")
        return _made_small(_with_step(found), seconds)


class _Wrong(Exception):
    def __init__(self, finding: GraphFinding) -> None:
        super().__init__(finding.name)
        self.finding = finding


class _Watched(Pass):
    """A pass that is watched: it raises `_Wrong` if it goes wrong."""

    def __init__(self, suspect: Suspect, where: str, seen: Seen, reference: list[Reference]) -> None:
        self.suspect, self.where, self.seen, self.reference = suspect, where, seen, reference
        rewrite = suspect.rewrite
        self.name, self.stage, self.exactness = rewrite.name, rewrite.stage, rewrite.exactness
        self.runs = 0
        self.last: GraphFinding | None = None

    def __call__(self, graph: fx.Graph) -> int:
        before, self.runs = self.before(graph), self.runs + 1
        rewrites = 0
        try:
            rewrites = self.suspect.rewrite(graph)
            problem = self.judged(before, graph) if rewrites else None
        except Exception as error:  # whatever a faulty pass raises
            problem = raised(error)
        if rewrites or problem is not None:
            self.reference[:] = [Reference(copy_graph(graph), self.suspect.simulation)]
            nothing = problem or Problem("endless", "it changes the graph in every round")
            after = self.reference[0].graph
            self.last = GraphFinding(self.where, self.suspect, self.runs - 1, nothing, before.graph, after)
        if problem is not None and self.last is not None:
            raise _Wrong(self.last)
        return rewrites

    def before(self, graph: fx.Graph) -> Reference:
        """The graph as the last pass left it."""
        if not self.reference:
            self.reference.append(Reference(copy_graph(graph), self.suspect.simulation))
        return self.reference[0]

    def judged(self, before: Reference, graph: fx.Graph) -> Problem | None:
        try:
            verify(graph, self.name, self.seen)
        except PassError as error:
            return Problem("invalid", str(error))
        return before.judge(graph, self.suspect.exact)


def _found(
    graph: fx.Graph, simulation: Simulation, chosen: Sequence[Pass], meshes: tuple[MeshGroups, ...], where: str
) -> GraphFinding | None:
    seen = Seen.of(graph, traced=True)
    reference: list[Reference] = []  # shared: the graph as the last pass left it
    watched = [_Watched(Suspect(p, simulation, meshes), where, seen, reference) for p in chosen]
    try:
        passes.run(graph, passes=watched, verify=False, meshes=meshes)
    except _Wrong as wrong:
        return wrong.finding
    except PassError as error:  # rounds do not end
        last = max(watched, key=lambda w: w.runs if w.last is not None else -1).last
        return last and replace(last, problem=Problem("endless", str(error)))
    return None


def _with_step(found: GraphFinding) -> GraphFinding:
    if found.problem.kind == "endless":
        return found
    step, names = first_wrong_step(found.suspect, found.before)
    node = names[step - 1] if 0 < step <= len(names) else ""
    return replace(found, step=step, steps=len(names), node=node, origins=_origins(found.before, [node]))


def _origins(graph: fx.Graph, names: Sequence[str]) -> tuple[str, ...]:
    found = [origin_of(node) for node in graph.nodes if node.name in names]
    return tuple(dict.fromkeys([origin for origin in found if origin]))


def _made_small(found: GraphFinding, seconds: float) -> GraphFinding:
    if not seconds or found.problem.kind == "endless":
        return replace(found, why_not_small="rounds that do not end are not made small" if seconds else "no time given")
    try:
        program = Program.of(found.before).pruned()
    except NotRebuilt as reason:
        return replace(found, why_not_small=str(reason))
    small = shrink(found.suspect, program, found.problem, found.node or None, seconds)
    if small is None:
        return replace(found, why_not_small="with numbers for sizes, on CPUs, nothing goes wrong")
    names = [s.origin for s in small.before.steps if s.origin]
    return replace(found, small=small, origins=tuple(dict.fromkeys([*found.origins, *names])))


__all__ = ["GraphFinding", "examine"]
