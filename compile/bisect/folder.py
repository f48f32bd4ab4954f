"""The folder that a bisection leaves of a graph, which runs alone.

README.md      what it shows and how to run it
report.txt     the report
graph.py       the small graph before and after the pass, as Python that builds it
replay.py      runs both on simulated ranks
before.txt     the whole graph before the pass, as text
after.txt      the same after it
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from dtensor.comm import collectives
from dtensor.comm.start_collectives import OVER_GLOO
from dtensor.passes import SplitBatch, text
from dtensor.program.files import write_whole

from .graphs import GraphFinding
from .program import NotRebuilt, Program
from .written import function

README = """# A graph on which the pass `{name}` goes wrong

{problem}.

    python replay.py

runs the graph of `graph.py` before and after the pass on {ranks} simulated ranks, in one process without GPUs, and
prints what differs. It takes torch and dtensor. It exits with 1 while the pass of the installed dtensor goes wrong,
else with 0. `report.txt` says where in the program the graph came from; `before.txt` and `after.txt` are the whole
graph.
"""

REPLAY = '''"""Runs the graph before and after the pass on simulated ranks: python replay.py."""

import graph
from dtensor.compile.bisect.replay import main

raise SystemExit(main(graph.CASE, graph.before, getattr(graph, "after", None)))
'''

GRAPH = '''"""A graph on which the pass {name!r} goes wrong, before and after it. `replay.py` runs both."""

import operator

import torch
from torch import fx

from dtensor.compile.bisect.rebuild import Builder
from dtensor.compile.bisect.replay import Case, Link, Mesh
from dtensor.passes import CollectiveInfo

CASE = {case}


{functions}
'''


def write(finding: GraphFinding, folder: Path) -> Path:
    """Write a finding to a folder, which is made if it does not exist, and return it.

    Raises:
        OSError: it cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    labels = finding.labels or {}
    write_whole(folder / "report.txt", str(finding))
    write_whole(folder / "before.txt", text(finding.before, labels))
    write_whole(folder / "after.txt", text(finding.after, labels))
    if finding.small is not None:
        ranks = finding.suspect.simulation.world
        problem = finding.small.trial.problem
        said = problem.text if problem is not None else finding.problem.text
        write_whole(
            folder / "README.md", README.format(name=finding.name, problem=said[:1].upper() + said[1:], ranks=ranks)
        )
        write_whole(folder / "graph.py", graph_file(finding, finding.small.before))
        write_whole(folder / "replay.py", REPLAY)
    return folder


def graph_file(finding: GraphFinding, before: Program) -> str:
    """Return the text of `graph.py`."""
    assert finding.small is not None
    labels = _labels(finding)
    functions = [function("before", before, labels, "The graph before the pass.")]
    try:
        after = Program.of(finding.small.trial.after)
    except NotRebuilt:
        after = None
    if after is not None and finding.problem.kind in ("values", "fails"):
        functions.append(function("after", after, labels, "What the pass made of it when this was found."))
    return GRAPH.format(name=finding.name, case=case(finding, labels), functions="\n\n\n".join(functions))


def _labels(finding: GraphFinding) -> dict[str, str]:
    """A label for each group: that of the report if no other group has it, else the name."""
    given = finding.labels or {}
    names = list(finding.suspect.simulation.groups)
    found = [given.get(name, name) for name in names]
    return {name: label if found.count(label) == 1 else name for name, label in zip(names, found)}


def case(finding: GraphFinding, labels: Mapping[str, str]) -> str:
    """Return an expression for the `Case` of a finding."""
    suspect = finding.suspect
    groups = {labels[name]: [list(row) for row in rows] for name, rows in suspect.simulation.groups.items()}
    fields: dict[str, Any] = {
        "rewrite": repr(finding.name),
        "exactness": repr(suspect.rewrite.exactness),
        "ranks": suspect.simulation.world,
        "groups": groups,
        "meshes": _meshes(suspect.meshes, labels),
        "over_gloo": _over_gloo(suspect.simulation.groups),
        "seed": suspect.simulation.seed,
    }
    if isinstance(suspect.rewrite, SplitBatch):
        fields["parts"] = suspect.rewrite.parts
    return "\n".join(["Case(", *[f"    {key}={item}," for key, item in fields.items()], ")"])


def _meshes(meshes: Any, labels: Mapping[str, str]) -> str:
    found: list[str] = []
    for mesh in meshes:
        if all(name in labels for _, name in mesh.names):
            groups = {axes: labels[name] for axes, name in mesh.names}
            found.append(f"Mesh({groups}, {tuple(mesh.network.sizes)}, {tuple(mesh.network.links)})")
    return f"({', '.join(found)}{',' if found else ''})"


def _over_gloo(groups: Any) -> bool:
    return any(collectives.starts(name, torch.device("cpu")) is OVER_GLOO for name in groups)


__all__ = ["case", "graph_file", "write"]
