"""Runs what a bisection left: a small graph, before and after a pass, on simulated ranks in one process."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from unittest.mock import patch

import torch.distributed as dist
from torch import fx

from dtensor.comm import collectives
from dtensor.comm.start_collectives import OVER_GLOO
from dtensor.errors import PassError
from dtensor.passes import REGISTERED, Compilation, MeshGroups, Pass, Simulation, text, verify
from dtensor.passes.stages import MARKED
from dtensor.prices.links import Link, Network
from dtensor.testing import fake_ranks

from .judging import Problem, Reference, Suspect
from .rebuild import Builder

Build = Callable[[Builder], fx.Graph]


@dataclass(frozen=True)
class Mesh:
    """The groups of a mesh.

    Attributes:
        groups: axes -> label of the group over them.
        sizes: sizes of the axes.
        links: the link along each axis.
    """

    groups: Mapping[tuple[int, ...], str]
    sizes: tuple[int, ...]
    links: tuple[Link, ...]


@dataclass(frozen=True)
class Case:
    """What a graph takes to run again.

    Attributes:
        rewrite: name of the pass.
        exactness: the exactness that the pass declared.
        ranks: number of simulated ranks.
        groups: label of a process group -> the rows of ranks that it stands for.
        meshes: the meshes that the pass knew.
        over_gloo: whether collectives start as they do over gloo.
        parts: number of microbatches, for the pass `split_batch`.
        seed: seed of the random inputs.
    """

    rewrite: str
    exactness: str
    ranks: int
    groups: Mapping[str, Sequence[Sequence[int]]]
    meshes: tuple[Mesh, ...] = ()
    over_gloo: bool = False
    parts: int = 1
    seed: int = 0


@dataclass(frozen=True)
class World:
    """Simulated ranks, and the names of their groups in this process."""

    names: Mapping[str, str]
    simulation: Simulation
    meshes: tuple[MeshGroups, ...]


@contextmanager
def world(case: Case) -> Iterator[World]:
    """Make the process groups of a case, of which only this process exists.

    Raises:
        ValueError: a default process group exists already (the message is torch's).
    """
    with fake_ranks(case.ranks):
        names = {label: _group(rows) for label, rows in case.groups.items()}
        partitions = {names[label]: tuple([tuple(row) for row in rows]) for label, rows in case.groups.items()}
        meshes = tuple([_mesh(mesh, names) for mesh in case.meshes])
        made = World(names, Simulation(case.ranks, partitions, case.seed), meshes)
        if not case.over_gloo:
            yield made
            return
        with patch.object(collectives, "starts", lambda group, device: OVER_GLOO):
            yield made


def _group(rows: Sequence[Sequence[int]]) -> str:
    row = next(row for row in rows if 0 in row)
    return dist.new_group(list(row)).group_name  # pyright: ignore


def _mesh(mesh: Mesh, names: Mapping[str, str]) -> MeshGroups:
    merged = [axes for axes in mesh.groups if len(axes) > 1]
    found = tuple([(axes, names[label]) for axes, label in mesh.groups.items()])
    return MeshGroups(found, Network.of(mesh.sizes, mesh.links, merged))


def rewrite(case: Case) -> Pass | None:
    """Return the pass of a case as it is here; None if there is none of that name."""
    compilation = Compilation(MARKED, "inductor", frozenset([p.name for p in REGISTERED]), split_batch=case.parts)
    return next((p.taking(compilation) for p in REGISTERED if p.name == case.rewrite), None)


def main(case: Case, before: Build, after: Build | None = None) -> int:
    """Print the graph before and after the pass, what differed when it was found, and what the pass as it is here does.

    Returns:
        1 if the pass as it is here goes wrong, else 0.
    """
    with world(case) as found:
        labels = {name: label for label, name in found.names.items()}
        graph = before(Builder(found.names))
        print(f"Before the pass {case.rewrite!r}:\n\n{text(graph, labels)}\n")
        if after is not None:
            made = after(Builder(found.names))
            print(f"As it was found, after the pass:\n\n{text(made, labels)}\n")
            print(f"As it was found: {_said(_recorded(graph, made, case, found))}.")
        p = rewrite(case)
        if p is None:
            print(f"There is no pass {case.rewrite!r} here.")
            return 0
        trial = Suspect(p, found.simulation, found.meshes).tried(graph)
        print(f"The pass as it is here: {_said(trial.problem)}.")
        if trial.problem is not None:
            print(f"\nAfter the pass as it is here:\n\n{text(trial.after, labels)}")
        return int(trial.problem is not None)


def _recorded(before: fx.Graph, after: fx.Graph, case: Case, found: World) -> Problem | None:
    try:
        verify(after, case.rewrite)
    except PassError as error:
        return Problem("invalid", str(error))
    return Reference(before, found.simulation).judge(after, case.exactness == "bitwise")


def _said(problem: Problem | None) -> str:
    return "the same values" if problem is None else problem.text


__all__ = ["Case", "Link", "Mesh", "World", "main", "rewrite", "world"]
