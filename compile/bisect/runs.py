"""Bisects a run: the program runs again and again with less compiled, in processes of its own, and is compared.

    eager                        the reference: nothing is compiled
    as written                   with each graph examined before its passes run; a finding ends the search
    Dynamo                       Dynamo's graph as it is
    AOTAutograd without passes   the graph of AOTAutograd, operator by operator
    AOTAutograd with passes      the same after the passes; if it differs, the list of passes is bisected
    Inductor without passes
    Inductor with passes         if it differs, the list of passes is bisected

The first that differs names who is to blame. The environment says how far to compile (`dtensor.program.environment`):
the program stays as it is.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Protocol

from dtensor.passes import REGISTERED
from dtensor.program import environment

from .blame import Blame
from .watching import GRAPHS

FINDINGS = "findings"
"""The folder of findings below the folder that is given; of a second bisection into the same folder `findings_1`."""


class RunFailed(Exception):
    """A run of the program failed; the message says how. It counts as a difference."""


class BisectRun(Protocol):
    """Runs a program in processes of its own."""

    def __call__(self, script: Path, arguments: Sequence[str], variables: Mapping[str, str]) -> Path:
        """Run `script` with its arguments and with these environment variables added, and return the folder that holds
        what it computed.

        Raises:
            RunFailed: the program fails.
        """
        ...


Comparison = Callable[[Path, Path], str | None]
"""Compares the folders of two runs, the right one first; returns what differs, in words, or None."""


def bisect(script: Path, arguments: Sequence[str], out: Path, *, run: BisectRun, differs: Comparison) -> Blame:
    """Find who is to blame if a compiled run of a program differs from an eager one.

    Args:
        script: path of the program.
        arguments: its command line arguments.
        out: the folder to leave findings in; made if it does not exist.
        run: runs the program.
        differs: compares two runs.

    Returns:
        The blame; `str` gives a report.

    Raises:
        RunFailed: the eager run fails.
    """
    return _Bisection(script, arguments, out.absolute(), run, differs).found()


class _Bisection:
    def __init__(self, script: Path, arguments: Sequence[str], out: Path, run: BisectRun, differs: Comparison) -> None:
        self.script, self.arguments, self.out, self.run, self.differs = script, arguments, out, run, differs
        self.runs: list[tuple[str, str | None]] = []
        self.findings = _new_folder(out)
        self.reference = run(script, arguments, _level("eager"))

    def found(self) -> Blame:
        what = self.compared("as written, each graph examined", {environment.FINDINGS: str(self.findings)})
        reports = sorted(self.findings.glob("rank*/*/report.txt"))
        if reports:
            return self.found_in(reports[0], what)
        return self.blamed("nobody") if what is None else self.by_level(what)

    def found_in(self, report: Path, what: str | None) -> Blame:
        """The blame that an examined graph gives."""
        folder = report.parent
        runs_alone = folder if (folder / "replay.py").exists() else None
        said = report.read_text("utf-8").rstrip()
        return Blame("pass", pass_of(folder), what or "", tuple(self.runs), self.graphs(), said, runs_alone)

    def by_level(self, what: str) -> Blame:
        """The blame of the first level that differs."""
        for level, who, title in LEVELS:
            if found := self.compared(f"{title}{', no passes' if level != 'dynamo' else ''}", _level(level, ())):
                return self.blamed(who, found)
            if level != "dynamo" and (found := self.compared(f"{title}, all passes", _level(level))):
                return self.by_pass(level, title, found)
        return self.blamed("options", what)

    def by_pass(self, level: str, title: str, what: str) -> Blame:
        """The blame of the first pass in the list with which a level differs; without passes it does not."""
        names = list(NAMES)
        low, high = 0, len(names)
        while high - low > 1:
            middle = (low + high) // 2
            found = self.compared(f"{title}, passes up to {names[middle - 1]}", _level(level, names[:middle]))
            low, high, what = (low, middle, found) if found else (middle, high, what)
        return self.blamed("pass", what, names[high - 1])

    def compared(self, title: str, variables: Mapping[str, str]) -> str | None:
        """Run the program, and return what differs from the eager run."""
        try:
            found = self.differs(self.reference, self.run(self.script, self.arguments, variables))
        except RunFailed as error:
            found = f"the run fails: {error}"
        self.runs.append((title, found))
        return found

    def blamed(self, who: str, what: str = "", rewrite: str = "") -> Blame:
        return Blame(who, rewrite, what, tuple(self.runs), self.graphs())

    def graphs(self) -> tuple[str, ...]:
        """What was found on each graph of the first rank that has any."""
        files = sorted(self.findings.glob(f"rank*/{GRAPHS}"))
        return tuple(files[0].read_text("utf-8").splitlines()) if files else ()


LEVELS = (
    ("dynamo", "Dynamo", "Dynamo"),
    ("aot_eager", "AOTAutograd", "AOTAutograd"),
    ("inductor", "Inductor", "Inductor"),
)
"""Level -> who is to blame if it differs without passes, and its title."""


NAMES = tuple([p.name for p in REGISTERED if not p.required])
"""The passes that can be left out, in order."""


def _level(level: str, passes: Sequence[str] | None = None) -> dict[str, str]:
    """The variables for a level, with these passes only; None for those that the program runs with."""
    variables = {environment.LEVEL: level}
    if passes is not None and not passes:
        variables[environment.VARIABLES["passes"]] = environment.OFF
    elif passes is not None:
        left_out = [name for name in NAMES if name not in passes]
        variables[environment.VARIABLES["disable"]] = ",".join(left_out)
    return variables


def _new_folder(out: Path) -> Path:
    """Make a folder for findings beside those of earlier bisections."""
    names = (FINDINGS if k == 0 else f"{FINDINGS}_{k}" for k in count())
    folder = next(out / name for name in names if not (out / name).exists())
    folder.mkdir(parents=True)
    return folder


def pass_of(folder: Path) -> str:
    """Return the pass that the folder of a finding is named after (`000_joint_dead_code`)."""
    return folder.name.split("_", 2)[2]


__all__ = ["BisectRun", "Comparison", "RunFailed", "bisect", "pass_of"]
