"""Makes a graph small on which a pass goes wrong, while the same pass goes wrong in the same way.

First the surroundings of the wrong step are tried, then outputs and calls are left out by halves, quarters and so on,
and sizes are halved, until nothing more can go or the time is up.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from dtensor.errors import PassError
from dtensor.passes.graph.verify import Seen, verify
from dtensor.torch_private.core import quiet_fakes

from .judging import Problem, Suspect, Trial
from .program import Kind, Program, Ref, refs

SLIP = 0.01
"""A smaller graph must differ by at least this part of what the larger differs by, or of 1 if that is less. Otherwise
the search could end at a difference of rounding, which is nobody's fault."""

WINDOWS = ((1, 1), (2, 1), (3, 2), (5, 3), (8, 5))
"""How many calls above the wrong step, and below it, are kept in the first tries."""


@dataclass(frozen=True)
class Small:
    """A small graph on which the pass goes wrong.

    Attributes:
        before: the graph.
        trial: what the pass made of it.
        tries: number of graphs that were tried.
    """

    before: Program
    trial: Trial
    tries: int


def shrink(
    suspect: Suspect, program: Program, problem: Problem, near: str | None = None, seconds: float = 60.0
) -> Small | None:
    """Return a small program on which the pass goes wrong as it does on `program`.

    Args:
        suspect: the pass.
        program: the program to make small.
        problem: what goes wrong on the graph that `program` was read from.
        near: the step of `program` next to which the pass goes wrong, if known.
        seconds: time after which nothing more is tried.

    Returns:
        The small program; None if nothing goes wrong on `program` itself: the fault then depends on something that a
        program does not have, such as symbolic sizes.
    """
    search = _Search(suspect, problem, time.monotonic() + seconds)
    if not search.accepts(program):
        return None
    search.to_window(near)
    size = -1
    while size != search.size() and not search.is_over():
        size = search.size()
        for reduce in (
            search.to_prefix,
            search.fewer_outputs,
            search.fewer_calls,
            search.shorter_chains,
            search.smaller_sizes,
        ):
            reduce()
    assert search.trial is not None
    return Small(search.best, search.trial, search.tries)


