"""Examines every graph that a program compiles, and leaves what is found, without raising."""

import warnings
from collections.abc import Sequence
from pathlib import Path

from torch import fx

from dtensor.errors import PassError
from dtensor.passes import Pass

from ..backends.replay import NotReplayed, simulated
from ..backends.run_passes import WATCHERS
from ..estimates.meshes import mesh_groups
from ..recording.folder import rank_folder, write_whole
from ..recording.labels import labels
from .folder import write
from .graphs import examine

SKIPPED = "not_examined.txt"
"""The file of a rank that lists the graphs that could not be examined, and why."""


def watch(folder: Path | str) -> None:
    """Examine every graph that this process compiles from now on, before passes run on it, and write findings to a
    folder below `folder` for this rank: `rank0/000_joint_dead_code` is the first, on a joint graph, of that pass.

    Only the first finding on each pass is written. Graphs that cannot run on simulated ranks are listed in
    `not_examined.txt`. Nothing that fails here stops the program.
    """
    WATCHERS.append(_Watch(Path(folder)))


class _Watch:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.found: set[str] = set()
        self.skipped: list[str] = []

    def __call__(self, graph: fx.Graph, chosen: Sequence[Pass | str], where: str) -> None:
        try:
            self.examine(graph, chosen, where)
        except OSError as error:
            warnings.warn(f"the findings on the {where} graph are not written to {self.root}: {error}", stacklevel=2)

    def examine(self, graph: fx.Graph, chosen: Sequence[Pass | str], where: str) -> None:
        own = rank_folder(self.root)
        try:
            found = examine(graph, simulated(graph), chosen=chosen, meshes=mesh_groups(), where=where, labels=labels())
        except (NotReplayed, PassError) as reason:
            own.mkdir(parents=True, exist_ok=True)
            self.skipped.append(f"{where}: {reason}")
            write_whole(own / SKIPPED, "\n".join(self.skipped))
            return
        if found is not None and found.name not in self.found:
            self.found.add(found.name)
            write(found, own / f"{len(self.found) - 1:03}_{where}_{found.name}")


__all__ = ["watch"]
