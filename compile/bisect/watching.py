"""Examines every graph that a program compiles, and leaves what is found, without raising."""

import warnings
from collections.abc import Sequence
from pathlib import Path

from torch import fx

from dtensor.errors import PassError
from dtensor.passes import Pass
from dtensor.program.files import write_whole

from ..backends.replay import NotReplayed, simulated
from ..backends.run_passes import WATCHERS
from ..estimates.meshes import mesh_groups
from ..recording.folder import rank_folder
from ..recording.labels import labels
from .folder import write
from .graphs import examine

GRAPHS = "graphs.txt"
"""The file of a rank that lists its graphs: what was found on each, or why it could not be examined."""


def watch(folder: Path | str) -> None:
    """Examine every graph that this process compiles from now on, before passes run on it, and write findings to a
    folder below `folder` for this rank: `rank0/000_joint_dead_code` is the first, on a joint graph, of that pass.

    Only the first finding on each pass is written. `graphs.txt` lists all graphs, and those that cannot run on
    simulated ranks with the reason. Nothing that fails here stops the program.
    """
    WATCHERS.append(_Watch(Path(folder)))


class _Watch:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.found: set[str] = set()
        self.lines: list[str] = []

    def __call__(self, graph: fx.Graph, chosen: Sequence[Pass | str], where: str) -> None:
        try:
            own = rank_folder(self.root)
            own.mkdir(parents=True, exist_ok=True)
            said = self.examine(graph, chosen, where, own)
            self.lines.append(f"{where} graph of {len(graph.nodes)} nodes: {said}")
            write_whole(own / GRAPHS, "\n".join(self.lines))
        except OSError as error:
            warnings.warn(f"the findings on the {where} graph are not written to {self.root}: {error}", stacklevel=2)

    def examine(self, graph: fx.Graph, chosen: Sequence[Pass | str], where: str, own: Path) -> str:
        """Write what is found on a graph, and return it in a few words."""
        try:
            ranks = simulated(graph)
            found = examine(
                graph, ranks, chosen=chosen, meshes=mesh_groups(), where=where, labels=labels(), known=self.found
            )
        except (NotReplayed, PassError) as reason:
            return f"not examined: {reason}"
        except Exception as error:  # a fault of the search itself, or of an operator that only this graph has
            return f"not examined: the search fails: {type(error).__name__}: {error}"
        if found is None:
            return f"nothing is wrong on {ranks.world} simulated ranks"
        if found.name not in self.found:
            self.found.add(found.name)
            write(found, own / f"{len(self.found) - 1:03}_{where}_{found.name}")
        return f"the pass {found.name!r} goes wrong"


__all__ = ["GRAPHS", "watch"]