class _Search:
    def __init__(self, suspect: Suspect, problem: Problem, end: float) -> None:
        self.suspect, self.problem, self.end = suspect, problem, end
        self.best = Program((), ())
        self.trial: Trial | None = None
        self.tries = 0

    def size(self) -> int:
        """What is to become small: the calls, the outputs, and the sizes of inputs."""
        lengths = sum([n for s in self.best.steps if s.target is None for n in s.kind.shape])
        return 1000 * (len(self.best) + len(self.best.outputs)) + lengths

    def is_over(self) -> bool:
        return time.monotonic() > self.end

    def accepts(self, program: Program) -> bool:
        """Try a program; keep it if the pass goes wrong on it in the same way."""
        if self.is_over() and self.trial is not None:
            return False
        self.tries += 1
        try:
            with quiet_fakes():
                before = program.build()
                verify(before, "input", Seen.of(before, traced=True))
                trial = self.suspect.tried(before)
            if not self.is_same(trial.problem):
                return False
            self.best = Program.of(before)
        except PassError:  # the graph is not valid, or does not run
            return False
        except Exception:  # whatever operators raise on arguments that they do not accept
            return False
        self.trial = trial
        return True

    def is_same(self, found: Problem | None) -> bool:
        if found is None or found.kind != self.problem.kind:
            return False
        return found.amount >= SLIP * min(self.problem.amount, 1.0)

    def to_window(self, near: str | None) -> None:
        """Keep only what is around the wrong step, if that suffices."""
        names = [s.name for s in self.best.steps if s.target is not None]
        for above, below in WINDOWS if near in names else ():
            if self.accepts(_window(self.best, str(near), above, below)):
                return

    def to_prefix(self) -> None:
        """Return what is alive as early in the program as possible."""
        program = self.best
        low, high = 0, len(program)
        while high - low > 1 and not self.is_over():
            middle = (low + high) // 2
            low, high = (low, middle) if self.accepts(_until(program, middle)) else (middle, high)

    def fewer_outputs(self) -> None:
        self.by_parts(lambda: list(range(len(self.best.outputs))), self.returning_others)

    def returning_others(self, places: Sequence[int]) -> Program | None:
        kept = [x for k, x in enumerate(self.best.outputs) if k not in places]
        return self.best.returning(kept) if kept else None

    def fewer_calls(self) -> None:
        self.by_parts(lambda: [s.name for s in self.best.steps if s.target is not None], self.best_cut)

    def best_cut(self, names: Sequence[str]) -> Program | None:
        found = self.best.cut(names)
        return found if len(found) < len(self.best) or _calls(found) < _calls(self.best) else None

    def by_parts(self, items: Callable[[], list[Any]], without: Callable[[Sequence[Any]], Program | None]) -> None:
        """Leave out all items, then halves of them, then quarters, and so on to single ones."""
        length = len(items())
        while length and not self.is_over():
            start = 0
            while start < len(items()):
                candidate = without(items()[start : start + length])
                if candidate is None or not self.accepts(candidate):
                    start += length
            length //= 2

    def shorter_chains(self) -> None:
        """Let the readers of a call, and the output, read one of its operands instead."""
        for step in reversed(self.best.steps):
            kinds = {s.name: s.kind for s in self.best.steps}
            if step.target is None or step.name not in kinds:
                continue
            for name in dict.fromkeys(refs((step.args, step.kwargs))):
                alike = kinds.get(name) == kinds[step.name] and isinstance(kinds[step.name], Kind)
                if alike and self.accepts(self.best.without(step.name, name)):
                    break
            else:
                self.returning_operands(step.name)

    def returning_operands(self, name: str) -> None:
        """Return the operands of a call in place of its result."""
        step = next((s for s in self.best.steps if s.name == name), None)
        if step is None or Ref(name) not in self.best.outputs:
            return
        others = [x for x in self.best.outputs if x != Ref(name)]
        self.accepts(self.best.returning([*others, *map(Ref, dict.fromkeys(refs((step.args, step.kwargs))))]))

    def smaller_sizes(self) -> None:
        """Halve sizes, each wherever it occurs."""
        found = {n for s in self.best.steps if s.target is None for n in s.kind.shape if n > 2}
        for n in sorted(found, reverse=True):
            while n > 2 and n % 2 == 0 and self.accepts(self.best.resized(n, n // 2)):
                n //= 2


def _calls(program: Program) -> int:
    return len([s for s in program.steps if s.target is not None])


def _window(program: Program, near: str, above: int, below: int) -> Program:
    """The calls up to so many above the call `near`, and so many below it; what is read from elsewhere is an input."""
    operands = {s.name: refs((s.args, s.kwargs)) for s in program.steps}
    readers: dict[str, list[str]] = {}
    for name, found in operands.items():
        for x in found:
            readers.setdefault(x, []).append(name)
    lower = _reached([near], readers, below)
    kept = _reached(lower, operands, above + below)
    last = [name for name in kept if name in lower and not any(x in kept for x in readers.get(name, ()))]
    others = [s.name for s in program.steps if s.name not in kept and s.target is not None]
    return program.returning([Ref(name) for name in last or [near]]).cut(others)


def _reached(start: Iterable[str], edges: dict[str, list[str]], most: int) -> dict[str, None]:
    found, todo = dict.fromkeys(start), list(start)
    for _ in range(most):
        todo = [y for x in todo for y in edges.get(x, ()) if y not in found]
        found.update(dict.fromkeys(todo))
    return found


def _until(program: Program, count: int) -> Program:
    """The first `count` steps, which return what later ones read."""
    first, later = program.steps[:count], program.steps[count:]
    names = {s.name for s in first if isinstance(s.kind, Kind)}
    read = [name for s in later for name in refs((s.args, s.kwargs))]
    returned = [x for x in program.outputs if isinstance(x, Ref) and x.name in names]
    outputs = [*returned, *[Ref(name) for name in dict.fromkeys(read) if name in names and Ref(name) not in returned]]
    return Program(first, tuple(outputs)).pruned()


__all__ = ["Small", "shrink"]
