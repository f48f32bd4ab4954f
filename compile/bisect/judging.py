"""Whether a pass did right by a graph: the graph is valid after it, and gives the same values on simulated ranks."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from dtensor.errors import PassError
from dtensor.passes import MeshGroups, Pass, Simulation
from dtensor.passes.graph import groups, ir
from dtensor.passes.graph.compare import Difference, differences, random_inputs
from dtensor.passes.graph.copying import copy_graph
from dtensor.passes.graph.node_order import sort
from dtensor.passes.graph.simulate import simulate
from dtensor.passes.graph.steps import Steps, Stopped, limited
from dtensor.passes.graph.verify import Seen, verify
from dtensor.torch_private.core import disable_current_modes

CONFIRMED = 2
"""Values count as wrong if they differ with the first seed, and with at least one of as many others. A comparison or a
rounding in the graph can make much of a difference that is allowed, but seldom does so with other inputs."""


@dataclass(frozen=True)
class Problem:
    """What is wrong after a pass.

    Attributes:
        kind: "values" (they differ), "invalid" (the graph is not valid), "fails" (the graph does not run), "raises"
            (the pass does) or "endless" (rounds do not end).
        text: what is wrong, in words.
        found: for "values", the outputs that differ on each rank.
        world: number of simulated ranks.
    """

    kind: str
    text: str
    found: tuple[Difference, ...] = ()
    world: int = 0

    @property
    def amount(self) -> float:
        """The largest relative difference; 0 if no values differ."""
        return max([d.amount for d in self.found], default=0.0)


class Reference:
    """A valid graph whose values are right, and these values on simulated ranks.

    Args:
        graph: the graph.
        simulation: the simulated ranks.
    """

    def __init__(self, graph: fx.Graph, simulation: Simulation) -> None:
        self.graph = graph
        self.simulation = simulation
        self._known: dict[int, tuple[Any, Any]] = {}

    def judge(self, after: fx.Graph, exact: bool, confirm: bool = True) -> Problem | None:
        """Compare a valid graph with this one.

        Args:
            after: the graph.
            exact: whether values must be equal to the bit; else they may differ as `dtensor.passes.equivalent` says.
            confirm: whether values that differ must differ with other random inputs, too (`CONFIRMED`).

        Returns:
            What is wrong with `after`; None if nothing is.

        Raises:
            PassError: the graph of this reference does not run.
        """
        seed = self.simulation.seed
        first = self._compared(after, exact, seed)
        if first is None or first.kind != "values" or not confirm:
            return first
        return first if any(self._compared(after, exact, seed + k + 1) for k in range(CONFIRMED)) else None

    def run(self, seed: int) -> tuple[Any, Any]:
        """Return the inputs of each rank, and the results.

        Raises:
            PassError: the graph does not run.
        """
        if seed not in self._known:
            inputs = random_inputs(self.graph, self.simulation.groups, self.simulation.world, seed)
            self._known[seed] = inputs, simulate(self.graph, inputs, self.simulation.groups)
        return self._known[seed]

    def _compared(self, after: fx.Graph, exact: bool, seed: int) -> Problem | None:
        with disable_current_modes(), torch.no_grad():
            inputs, want = self.run(seed)
            try:
                got = simulate(after, inputs, self.simulation.groups)
            except PassError as error:
                return Problem("fails", f"the graph does not run: {error}")
            found = tuple(differences(want, got, exact))
        world = self.simulation.world
        return Problem("values", _described(found, world), found, world) if found else None


def _described(found: Sequence[Difference], world: int) -> str:
    outputs = sorted({d.output for d in found if d.output is not None})
    ranks = sorted({d.rank for d in found})
    worst = max(found, key=lambda d: d.amount)
    on = f"all {world} simulated ranks" if len(ranks) == world else f"simulated ranks {_listed(ranks)} of {world}"
    which = f"output{'s' if len(outputs) > 1 else ''} {_listed(outputs)} of the graph" if outputs else "outputs"
    much = f" (by up to {worst.amount:.2g} of the largest)" if math.isfinite(worst.amount) else ""
    return f"other values of {which} on {on}; the largest difference, on rank {worst.rank}: {worst.what}{much}"


def _listed(numbers: Sequence[int]) -> str:
    few = ", ".join(map(str, numbers[:8]))
    return f"{few}, …" if len(numbers) > 8 else few


@dataclass(frozen=True)
class Trial:
    """What a pass made of a graph.

    Attributes:
        after: the graph after the pass, or as far as the pass came.
        steps: names of the nodes that the steps of the pass replaced or moved.
        problem: what is wrong with it; None if nothing is.
    """

    after: fx.Graph
    steps: tuple[str, ...]
    problem: Problem | None


@dataclass(frozen=True)
class Suspect:
    """A pass, and what is needed to try it.

    Attributes:
        rewrite: the pass.
        simulation: the simulated ranks on which values are compared.
        meshes: the meshes that the pass knows.
    """

    rewrite: Pass
    simulation: Simulation
    meshes: tuple[MeshGroups, ...] = ()

    @property
    def exact(self) -> bool:
        """Whether the pass promises to keep every bit."""
        return self.rewrite.exactness == "bitwise"

    def tried(self, before: fx.Graph | Reference, most: int | None = None) -> Trial:
        """Run the pass, or only its first `most` steps, on a copy of a graph, and judge the result.

        Raises:
            PassError: `before` itself does not run.
        """
        reference = before if isinstance(before, Reference) else Reference(before, self.simulation)
        after = copy_graph(reference.graph)
        with groups.known(self.meshes), limited(most) as steps:
            problem = self._run(after)
        if problem is None:
            problem = self._judged(reference, after, steps)
        return Trial(after, tuple(steps.taken), problem)

    def _run(self, graph: fx.Graph) -> Problem | None:
        try:
            self.rewrite(graph)
        except Stopped:
            pass
        except Exception as error:  # whatever a faulty pass raises
            return raised(error)
        return None

    def _judged(self, before: Reference, after: fx.Graph, steps: Steps) -> Problem | None:
        if steps.most is not None:
            remove_unused(after)
            sort(after, {})
        try:
            verify(after, self.rewrite.name, Seen.of(after))
        except PassError as error:
            return Problem("invalid", str(error))
        return before.judge(after, self.exact, confirm=steps.most is None)


def raised(error: Exception) -> Problem:
    """The problem that a pass raises `error`."""
    return Problem("raises", f"it raises {type(error).__name__}: {error}")


def remove_unused(graph: fx.Graph) -> None:
    """Remove calls without users and effects, which a pass that was stopped leaves behind."""
    for node in reversed(list(graph.nodes)):
        waits = node.target is ir.WAIT or node.target in ir.STARTS
        if not node.users and node.op == "call_function" and (waits or ir.is_pure(node)):
            graph.erase_node(node)


def first_wrong_step(suspect: Suspect, before: fx.Graph) -> tuple[int, tuple[str, ...]]:
    """Return which step of a faulty pass is the first after which all that follows is wrong, and all its steps.

    The number counts from 1; it is 0 if the fault is outside of any step. A rewrite may take two steps, between which
    the values are wrong though the pass is right; so a state counts as wrong only if the next one is, too.

    Raises:
        PassError: `before` itself does not run.
    """
    reference = Reference(before, suspect.simulation)
    whole = suspect.tried(reference)
    total = len(whole.steps)
    if whole.problem is not None and whole.problem.kind == "raises":
        return total, whole.steps
    low, high = 0, total
    while high - low > 1:
        middle = (low + high) // 2
        good = next((k for k in (middle, middle + 1) if k < high and suspect.tried(reference, k).problem is None), None)
        low, high = (low, middle) if good is None else (good, high)
    wrong = total > 0 and suspect.tried(reference, high).problem is not None
    return (high if wrong else 0), whole.steps


__all__ = ["Problem", "Reference", "Suspect", "Trial", "first_wrong_step", "raised", "remove_unused"]
