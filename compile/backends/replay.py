"""The simulated ranks on which the option `verify` runs graphs before and after every pass.

The graph that this rank compiled is run as the graph of all ranks that communicate with this one over its groups,
directly or through others. This takes the partition of the ranks that each group's name stands for, and one graph that
is right for all of them and small enough for one process. Otherwise nothing is run, and a warning gives the reason:

    a group of some ranks that belongs to no known mesh      the name may stand for other ranks elsewhere
    a collective on local tensors of uneven lengths          other ranks have another graph
    data-dependent sizes
    more than `MAX_RANKS` ranks, or `MAX_BYTES` on all
    a graph that does not run on simulated ranks even before the passes
"""

import warnings
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import fx
from torch.distributed.device_mesh import DeviceMesh

from dtensor.errors import PassError
from dtensor.job.groups import group_ranks, group_size
from dtensor.mesh.mesh import known_meshes, partitions
from dtensor.passes import Simulation
from dtensor.passes.graph import ir
from dtensor.passes.graph.simulate import Partition
from dtensor.program.source_lines import users_level
from dtensor.torch_private.core import disable_current_modes
from dtensor.torch_private.symbolic_sizes import has_hint, hint

MAX_RANKS = 16
"""The largest number of ranks that is simulated."""
MAX_BYTES = 4 << 30
"""The most bytes that the tensors of a graph may take on all simulated ranks together."""


class NotReplayed(Exception):
    """A graph cannot be run on simulated ranks; the message is the reason."""


def simulation(graph: fx.Graph, where: str) -> Simulation | None:
    """Return the simulated ranks for the `where` graph (such as "forward"); None, with a warning, if it cannot be run
    on them."""
    try:
        return simulated(graph)
    except NotReplayed as reason:
        warnings.warn(
            f"verify=True, but the {where} graph is not replayed on simulated ranks: {reason}", stacklevel=users_level()
        )
        return None


def simulated(graph: fx.Graph) -> Simulation:
    """Return the simulated ranks for a graph.

    Raises:
        NotReplayed: it cannot be run on simulated ranks.
    """
    with disable_current_modes():
        return _simulation(graph)


def _simulation(graph: fx.Graph) -> Simulation:
    _check_sizes(graph)
    known = _known_partitions()
    used = sorted({group for node in graph.nodes if (group := ir.group(node)) is not None})
    ranks = _connected([_partition(name, known) for name in used])
    if len(ranks) > MAX_RANKS:
        raise NotReplayed(f"its groups join {len(ranks)} ranks, and at most {MAX_RANKS} are simulated")
    groups = {name: rows for name in {*known, *used} if (rows := _within(_partition(name, known), ranks)) is not None}
    for name in used:
        if name not in groups:
            raise NotReplayed(f"group {name!r} does not cover all the ranks that the graph's groups join: {ranks}")
    _check_bytes(graph, len(ranks))
    made = Simulation(len(ranks), groups)
    try:
        made.check(graph, graph, exact=False)
    except PassError as error:
        raise NotReplayed(f"it does not run there even before the passes: {error}") from error
    return made


def _known_partitions() -> dict[str, Partition]:
    """The groups of known meshes whose names still stand for the same ranks, with their partitions."""
    me = dist.get_rank()
    found: dict[str, Partition] = {}
    for facts in known_meshes():
        for name, rows in _partitions(facts.mesh).items():
            if _ranks(name) == next(row for row in rows if me in row):
                found[name] = rows
    return found


def _partitions(mesh: DeviceMesh) -> dict[str, Partition]:
    """The partitions of a mesh; none if its groups were destroyed."""
    try:
        return partitions(mesh)
    except (RuntimeError, ValueError, KeyError):  # torch raises these for unknown names
        return {}


def _ranks(name: str) -> tuple[int, ...] | None:
    """The ranks of the group of that name; None if it does not exist, or no longer does."""
    try:
        return group_ranks(name)
    except (RuntimeError, ValueError, KeyError):  # torch raises these for an unknown name
        return None


def _partition(name: str, known: dict[str, Partition]) -> Partition:
    if name in known:
        return known[name]
    ranks = _ranks(name)
    if ranks is None or len(ranks) < dist.get_world_size():
        raise NotReplayed(
            f"group {name!r} of ranks {list(ranks or ())} belongs to no known mesh, so it is unknown which ranks other "
            "ranks mean by it; use the groups of a mesh that some DTensor is on"
        )
    return (ranks,)


def _connected(groups: Iterable[Partition]) -> list[int]:
    """This rank and all ranks that rows of `groups` connect it with, directly or through others."""
    rows = [set(row) for rows in groups for row in rows]
    found = {dist.get_rank()}
    while len(wider := found.union(*[row for row in rows if row & found])) > len(found):
        found = wider
    return sorted(found)


def _within(rows: Partition, ranks: list[int]) -> Partition | None:
    """The rows that consist of `ranks`, renumbered from 0; None if they do not cover all of them."""
    place = {rank: k for k, rank in enumerate(ranks)}
    inside = [tuple([place[r] for r in row]) for row in rows if all(r in place for r in row)]
    return tuple(inside) if sum(map(len, inside)) == len(ranks) else None


def _check_sizes(graph: fx.Graph) -> None:
    """Check that all ranks that run this graph have local tensors of the same, known sizes."""
    for node in graph.nodes:
        sizes = [n for x in ir.tensors(node) for n in x.shape]
        if not all(has_hint(n) for n in sizes):
            raise NotReplayed(f"{node.format_node()} has data-dependent sizes")
    for node in graph.nodes:
        if any(not even for even in _evenness(node)):
            raise NotReplayed(
                f"{node.format_node()} communicates uneven shards, so other ranks have other local sizes and "
                "another graph"
            )


def _evenness(node: fx.Node) -> list[bool]:
    """For each dim that a collective splits or joins, whether all ranks have an equal part of it."""
    c = ir.collective(node)
    if c is not None:
        n, shape, found = group_size(c.group), ir.value(c.x).shape, []
        if c.gather_dim is not None:
            size = ir.value(c.size) if isinstance(c.size, fx.Node) else c.size
            found.append(hint(size) == n * hint(shape[c.gather_dim]))
        if c.scatter_dim is not None:
            found.append(hint(shape[c.scatter_dim]) % n == 0)
        return found
    if node.target in ir.ALL_TO_ALLS:
        given: Any = node.args
        splits = [hint(ir.value(s) if isinstance(s, fx.Node) else s) for s in (*given[1], *given[2])]
        return [len(set(splits)) == 1]
    return []


def _check_bytes(graph: fx.Graph, world: int) -> None:
    own = [node for node in graph.nodes if node.op != "output" and not ir.aliases(node)]
    total = world * sum([_bytes(x) for node in own for x in ir.tensors(node)])
    if total > MAX_BYTES:
        raise NotReplayed(
            f"its tensors take {total / 2**30:.1f} GiB on {world} ranks; at most {MAX_BYTES / 2**30:.0f} may be used"
        )


def _bytes(x: torch.Tensor) -> int:
    count = x.element_size()
    for n in x.shape:
        count *= hint(n)
    return count


__all__ = ["MAX_BYTES", "MAX_RANKS", "NotReplayed", "simulated", "simulation"]
