"""What a bisection found out: who is to blame, why, and where what it left is."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Blame:
    """The result of a bisection.

    Attributes:
        who: "pass", "Dynamo", "AOTAutograd", "Inductor", "options" (what else the program gives to torch.compile) or
            "nobody".
        rewrite: name of the pass, if it is one; else "".
        what: what differs, in words; "" if nothing does.
        runs: what was run, in order: the name of the run, and what differed from the eager run, or None.
        graphs: the graphs that were examined on simulated ranks, and what was found on each.
        report: the report on a graph on which the pass goes wrong; "" if none was found.
        folder: the folder with a graph that shows it and runs alone; None if there is none.
    """

    who: str
    rewrite: str = ""
    what: str = ""
    runs: tuple[tuple[str, str | None], ...] = ()
    graphs: tuple[str, ...] = ()
    report: str = ""
    folder: Path | None = None

    def __str__(self) -> str:
        lines = [SAID[self.who].format(self=self)]
        if self.what:
            lines.append(f"What differs from the eager run: {self.what}")
        if self.runs:
            lines += ["", "What was run:", *[f"  {name}: {what or 'as the eager run'}" for name, what in self.runs]]
        if self.graphs:
            lines += ["", "Graphs that were examined:", *[f"  {line}" for line in self.graphs]]
        if self.report:
            lines += ["", self.report]
        if self.folder is not None:
            lines += ["", f"To see it again: python {self.folder / 'replay.py'}"]
        return "\n".join(lines)


SAID = {
    "pass": "To blame: the pass {self.rewrite!r} of dtensor. Until it is repaired, leave it out: "
    "DTENSOR_DISABLE={self.rewrite}, or options={{'disable': ['{self.rewrite}']}}.",
    "Dynamo": "To blame: Dynamo, or how the program is traced. Its graph differs already when run as it is.",
    "AOTAutograd": "To blame: AOTAutograd, or operators as they run in a graph. It differs without any pass and "
    "without Inductor.",
    "Inductor": "To blame: Inductor. It differs without any pass, and the graph run operator by operator does not.",
    "options": "To blame: what else the program gives to torch.compile (a mode, another backend, other options). "
    "Compiled without these it does not differ.",
    "nobody": "Nobody is to blame: the compiled run does not differ from the eager one.",
}
"""Who is to blame -> the sentence that says so."""

__all__ = ["Blame"]
